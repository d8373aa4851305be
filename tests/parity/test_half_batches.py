"""Half-batches over the layers of a model: what runs while a collective is in flight, and code between the layers."""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import MethodType
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from greenlet import greenlet
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import OPTConfig, OPTForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from hyper_parallel.backends.torch import collectives
from hyper_parallel.backends.torch.data.unit_order import groups_of
from hyper_parallel.backends.torch.dropout import disable_dropout
from hyper_parallel.backends.torch.half_batch import HalfBatch, check_half_batches
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Overlap, Strategy
from hyper_parallel.runtime import World, forward_backward, handle, launch, parallelize
from tests.parity.planned import make_plan, whole
from tests.parity.universal import Reference, Setup, check
from tests.slow import slow_cells

pytestmark = pytest.mark.parity

HALVES = Strategy(tp_x=2, overlap=Overlap(half_batch=True))
EXPERT_HALVES = Strategy(dp_shard=2, ep=2, overlap=Overlap(half_batch=True))
EXPERT_CHUNKS = Strategy(dp_shard=2, ep=2, overlap=Overlap(ep_chunks=3))


@dataclass
class Collective:
    """A collective in flight: how much was computed until its end was awaited."""

    name: str
    products: int = 0
    waited: bool = False

    def wait(self, work: dist.Work) -> None:
        self.waited = True
        work.wait()


@dataclass
class Recorder(TorchDispatchMode):
    """Collectives that layers issue without waiting, in order, and the matrix products while each is in flight."""

    issued: list[Collective] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    @contextmanager
    def installed(self) -> Iterator[None]:
        owners = [
            (collectives, "all_gather_single"),
            (collectives, "_reduce_scatter"),
            (dist, "all_to_all_single"),
        ]
        originals = [getattr(owner, name) for owner, name in owners]
        for (owner, name), function in zip(owners, originals, strict=True):
            setattr(owner, name, self._recorded(function, name))
        try:
            with self:
                yield
        finally:
            for (owner, name), function in zip(owners, originals, strict=True):
                setattr(owner, name, function)

    def _recorded(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        recorder = self

        def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            work = function(*args, async_op=async_op, **kwargs)
            if not async_op:
                return work
            collective = Collective(f"{name} {collectives.current_purpose()}")
            recorder.issued.append(collective)

            class Awaited:
                def wait(self) -> None:
                    collective.wait(work)

            return Awaited()

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if re.search(r"::(mm|addmm|bmm|.*attention.*)$", func._schema.name):
            for collective in self.issued:
                collective.products += not collective.waited
        return func(*args, **(kwargs or {}))

    def exposed(self) -> int:
        """Return the number of collectives during which nothing was computed."""
        assert all(c.waited for c in self.issued)
        return sum(c.products == 0 for c in self.issued)


def record(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Recorder, Recorder]:
    """Record one forward and its backward."""
    forward, backward = Recorder(), Recorder()
    with forward.installed():
        loss = model(**batch, labels=batch["input_ids"], use_cache=False).loss
    with backward.installed():
        loss.backward()
    return forward, backward


@slow_cells("llama-strategy0-<lambda>-<lambda>")
@pytest.mark.parametrize(
    ("family", "strategy", "issued", "exposed"),
    [
        # Forward: the entry of both halves, the first gather, the last scatter and the last gather.
        ("llama", HALVES, lambda layers: 8 * layers + 4, lambda layers: 5),
        # The last combination; the halves do not meet at the end of a layer, of which FSDP frees the parameters.
        ("qwen3_moe", EXPERT_HALVES, lambda layers: 4 * layers, lambda layers: 1),
    ],
)
def test_layers_compute_while_their_collectives_are_in_flight(
    family: str, strategy: Strategy, issued: Callable[[int], int], exposed: Callable[[int], int]
) -> None:
    def rank(_: int) -> list[Any]:
        found: list[Any] = []
        with World.join("cpu") as world:
            for layers in (2, 4):
                setup = Setup(family, sequences=4 * strategy.dp, config=(("num_hidden_layers", layers),))
                model = parallelize(setup.build(), setup.plan(strategy), world)
                batch = {k: v[:4] for k, v in setup.batch().items()}
                for direction in record(model, batch):
                    names = [c.name for c in direction.issued]
                    found.append((layers, names, direction.exposed()))
        return found

    ranks = launch(rank, 2, timeout_s=100)
    assert ranks[0] == ranks[1]
    for layers, names, number in ranks[0]:
        assert len(names) == issued(layers)
        assert number == exposed(layers)


def test_halves_do_not_meet_at_the_end_of_recomputed_layers() -> None:
    """Forward exposes the ends of the model alone. Recomputation exposes its first exchange and, with tp, its last."""
    layers = 3
    cases = {
        "llama": (HALVES, (8 * layers + 4, 5), (14 * layers + 4, 2 * layers + 5)),
        "qwen3_moe": (EXPERT_HALVES, (4 * layers, 1), (8 * layers, layers + 1)),
    }

    def rank(_: int) -> dict[str, list[tuple[int, int]]]:
        counts = {}
        with World.join("cpu") as world:
            for family, (halves, *_) in cases.items():
                strategy = replace(halves, recompute="full")
                setup = Setup(family, sequences=4 * strategy.dp, config=(("num_hidden_layers", layers),))
                model = parallelize(setup.build(), setup.plan(strategy), world)
                batch = {k: v[:4] for k, v in setup.batch().items()}
                counts[family] = [(len(d.issued), d.exposed()) for d in record(model, batch)]
        return counts

    ranks = launch(rank, 2, timeout_s=100)
    assert ranks[0] == ranks[1] == {family: [*counts] for family, (_, *counts) in cases.items()}


@pytest.mark.parametrize("problem", ["change_input", "save_less"])
def test_layers_that_cannot_be_recomputed_are_refused(problem: str) -> None:
    """A change of the input between forward and backward, and a layer that computes less when it runs again."""
    setup = Setup("llama", sequences=4)

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            strategy = replace(HALVES, recompute="full")
            model = parallelize(setup.build(), setup.plan(strategy), world)
            layer = model.model.layers[1]
            runs, inputs = [], []
            norm, inner = layer.input_layernorm, layer.mlp.forward
            norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))

            def forward(x: Tensor) -> Tensor:
                runs.append(x)
                return x * 1.0 if problem == "save_less" and len(runs) > 2 else inner(x)

            layer.mlp.forward = forward
            batch = setup.batch()
            loss = model(**batch, labels=batch["input_ids"], use_cache=False).loss
            if problem == "change_input":
                with torch.no_grad():
                    inputs[0].mul_(2.0)
            with pytest.raises(UnsupportedSharding, match="recomputed") as caught:
                loss.backward()
            assert caught.value.code == "HP205"
            assert "training.recompute=none" in str(caught.value)

    launch(rank, 2, timeout_s=100)


