"""Predicted against published effect of overlap, for pairs of runs without and with overlap.

    python benchmarks/overlap_predictions.py            # a table
    python benchmarks/overlap_predictions.py --json     # the same as JSON

The pairs, their sources and the assumed conditions are in `data/overlap_pairs.json`. Pairs used for calibration are not
scored. A prediction is the time without overlap divided by the time with overlap; the two differ in exposed
communication only. Kinds of pairs:

    strategy           overlap within our own strategies, as priced by the planner; for decoding, of layers only
    share              overlap within a layer, predicted from the published fraction of communication alone
    two-microbatches   exchanges of one microbatch overlap with the computation of another

A collective slows computation down by `collective_share` of the device card. For runs on a CPU with a throttled link,
the share comes from one calibration pair.

Bars: the mean absolute error of the log ratio is at most `BAR` of the error of predicting no effect, and at least
`SIGNS` of the pairs with an effect above `EFFECT` have the right sign. Exit status 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq

from hyper_parallel.cost import (
    Candidates,
    LayerPrices,
    Machine,
    ModelNumbers,
    PricingCase,
    score,
    stack_card,
)
from hyper_parallel.cost.overlap import PassSeconds, pass_span
from hyper_parallel.ir import Overlap, Strategy, Workload
from hyper_parallel.model import ModelSpec, load_model
from hyper_parallel.topology import load_topology

PAIRS = Path(__file__).with_name("data") / "overlap_pairs.json"
BAR, SIGNS, EFFECT = 0.5, 0.85, 0.03
NO_OVERLAP = Overlap()
OUTSIDE_OF_LAYERS = (
    "optimizer",
    "gradient norm",
    "every step",
    "data-parallel reduction",
    "gradient accumulation",
)
"""Terms of a training step that a decoding step lacks."""


def published_ratio(pair: dict[str, Any]) -> float | None:
    """Return the published speed-up by overlap; None if only its sign is published."""
    if pair["without"] is None:
        return None
    ratio = pair["with"] / pair["without"]
    return 1.0 / ratio if pair["unit"] == "seconds" else ratio


def case_of(pair: dict[str, Any], overlap: Overlap = NO_OVERLAP) -> PricingCase:
    """Return the pricing case of a pair's run, with a software stack that does not overlap within layers."""
    model, supernode = load_model(pair["model"]), load_topology(pair["topology"])
    if "layers" in pair:
        model = first_layers(model, pair["layers"])
    if "link_bytes_s" in pair:
        inner, *outer = supernode.tiers
        rate = dataclasses.replace(inner.bytes_s, value=pair["link_bytes_s"])
        supernode = dataclasses.replace(supernode, tiers=(dataclasses.replace(inner, bytes_s=rate), *outer))
    chosen = {k: v for k, v in pair["strategy"].items() if k != "overlap"}
    strategy = Strategy(**chosen, overlap=overlap)
    workload = Workload(
        pair["seq_len"],
        microbatch=pair["microbatch"],
        accumulation_steps=pair.get("accumulation", 1),
    ).resolve(strategy.dp)
    stack = dataclasses.replace(stack_card(pair["stack"]), overlap_tp=0.0, overlap_ep=0.0, overlap_ep_chunks=0.0)
    if pair.get("decoding"):  # without gradients
        stack = dataclasses.replace(stack, adds_gradients=0.0)
    dtype = pair.get("matmul_dtype", "bfloat16")
    machine = Machine.of(supernode, "bfloat16", matmul_dtype=dtype, stack=stack)
    return PricingCase(ModelNumbers.of(model), machine, workload, Candidates.of(strategy, workload))


def first_layers(model: ModelSpec, count: int) -> ModelSpec:
    """Return a model with only the first `count` layers."""
    blocks = []
    for block in model.blocks:
        layers = tuple(layer for layer in block.layers if layer < count)
        if layers or not block.layers:
            blocks.append(dataclasses.replace(block, layers=layers))
    return dataclasses.replace(model, blocks=tuple(blocks))


def terms_of(case: PricingCase) -> dict[str, float]:
    """Return the seconds of each cost term of a step."""
    return {t.name: float(t.seconds[0]) for t in score(case).time}


def strategy_ratio(pair: dict[str, Any]) -> float:
    """Return the predicted speed-up for a pair of kind `strategy`."""
    overlap = Overlap(**pair["strategy"]["overlap"])
    left_out = OUTSIDE_OF_LAYERS if pair.get("decoding") else ()
    plain, other = (
        sum(s for name, s in terms_of(case_of(pair, o)).items() if name not in left_out) for o in (Overlap(), overlap)
    )
    return plain / other


