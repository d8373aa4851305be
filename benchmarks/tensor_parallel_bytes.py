"""Bytes that tensor parallelism sends on one and on two axes, counted in the program of one rank.

The program of a rank runs on a fake process group and fake tensors, so a layer of a 70B model on 16 ranks is counted in
seconds. The bytes of one decoder layer, forward and backward of one microbatch, are the difference between models with
two layers and one layer. Every count is compared with the formula of `hyper_parallel.cost`, per collective.

    python benchmarks/tensor_parallel_bytes.py            # a table
    python benchmarks/tensor_parallel_bytes.py --json
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import warnings
from collections import Counter

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # collectives on tensors without memory
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from hyper_parallel.cost import step_collectives
from hyper_parallel.ir import BLOCK_SHAPES, ModelRef, Plan, Rule, Strategy, Workload
from hyper_parallel.model import spec_from_config
from hyper_parallel.runtime import CommCounter, World, accumulate, parallelize
from hyper_parallel.shard import family_rules, plan_layouts

ONCE_A_STEP = ("gradients of whole parameters", "gradient norm")
Sent = Counter[tuple[str, tuple[str, ...]]]


@dataclasses.dataclass(frozen=True)
class Dims:
    """Shape of a decoder layer."""

    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    vocab: int
    experts: bool = False  # the feed-forward part belongs to expert parallelism


LLAMA_70B = Dims(8192, 28672, 64, 8, 128256)
MIXTRAL_8X22B = Dims(6144, 16384, 48, 8, 32768, experts=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """Comparison of one and two axes with equal tokens.

    Attributes:
        name: Name in the output.
        dims: Shape of the layer.
        grid: Degrees of tp_x and tp_y.
        tokens: Tokens of the microbatch.
        shapes: Candidate values of `attention_shape` and `mlp_shape`, of which the best counts.
        target: Bar on the relative change against one axis; None: no bar.
        relayout: Whether redistributions between the blocks count.
    """

    name: str
    dims: Dims
    grid: tuple[int, int]
    tokens: int
    shapes: tuple[tuple[str, str], ...]
    target: float | None
    relayout: bool = True


PURE = (("2d", "2d"),)
ANY = tuple(itertools.product(BLOCK_SHAPES, BLOCK_SHAPES))
CASES = (
    Case("70B, TP8, pure 2-D", LLAMA_70B, (4, 2), 8192, PURE, -0.14),
    Case("70B, TP16, pure 2-D", LLAMA_70B, (8, 2), 8192, PURE, -0.33),
    Case("70B, TP8, best shape per block", LLAMA_70B, (4, 2), 16384, ANY, -0.28),
    Case("8x22B attention, TP8, 2-D", MIXTRAL_8X22B, (4, 2), 8192, (("2d", "1d"),), -0.41, relayout=False),
    Case("8x22B attention, TP8, 2-D with relayout", MIXTRAL_8X22B, (4, 2), 8192, (("2d", "1d"),), None),
    Case("8x22B attention, TP8, weight", MIXTRAL_8X22B, (4, 2), 16384, (("weight", "1d"),), -0.41),
)  # fmt: skip


def count(dims: Dims, strategy: Strategy, tokens: int, layers: int) -> Sent:
    """Return the bytes that rank 0 sends in forward and backward of one microbatch, by kind and axes."""
    config = LlamaConfig(
        vocab_size=dims.vocab, hidden_size=dims.hidden, intermediate_size=dims.mlp, num_hidden_layers=layers,
        num_attention_heads=dims.heads, num_key_value_heads=dims.kv_heads, head_dim=128,
        max_position_embeddings=tokens, tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    spec = spec_from_config(config.to_dict(), name="counted")
    params = {p.name: p for block in spec.blocks for p in block.params}
    layouts = plan_layouts(
        [(p.name, p.shape, p.dims) for p in params.values()], family_rules("llama"), strategy,
        num_heads=dims.heads, num_kv_heads=dims.kv_heads, head_dim=128, vocab_size=dims.vocab,
    ).layouts  # fmt: skip
    workload = Workload(
        tokens, microbatch=1, accumulation_steps=1,
        compute_dtype="bfloat16", param_dtype="bfloat16", reduce_dtype="bfloat16",
    )  # fmt: skip
    formula = step_collectives(spec, layouts, strategy, workload)
    reference = ModelRef("counted", "llama", spec.num_params, spec.num_params, 0.0, "")
    plan = Plan(
        reference, "simulated", 0.0, workload.resolve(1), strategy, layouts, 0.0, (), (), 0,
        collectives=formula,
    )  # fmt: skip
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=strategy.world_size)
    try:
        with World.join("cpu") as world:
            with torch.device("meta"):
                model = LlamaForCausalLM(config).to(torch.bfloat16)
                ids = torch.zeros(1, tokens, dtype=torch.long)
                # With a mask, the model does not search the ids for document boundaries.
                mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool)
            parallelize(model, plan, world)
            counter = CommCounter(strategy.mesh(), 0)
            with counter, accumulate(model):
                model(
                    input_ids=ids,
                    attention_mask=mask,
                    shift_labels=ids,
                    labels=ids,
                    num_items_in_batch=tokens,
                ).loss.backward()
    finally:
        dist.destroy_process_group()
    expected: Sent = Counter()
    for item in formula:
        if item.purpose not in ONCE_A_STEP:
            expected[item.kind, item.axes] += item.sent_bytes
    if +counter.sent_bytes != +expected:
        raise AssertionError(f"{strategy}: counted {counter.sent_bytes}, formula {expected}")
    return counter.sent_bytes


def layer_bytes(dims: Dims, strategy: Strategy, tokens: int, relayout: bool) -> int:
    """Return the sent bytes of one decoder layer."""
    rules = tuple(Rule(f"model.layers.*.mlp.{name}_proj", "replicate") for name in ("gate", "up", "down"))
    strategy = dataclasses.replace(strategy, gathered_inputs="re-gather", rules=rules if dims.experts else ())
    sent = count(dims, strategy, tokens, 2)
    sent.subtract(count(dims, strategy, tokens, 1))
    return sum(n for (kind, _), n in sent.items() if relayout or kind != "all_to_all")


def measure(case: Case) -> dict[str, object]:
    """Return the bytes of both sides of a case, and the relative change."""
    x, y = case.grid
    line = layer_bytes(case.dims, Strategy(tp_x=x * y), case.tokens, True)
    found = {
        shapes: layer_bytes(
            case.dims,
            Strategy(tp_x=x, tp_y=y, attention_shape=shapes[0], mlp_shape=shapes[1]),  # type: ignore[arg-type]
            case.tokens,
            case.relayout,
        )
        for shapes in case.shapes
    }
    best = min(found, key=lambda shapes: found[shapes])
    return {
        "case": case.name,
        "tp_x": x,
        "tp_y": y,
        "tokens": case.tokens,
        "one_axis_bytes": line,
        "two_axes_bytes": found[best],
        "shapes": "/".join(best),
        "change": found[best] / line - 1,
        "target": case.target,
        "all_shapes": {"/".join(shapes): n / line - 1 for shapes, n in found.items()},
    }


def main() -> None:
    """Run the benchmark with the command-line options, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = [measure(case) for case in CASES]
    if args.json:
        print(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
        return
    print("bytes of one layer, forward and backward, inputs gathered again; counted = formula")
    print(f"{'case':42} {'tokens':>7} {'1-D MB':>8} {'2-D MB':>8} {'shapes':>15} {'change':>8} {'target':>7}")
    for row in rows:
        print(
            f"{row['case']:42} {row['tokens']:7} {row['one_axis_bytes'] / 1e6:8.0f} "
            f"{row['two_axes_bytes'] / 1e6:8.0f} {row['shapes']:>15} {row['change']:8.1%} "
            + (f"{row['target']:7.0%}" if row["target"] is not None else "")
        )


if __name__ == "__main__":
    main()