@pytest.mark.parametrize("sizes", [(4, 3), (1, 4), (2, 4)])
def test_expert_ranks_with_other_batch_sizes_halve_their_passes_together(
    sizes: tuple[int, int],
) -> None:
    """Otherwise ranks would run different numbers of exchanges, and read rows of one exchange as those of another."""
    setup = Setup("qwen3_moe", sequences=sum(sizes))

    def rank(index: int) -> dict[str, Any]:
        results: dict[str, Any] = {}
        with World.join("cpu") as world:
            batch = setup.batch()
            own = {k: v.split(sizes)[index] for k, v in batch.items()}
            for name, overlap in (("serial", Overlap()), ("halves", EXPERT_HALVES.overlap)):
                strategy = replace(EXPERT_HALVES, overlap=overlap)
                planned = replace(setup, sequences=8).plan(strategy)
                model = parallelize(setup.build(), planned, world)
                loss = forward_backward(model, [{**own, "labels": own["input_ids"]}])
                results[name] = float(loss), whole_gradients(model)
            known = handle(model)
            assert known is not None
            assert known.halves is not None
            results["counts"] = known.halves.take_counts()
        return results

    for result in launch(rank, 2, timeout_s=100):
        halved = all(size % 2 == 0 for size in sizes)
        assert (result["counts"]["halved_layers"] > 0) == halved
        assert (result["counts"]["whole_layers"] > 0) != halved
        torch.testing.assert_close(result["halves"], result["serial"], rtol=1e-10, atol=1e-14)


def test_weight_gradients_of_experts_hide_the_last_exchange_of_backward() -> None:
    """Forward exposes the first dispatch and the last combination of a layer, backward only the first exchange."""
    layers = 2

    def rank(_: int) -> list[tuple[int, int]]:
        with World.join("cpu") as world:
            setup = Setup("qwen3_moe", sequences=8, config=(("num_hidden_layers", layers),))
            model = parallelize(setup.build(), setup.plan(EXPERT_CHUNKS), world)
            batch = {k: v[:4] for k, v in setup.batch().items()}
            return [(len(d.issued), d.exposed()) for d in record(model, batch)]

    forward, backward = launch(rank, 2, timeout_s=100)[0]
    assert forward == (6 * layers, 2 * layers)
    assert backward == (6 * layers, layers)


