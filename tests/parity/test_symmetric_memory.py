"""Blocks on operators over symmetric memory, with torch's own reference functions of them on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor, nn

from hyper_parallel.backends.torch import check_token_overlap
from hyper_parallel.backends.torch.tensor.collectives import gather, scatter
from hyper_parallel.backends.torch.tensor.symmetric_memory import OPERATORS, FusedOperators
from hyper_parallel.backends.torch.tensor.symmetric_tokens import SymmetricExecutor
from hyper_parallel.backends.torch.weights.lora import Adapter, adapt
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Overlap, Purpose, Strategy
from hyper_parallel.runtime import World, launch
from tests.parity.universal import Setup, check, reference

pytestmark = pytest.mark.parity

SYMMETRIC = Overlap(tp_symmetric=True)
REFERENCE = FusedOperators(
    symmetric_memory._fused_all_gather_matmul_fallback,
    symmetric_memory._fused_matmul_reduce_scatter_fallback,
)
BATCH, WIDTH, INNER = (1, 5), 6, 4
"""Five tokens on two ranks of three: the last token is padding."""


@contextmanager
def reference_operators() -> Iterator[Counter[str]]:
    """Give the CPU a row in the table of operators, functions of torch without symmetric memory; count their calls."""
    calls: Counter[str] = Counter()

    def gather_and_multiply(*args: Any) -> Any:
        calls["gather"] += 1
        return REFERENCE.all_gather_matmul(*args)

    def multiply_and_scatter(*args: Any) -> Any:
        calls["scatter"] += 1
        return REFERENCE.matmul_reduce_scatter(*args)

    OPERATORS["cpu"] = FusedOperators(gather_and_multiply, multiply_and_scatter)
    try:
        yield calls
    finally:
        del OPERATORS["cpu"]


def tensors(rank: int) -> tuple[Tensor, ...]:
    """Return this rank's tokens [1, 3, D], two column weights, a bias, and a row weight."""
    generator = torch.Generator().manual_seed(rank)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return x.requires_grad_()

    return (
        draw(1, 3, WIDTH),
        draw(INNER, WIDTH),
        draw(INNER, WIDTH),
        draw(INNER),
        draw(WIDTH, INNER),
    )


def fused_block(inputs: tuple[Tensor, ...], reads_tokens: bool) -> Tensor:
    part, first, second, bias, row = inputs
    executor, group, modules = SymmetricExecutor(), dist.group.WORLD, (nn.Identity(), nn.Identity())
    tokens = executor.gather(part * 1, group, BATCH)
    products = executor.product(first, bias, None), executor.product(second, None, None)
    tokens.multiply(dict(zip(modules, products, strict=True)))
    hidden = torch.tanh(tokens.products[modules[0]]) * tokens.products[modules[1]]
    if reads_tokens:
        hidden = hidden * tokens.whole().sum(-1, keepdim=True)
    return executor.scatter(hidden, executor.product(row, None, None), group, 6, lambda: None)


def serial_block(inputs: tuple[Tensor, ...], reads_tokens: bool) -> Tensor:
    part, first, second, bias, row = inputs
    tokens = gather(part, 1, dist.group.WORLD, Purpose.SEQUENCE_GATHER)[:, :5]
    hidden = torch.tanh(tokens @ first.t() + bias) * (tokens @ second.t())
    if reads_tokens:
        hidden = hidden * tokens.sum(-1, keepdim=True)
    out = torch.nn.functional.pad(hidden @ row.t(), (0, 0, 0, 1))
    return scatter(out, 1, dist.group.WORLD, Purpose.SEQUENCE_SCATTER)


def results(block: Any, rank: int, reads_tokens: bool, passes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    """Return the output of a block and the gradients of all inputs; each pass of backward computes some of them."""
    inputs = tensors(rank)
    out = block(inputs, reads_tokens)
    out_grad = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out) * (1 + rank)
    grads: dict[int, Tensor] = {}
    for numbers in passes:
        some = [inputs[n] for n in numbers]
        found = torch.autograd.grad(out, some, out_grad, retain_graph=True)
        grads.update(zip(numbers, found, strict=True))
    return [out.detach(), *(grads[n] for n in range(len(inputs)))]


AT_ONCE = ((0, 1, 2, 3, 4),)
SPLIT = ((0,), (4,), (1, 2, 3))
"""Passes of backward: tokens of the rank, the row weight alone, other weights."""
ROW_FIRST = ((4,), (0,), (1, 2, 3))