def share_ratio(pair: dict[str, Any], demand: float) -> float:
    """Return the predicted speed-up for a pair of kind `share`; `demand` as for `pass_span`."""
    halves, chunks = pair["halves"], pair["chunks"]
    traffic = pair["communication_share"]
    work = (1.0 - traffic) / halves
    attention, mlp = work * pair["attention_share"], work * pair["mlp_share"]
    experts = max(0.0, work - attention - mlp)
    dense = experts < 1e-9
    values = {
        "attention": attention,
        "mlp": mlp,
        "experts": 0.0 if dense else experts / chunks,
        "attention_collective": traffic / halves / 4 if dense else 0.0,
        "mlp_collective": traffic / halves / 4 if dense else 0.0,
        "exchange": 0.0 if dense else traffic / halves / 2 / chunks,
    }
    seconds = PassSeconds(**{name: np.array([value]) for name, value in values.items()})
    # In these measurements, the two halves were joined after every layer.
    return 1.0 / float(pass_span(seconds, halves, chunks, np.ones(1), demand)[0])


def cpu_demand(pairs: list[dict[str, Any]]) -> float:
    """Return the fraction of cores that a collective over a throttled link occupies, from the CPU calibration pair."""
    (pair,) = (p for p in pairs if p.get("calibration") and p["mechanism"] == "share")
    return float(brentq(lambda demand: share_ratio(pair, demand) - published_ratio(pair), 0.0, 1.0))


def two_microbatches_ratio(pair: dict[str, Any]) -> float:
    """Return the predicted speed-up for a pair of kind `two-microbatches`.

    In a pipeline, the first forward passes and the last backward passes of a rank have no other pass to overlap with.
    """
    case = case_of(pair)
    prices = LayerPrices.of(case)
    work = prices.work
    passes = 2.0 + (case.c.recompute > 1)
    compute = (work.forward + work.backward + work.recompute + work.launch) / passes
    exchange = prices.comm.ep / passes / 2.0
    zero = np.zeros(1)
    seconds = PassSeconds(compute / 2.0, zero, compute / 2.0, zero, zero, exchange)
    demand = case.machine.card.collective_share
    pair_s = pass_span(seconds, 2, 1, np.zeros(1), demand)
    paired = 1.0 - (case.c.pp - 1.0) / case.c.accumulation
    exposed = paired * passes * (pair_s / 2.0 - compute) + (1.0 - paired) * prices.comm.ep
    terms = terms_of(case)
    step, ep = sum(terms.values()), terms["ep communication"]
    return step / (step - ep + ep * float((exposed / prices.comm.ep)[0]))


PREDICT = {
    "strategy": strategy_ratio,
    "two-microbatches": two_microbatches_ratio,
}


def scored(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the predictions of all pairs, and the scores over pairs that were not used for calibration."""
    rows, demand = [], cpu_demand(pairs)
    for pair in pairs:
        if pair.get("calibration"):
            continue
        published, mechanism = published_ratio(pair), pair["mechanism"]
        known = mechanism == "share"
        predicted = share_ratio(pair, demand) if known else PREDICT[mechanism](pair)
        sign = pair["sign"] if published is None else int(np.sign(math.log(published)))
        rows.append(
            {"name": pair["name"], "source": pair["source"], "mechanism": pair["mechanism"],
             "published": published, "predicted": round(predicted, 4),
             "sign": sign, "right_sign": (math.log(predicted) > 0.0) == (sign > 0)}
        )  # fmt: skip
    sized = [r for r in rows if r["published"] is not None]
    null = np.mean([abs(math.log(r["published"])) for r in sized])
    error = np.mean([abs(math.log(r["predicted"] / r["published"])) for r in sized])
    clear = [r for r in rows if r["published"] is None or abs(math.log(r["published"])) > math.log1p(EFFECT)]
    signs = np.mean([r["right_sign"] for r in clear])
    return {
        "pairs": rows,
        "mean_error": round(float(error), 4),
        "mean_error_without_effect": round(float(null), 4),
        "error_share": round(float(error / null), 4),
        "right_signs": round(float(signs), 4),
        "signed_pairs": len(clear),
        "bars": {"error_share": BAR, "right_signs": SIGNS},
        "met": bool(error <= BAR * null and signs >= SIGNS),
    }


def main() -> int:
    """Print the predictions; return 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    data = json.loads(PAIRS.read_text())
    result = scored(data["pairs"]) | {"left_out": data["left_out"]}
    if as_json:
        print(json.dumps(result, indent=1))
        return 0 if result["met"] else 1
    print(f"{'pair':48}{'published':>10}{'predicted':>10}  sign")
    for row in result["pairs"]:
        published = "" if row["published"] is None else f"{row['published']:.3f}"
        mark = "right" if row["right_sign"] else "wrong"
        print(f"{row['name'][:47]:48}{published:>10}{row['predicted']:>10.3f}  {mark}")
    print(
        f"mean error of the log ratio {result['mean_error']:.3f}, with no effect "
        f"{result['mean_error_without_effect']:.3f} (bar: {BAR:.0%} of it); right signs "
        f"{result['right_signs']:.0%} of {result['signed_pairs']} (bar: {SIGNS:.0%})"
    )
    return 0 if result["met"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