def test_weight_gradients_of_token_chunks_hide_collectives_of_backward() -> None:
    """Forward exposes two collectives of each block. In backward, only the first gather of a layer finds no product."""
    strategy, layers = Strategy(tp_x=2, overlap=Overlap(tp_chunks=4)), 2

    def rank(_: int) -> list[tuple[int, int]]:
        with World.join("cpu") as world:
            setup = Setup("llama", sequences=4, config=(("num_hidden_layers", layers),))
            model = parallelize(setup.build(), setup.plan(strategy), world)
            batch = {k: v[:4] for k, v in setup.batch().items()}
            return [(len(d.issued), d.exposed()) for d in record(model, batch)]

    forward, backward = launch(rank, 2, timeout_s=100)[0]
    assert forward == (16 * layers, 4 * layers)
    assert backward == (16 * layers, layers)


def scale(self: nn.Module, index: int, hidden: Tensor) -> Tensor:
    return hidden * 0.9


def add_first(self: nn.Module, index: int, hidden: Tensor) -> Tensor:
    if index == 0:
        self.first = hidden
    return hidden + self.first if index == 2 else hidden


def read_without_gradient(self: nn.Module, index: int, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        assert hidden.isfinite().all()
    return hidden


def change_in_place(self: nn.Module, index: int, hidden: Tensor) -> Tensor:
    hidden *= 0.9
    hidden[..., :2] += 0.1
    return hidden


def fail_if_told(self: nn.Module, index: int, hidden: Tensor) -> Tensor:
    assert isinstance(hidden, Tensor)
    assert hidden.shape[-1] == self.config.hidden_size
    if getattr(self, "fails", False):
        raise LookupError("between layers")
    return hidden


TOUCHES = (scale, add_first, read_without_gradient, change_in_place, fail_if_told)
BETWEEN = {touch.__name__: touch for touch in TOUCHES}


@dataclass(frozen=True)
class Between(Setup):
    """Setup of a model with code between its layers; `returns_tuples`: layers return a tuple, as in older models."""

    between: str = "fail_if_told"
    returns_tuples: bool = False

    def build(self) -> nn.Module:
        model = super().build()
        touch, returns_tuples = BETWEEN[self.between], self.returns_tuples

        def forward(self: Any, input_ids: Tensor, **kwargs: Any) -> BaseModelOutputWithPast:
            hidden = self.embed_tokens(input_ids)
            positions = torch.arange(input_ids.shape[1])[None]
            rotary = self.rotary_emb(hidden, position_ids=positions)
            for index, layer in enumerate(self.layers):
                out = layer(hidden, attention_mask=None, position_embeddings=rotary, position_ids=positions)
                hidden = touch(self, index, out[0] if returns_tuples else out)
            return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))

        base: Any = model.model
        base.forward = MethodType(forward, base)
        if returns_tuples:
            for layer in base.layers:
                layer.forward = MethodType(_with_norm(type(layer).forward), layer)
        return model


def _with_norm(inner: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None, Tensor]]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None, Tensor]:
        hidden = inner(self, *args, **kwargs)
        return hidden, None, hidden.square().sum(-1)

    return forward


def _layers(layers: int, **values: Any) -> Between:
    return Between("llama", sequences=4, config=(("num_hidden_layers", layers),), **values)


SETUPS = [_layers(3, between=name, returns_tuples=name in ("scale", "fail_if_told")) for name in BETWEEN]


@pytest.mark.slow
def test_code_between_layers_sees_both_halves() -> None:
    references = [Reference(setup) for setup in SETUPS]

    def rank(_: int) -> list[str]:
        failures = []
        with World.join("cpu") as world:
            for reference in references:
                try:
                    check(reference, HALVES, world, plan=None)
                except AssertionError as error:
                    failures.append(f"{reference.setup}: {error}")
        return failures

    assert launch(rank, 2, timeout_s=100) == [[], []]


def suspended() -> list[greenlet]:
    gc.collect()
    return [g for g in gc.get_objects() if isinstance(g, greenlet) and g and g.parent is not None]