def test_fused_blocks_equal_serial_ones() -> None:
    """Values and all gradients, of one backward and of several for some of the inputs each."""

    def rank(_: int) -> list[float]:
        with World.join("cpu") as world, reference_operators():
            return [
                float((a - b).abs().max() / b.abs().max())
                for reads_tokens in (False, True)
                for passes in (AT_ONCE, SPLIT, ROW_FIRST)
                for a, b in zip(
                    results(fused_block, world.rank, reads_tokens, passes),
                    results(serial_block, world.rank, reads_tokens, AT_ONCE),
                    strict=True,
                )
            ]

    errors = [error for errors in launch(rank, 2, timeout_s=100) for error in errors]
    assert len(errors) == 2 * 6 * 6
    assert max(errors) < 1e-12


CASES = {
    Setup("llama", sequences=3, seq_len=15, tied=True): (
        Strategy(tp_x=2, overlap=SYMMETRIC),
        Strategy(tp_x=2, recompute="full", overlap=SYMMETRIC),
    ),
}
MORE = {
    **{
        Setup(family, sequences=4): (Strategy(tp_x=2, overlap=SYMMETRIC),)
        for family in ("gemma3_text", "glm4", "phi3", "gpt_oss", "deepseek_v3")
    },
    Setup("qwen3_moe", sequences=4): (Strategy(tp_x=2, ep=2, overlap=Overlap(ep_chunks=3, tp_symmetric=True)),),
}
ON_FOUR = {
    Setup("llama", sequences=8, accumulation=2): (
        Strategy(pp=2, tp_x=2, overlap=SYMMETRIC, schedule="zb-h1"),
        Strategy(tp_x=2, dp_shard=2, overlap=SYMMETRIC, recompute="selective"),
        Strategy(tp_x=2, cp=2, overlap=SYMMETRIC),
        Strategy(tp_x=4, overlap=SYMMETRIC),
    ),
}


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, CASES),
        pytest.param(2, MORE, marks=pytest.mark.slow),
        pytest.param(4, ON_FOUR, marks=pytest.mark.slow),
    ],
)
def test_a_step_over_symmetric_memory_equals_one_device(ranks: int, cases: dict[Setup, tuple[Strategy, ...]]) -> None:
    for setup in cases:
        reference(setup)

    def rank(_: int) -> list[str]:
        failures = []
        with World.join("cpu") as world, reference_operators() as calls:
            for setup, strategies in cases.items():
                for strategy in strategies:
                    calls.clear()
                    try:
                        check(reference(setup), strategy, world)
                        # At least the attention of each layer, forward and backward; experts are no such blocks.
                        least = 2 * setup.spec.num_layers // strategy.pp
                        assert min(calls["gather"], calls["scatter"]) >= least, calls
                    except AssertionError as error:
                        failures.append(f"{setup.family}: {error}")
        return failures

    failures = [text for texts in launch(rank, ranks, timeout_s=200) for text in texts]
    assert not failures, "\n".join(failures)


def test_ranks_without_cuda_are_refused_with_an_alternative() -> None:
    setup = Setup("llama", sequences=2)

    def rank(_: int) -> UnsupportedSharding:
        with World.join("cpu") as world, pytest.raises(UnsupportedSharding) as caught:
            check(reference(setup), Strategy(tp_x=2, overlap=SYMMETRIC), world)
        return caught.value

    reference(setup)
    for error in launch(rank, 2, timeout_s=100):
        assert error.code == "HP205"
        assert error.changes == {"overlap.tp": "chunks"}


@pytest.mark.parametrize(
    ("overlap", "dropout", "alternative"),
    [
        (SYMMETRIC, 0.0, "chunks"),
        (SYMMETRIC, 0.1, "none"),
        (Overlap(tp_chunks=2), 0.1, "none"),
        (Overlap(tp_chunks=2), 0.0, None),
    ],
)
def test_adapters_are_refused_where_blocks_cannot_run_them(
    overlap: Overlap, dropout: float, alternative: str | None
) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    adapt(model[0], torch.zeros(2, 4), torch.zeros(4, 2), Adapter(1.0, dropout))
    strategy = Strategy(tp_x=2, overlap=overlap)
    if alternative is None:
        check_token_overlap(model, strategy)
        return
    with pytest.raises(UnsupportedSharding) as caught:
        check_token_overlap(model, strategy)
    assert caught.value.changes == {"overlap.tp": alternative}


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        (
            "fused_all_gather_matmul",
            "(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True)",
        ),
        (
            "fused_matmul_reduce_scatter",
            "(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name)",
        ),
    ],
)
def test_torch_has_the_operator_with_these_arguments(name: str, schema: str) -> None:
    operator = getattr(torch.ops.symm_mem, name).default
    assert schema in str(operator._schema)
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", "CUDA")


def test_torch_allocates_a_workspace_of_a_group() -> None:
    names = symmetric_memory.get_symm_mem_workspace.__code__.co_varnames[:2]
    assert names == ("group_name", "min_size")