def test_an_error_ends_both_halves_and_the_next_pass_is_right() -> None:
    setup = _layers(3)
    expected = Reference(setup).result

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            model = parallelize(setup.build(), setup.plan(HALVES), world)
            batch = setup.batch()
            tokens = int((batch["shift_labels"] != -100).sum())

            def loss() -> float:
                total = torch.tensor(float(forward_backward(model, [batch], tokens)))
                model.zero_grad()
                dist.all_reduce(total)
                return float(total)

            with torch.no_grad():  # a pass without backward
                model(**batch, use_cache=False)
            assert loss() == pytest.approx(expected.share, rel=1e-6)
            mlp = model.model.layers[0].mlp
            inner, calls = mlp.forward, []

            def fail_in_second_half(x: Tensor) -> Tensor:
                out = inner(x)
                calls.append(out)
                if len(calls) == 2:
                    raise ArithmeticError("second half")
                return out

            mlp.forward = fail_in_second_half
            with pytest.raises(ArithmeticError, match="second half") as caught:
                model(**batch, use_cache=False)
            frames = [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
            assert frames[-1] == "fail_in_second_half"
            mlp.forward = inner
            assert not suspended()
            assert loss() == pytest.approx(expected.share, rel=1e-6)

            model.model.fails = True
            with pytest.raises(LookupError, match="between layers"):
                model(**batch, use_cache=False)
            model.model.fails = False
            assert not suspended()
            assert loss() == pytest.approx(expected.share, rel=1e-6)

    launch(rank, 2, timeout_s=100)


def test_what_layers_record_is_whole_or_refused_and_compiled_layers_are_refused() -> None:
    setup = Setup("qwen3_moe", sequences=8, config=(("num_hidden_layers", 3),))
    serial = replace(EXPERT_HALVES, overlap=Overlap())

    def rank(index: int) -> None:
        ids = setup.batch()["input_ids"]
        own = slice(4 * index, 4 * index + 4)
        with World.join("cpu") as world:
            recorded = []
            for strategy in (serial, EXPERT_HALVES):
                model = parallelize(setup.build(), setup.plan(strategy), world)
                with torch.no_grad():
                    out = model(input_ids=ids[own], output_hidden_states=True)
                recorded.append(out.hidden_states)
            torch.testing.assert_close(*recorded, rtol=1e-10, atol=1e-10)
            refusals = {
                "output_attentions": "two values per layer",
                "output_router_logits": "not returned",
            }
            for option, reason in refusals.items():
                with pytest.raises(UnsupportedSharding, match=reason) as caught:
                    model(input_ids=ids[own], **{option: True})
                assert caught.value.code == "HP205"
                assert caught.value.hint
            model = parallelize(setup.build(), setup.plan(HALVES), world)
            with pytest.raises(UnsupportedSharding, match="output_hidden_states"):
                model(input_ids=ids, output_hidden_states=True)
            model.model.layers[1].compile(backend="eager")
            with pytest.raises(UnsupportedSharding, match="compiled layer"):
                model(input_ids=ids)

    launch(rank, 2, timeout_s=100)


def test_layers_skipped_at_random_are_refused_by_name() -> None:
    config = OPTConfig(
        vocab_size=96, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, dropout=0.0,
        word_embed_proj_dim=32, layerdrop=0.5,
    )  # fmt: skip
    model = OPTForCausalLM(config)
    with pytest.raises(UnsupportedSharding, match="skipped at random") as caught:
        check_half_batches(model, HALVES, has_balance_loss=False)
    assert "layerdrop=0.5" in str(caught.value)
    model.model.decoder.layerdrop = config.layerdrop = 0.0
    check_half_batches(model, HALVES, has_balance_loss=False)


def test_lists_of_rates_that_are_all_zero_are_no_dropout() -> None:
    model = torch.nn.Linear(2, 2)
    model.drop_rates = [0.0, 0.1]
    with pytest.raises(UnsupportedSharding, match="half-batches do not work with dropout"):
        check_half_batches(model, HALVES, has_balance_loss=False)
    disable_dropout(model)
    assert model.drop_rates == [0.0, 0.0]
    check_half_batches(model, HALVES, has_balance_loss=False)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def call_function(self: nn.Module, index: int, hidden: Tensor) -> Tensor:
    return Double.apply(hidden)


def test_a_function_that_would_lose_the_gradient_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(BETWEEN, "call_function", call_function)
    setup = _layers(2, between="call_function")

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            model = parallelize(setup.build(), setup.plan(HALVES), world)
            with pytest.raises(UnsupportedSharding, match="autograd function"):
                forward_backward(model, [setup.batch()], 1)

    launch(rank, 2, timeout_s=100)


def record_gathered_layers(model: nn.Module) -> dict[str, int]:
    """Record the most layers that FSDP has gathered or prefetched, at entries in forward and reductions in backward."""
    groups = [g for layer in model.model.layers for g in groups_of(fully_shard.state(layer))]
    most = {"forward": 0, "backward": 0}

    def count(direction: str, *_: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # a recomputed forward
            direction = "backward"
        gathered = [g for g in groups if g.is_unsharded or g._all_gather_result is not None]
        most[direction] = max(most[direction], len(gathered))

    def reduce(inner: Callable[..., None], *args: Any) -> None:
        count("backward")
        inner(*args)

    for layer in model.model.layers:
        layer.input_layernorm.register_forward_pre_hook(partial(count, "forward"))
    for group in groups:
        group.post_backward = partial(reduce, group.post_backward)
    return most


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


@slow_cells("full")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_fsdp_layers_with_whole_and_halved_batches_run_collectives_in_one_order(
    recompute: Literal["none", "full"],
) -> None:
    """Two ranks have four sequences and run halves, the others have three, in steps of two microbatches."""
    setup = Setup("llama", sequences=14, tied=True, config=(("num_hidden_layers", 4),))
    strategy = Strategy(tp_x=2, dp_shard=2, recompute=recompute, overlap=Overlap(half_batch=True))
    batch, plan = setup.batch(), setup.plan(strategy)
    tokens = int((batch["shift_labels"] != -100).sum())
    expected = Reference(setup).result.grads

    def rank(index: int) -> dict[str, int]:
        first, count = (0, 4) if index < 2 else (4, 3)
        parts = [{k: v[start : start + count] for k, v in batch.items()} for start in (first, first + 7)]
        with World.join("cpu") as world:
            model = parallelize(setup.build(), plan, world)
            most = record_gathered_layers(model)
            for _ in range(3):  # negotiated, then learned
                forward_backward(model, parts, tokens)
                for name, gradient in whole_gradients(model).items():
                    torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)
            counts = handle(model).halves.take_counts()
            assert counts == dict(zip(counts, (24, 0) if index < 2 else (0, 24), strict=True))
        return most

    ranks = launch(rank, 4, timeout_s=100)
    assert [r["forward"] for r in ranks] == [2, 2, 1, 1]
    # The layer to reduce, the one that the first half has entered, and a prefetched one.
    assert {r["backward"] for r in ranks} == {3}


def test_layers_of_fsdp_cast_the_inputs_of_each_half() -> None:
    setup = Setup("qwen3_moe", sequences=8, config=(("num_hidden_layers", 3),))
    workload = replace(setup.workload(EXPERT_HALVES), compute_dtype="float32")

    def rank(index: int) -> None:
        batch = {k: v[4 * index : 4 * index + 4] for k, v in setup.batch().items()}
        with World.join("cpu") as world:
            found = []
            for strategy in (replace(EXPERT_HALVES, overlap=Overlap()), EXPERT_HALVES):
                plan = make_plan(setup.spec, strategy, workload)
                model = parallelize(setup.build(), plan, world)
                dtypes = set()
                for layer in model.model.layers:
                    layer.input_layernorm.register_forward_hook(
                        lambda _, args, out, dtypes=dtypes: dtypes.update({args[0].dtype, out.dtype})
                    )
                forward_backward(model, [batch], 100)
                found.append(whole_gradients(model))
                assert dtypes == {torch.float32}
            for name, gradient in found[1].items():
                torch.testing.assert_close(gradient, found[0][name], rtol=1e-4, atol=1e-5)

    launch(rank, 2, timeout_s=100)


class _Doubling(nn.Module):
    def forward(self, hidden: Tensor, memory: dict[str, Tensor] | None = None) -> Tensor:
        return 2 * hidden


def test_a_layer_with_an_argument_that_cannot_be_halved_reads_both_halves() -> None:
    layers, halves = [_Doubling(), _Doubling()], HalfBatch(HALVES.overlap, None, joins_layers=False)
    halves.install(layers, {})
    hidden = layers[0](torch.ones(4, 3, 2))
    assert torch.equal(layers[1](hidden, memory={}), torch.full((4, 3, 2), 4.0))
    assert halves.take_counts() == {"halved_layers": 1, "whole_layers": 1}
