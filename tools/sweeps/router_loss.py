"""Sweep: the auxiliary loss of routers on every layout equals that of plain transformers."""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sweeps.interface import causal_types, image_text_types, plain_model, refusal_or_failure

TITLE = "Router losses"
TEXT = """Loss and every gradient of one step with a router loss of weight 0.5, in float64, against plain transformers
on the same real tokens, to 1e-10. `one rank` compares with the model's own `loss`; columns with several microbatches
with the mean of their own losses by targets; `padded` columns have rows of unequal length and compare with the rows
alone, without padding; `packed` with the documents alone. `own loop` columns call the model itself, without a
`Workload`. A model with experts and without a router loss must not get one: its `moe.aux_loss_coef` is refused."""
TWO = {
    "dp 2": ("dp_shard=2", 1),
    "ep 2": ("dp_shard=2 ep=2", 1),
    "tp 2": ("tp=2", 1),
    "cp 2": ("cp=2", 1),
    "pp 2": ("pp=2", 2),
}
PADDED = {
    "padded dp 2": ("dp_shard=2", 1),
    "padded ep 2": ("dp_shard=2 ep=2", 1),
    "padded tp 2": ("tp=2", 1),
    "padded cp 2": ("cp=2", 1),
    "padded pp 2": ("pp=2", 2),
}
COLUMNS = (
    *("one rank", "accumulation 4", "padded", "packed", "own loop", "own loop, short last step"),
    *TWO,
    *PADDED,
    *("own loop tp 2", "dp 4"),
)
SECONDS = 900
ROWS, LENGTH, COEFFICIENT, LIMIT = 4, 16, 0.5, 1e-10
REAL = (16, 11, 7, 13)
"""Real tokens of the rows of the padded columns."""
WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
EXTRA = {"doge": {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 3}}


def model_types() -> list[str]:
    """Return the types whose shrunk model has experts or a router loss."""
    import torch
    from census import auto_class
    from transformers import AutoConfig

    from hyper_parallel.backends.torch import router_loss_facts

    found = []
    for name in [*causal_types(), *image_text_types()]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with torch.device("meta"):
                    model = auto_class(name).from_config(AutoConfig.for_model(**values_of(name)))
            except Exception:
                continue
        experts = any("experts" in n.split(".") for n, _ in model.named_modules())
        if experts or router_loss_facts(model) is not None:
            found.append(name)
    return found


def values_of(model_type: str) -> dict[str, Any]:
    """Return the shrunk config with router losses of weight 0.5."""
    from census_models import tiny
    from transformers import AutoConfig

    values = {**tiny(model_type), **EXTRA.get(model_type, {})}

    def switch_on(part: dict[str, Any], default: dict[str, Any]) -> None:
        keys = {*part, *default}
        part.update({key: COEFFICIENT for key in WEIGHTS if key in keys})
        if "output_router_logits" in keys or "router_aux_loss_coef" in keys:
            part["output_router_logits"] = True
        for key, inner in default.items():
            if isinstance(inner, dict) and key.endswith("_config") and key != "vision_config":
                part[key] = dict(part.get(key) or {})
                switch_on(part[key], inner)

    made = AutoConfig.for_model(**values)
    switch_on(values, made.to_dict())
    return values


def run(model_type: str, folder: Path) -> dict[str, str]:
    """Check one model type, and return the result text of each column."""
    import torch

    from hyper_parallel.backends.torch import router_loss_facts

    try:
        model = plain_model(model_type, values_of(model_type))
        ids = torch.arange(3, 3 + LENGTH)[None]
        plain(model, ids)
    except Exception as error:
        return {COLUMNS[0]: f"skipped: {type(error).__name__}: {str(error).splitlines()[0][:80]}"}
    if router_loss_facts(model) is None:
        return {COLUMNS[0]: without_loss(model, ids)}
    return Columns(model).run()


def without_loss(model: Any, ids: Any) -> str:
    """Return the result text of a model whose class adds no router loss."""
    from hyper_parallel.errors import HyperParallelError
    from hyper_parallel.runtime import Routing, World, parallelize, plan_of

    flag = "output_router_logits"
    if flag in inspect.signature(model.forward).parameters:
        on, off = (plain(model, ids, **{flag: value})[0] for value in (True, False))
        if on != off:
            return f"wrong: the model's own loss changes from {off:.6f} to {on:.6f}"
    try:
        with World.join("cpu") as world:
            parallelize(model, plan_of(model, ""), world, routing=Routing(aux_loss_coef=0.5))
    except HyperParallelError as error:
        return "ok: no router loss" if error.code == "HP205" else refusal_or_failure(error)
    except Exception as error:
        return refusal_or_failure(error)
    return "wrong: moe.aux_loss_coef is accepted and there is no loss"


def plain(model: Any, ids: Any, labels: Any = None, **given: Any) -> tuple[float, dict[str, Any]]:
    """Return loss and gradients in plain transformers, computed in float64 throughout."""
    model = copy.deepcopy(model)
    with float64():
        loss = model(input_ids=ids, labels=ids if labels is None else labels, use_cache=False, **given).loss
        loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters()}


def float64() -> Any:
    """Return a context in which all computations that request float32, as in transformers' loss, use float64."""
    import torch

    from hyper_parallel.backends.torch.forward_variants import KeepFloat64

    class Float64(KeepFloat64):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is torch.zeros and kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
            return super().__torch_function__(func, types, args, kwargs)

    return Float64()


class Columns:
    """Runs of one model, one per column of the table."""

    def __init__(self, model: Any) -> None:
        import torch

        self.model, self.torch = model, torch
        generator = torch.Generator().manual_seed(5)
        size = min(96, model.get_input_embeddings().weight.shape[0] - 1)
        self.ids = torch.randint(3, size, (ROWS, LENGTH), generator=generator)
        self.mask = torch.arange(LENGTH) < torch.tensor(REAL)[:, None]
        self.cells: dict[str, str] = {}

    def run(self) -> dict[str, str]:
        """Return all cells."""
        whole = plain(self.model, self.ids)
        pieces = self.mean([plain(self.model, row[None]) for row in self.ids])
        halves = self.mean([plain(self.model, part) for part in self.ids.chunk(2)])
        rows = [row[:n] for row, n in zip(self.ids, REAL, strict=True)]
        padded = self.rows_alone(rows)
        both = [self.rows_alone(rows[:2]), self.rows_alone(rows[2:])]
        in_two = self.mean(both, [sum(len(row) - 1 for row in part) for part in (rows[:2], rows[2:])])
        packed = self.rows_alone([self.ids[0], self.ids[1, :11], self.ids[1, 11:]])
        one = {
            "one rank": (self.step("", [self.batch(slice(0, 4))]), whole),
            "accumulation 4": (self.step("", self.rows()), pieces),
            "padded": (self.step("", [self.padded(slice(0, 4))]), padded),
            "packed": (self.step("", [self.packed()]), packed),
            "own loop": (self.loop("", [self.ids[i : i + 1] for i in range(4)]), pieces),
            "own loop, short last step": (self.loop("", [self.ids[:2]]), self.short()),
        }
        self.cells.update({name: self.cell(work, want) for name, (work, want) in one.items()})
        if self.cells["packed"].startswith("wrong") and not self.apart():
            self.cells["packed"] = "skipped: packed documents of this type are not independent"

        for name, (strategy, count) in TWO.items():
            want = halves if count == 2 else whole
            self.on_two(name, strategy, count, self.batch, want)
        for name, (strategy, count) in PADDED.items():
            want = in_two if count == 2 else padded
            self.on_two(name, strategy, count, self.padded, want)
        loop = self.loop("tp=2", [*self.ids.split(1)])
        self.launched("own loop tp 2", 2, lambda rank: self.cell(loop, pieces))

        def four(rank: int) -> str:
            work = self.step("dp_replicate=2 dp_shard=2", [self.batch(slice(rank, rank + 1))])
            return self.cell(work, whole)

        self.launched("dp 4", 4, four)
        cut = [n for n in COLUMNS if n.startswith(("dp", "ep", "padded")) and "wrong" in self.cells[n]]
        if cut and not self.rows_apart():
            why = "skipped: in plain transformers, rows of a batch change each other"
            self.cells.update(dict.fromkeys(cut, why))
        return {name: self.cells[name] for name in COLUMNS}

    def on_two(self, name: str, strategy: str, count: int, batch: Callable[[slice], Any], want: Any) -> None:
        """Compute the result text of a step on two ranks."""

        def work(rank: int) -> str:
            parts = [batch(rows) for rows in self.cuts(strategy, count, rank)]
            return self.cell(self.step(strategy, parts), want)

        self.launched(name, 2, work)

    def launched(self, name: str, ranks: int, work: Callable[[int], str]) -> None:
        """Compute a result text by running `work` on ranks; all ranks must agree."""
        from hyper_parallel.errors import RankFailed
        from hyper_parallel.runtime import launch

        try:
            cells = launch(work, ranks, timeout_s=150)
        except RankFailed as error:
            cells = [f"fails: {error.what}".splitlines()[0]]
        except Exception as error:
            cells = [refusal_or_failure(error)]
        self.cells[name] = next((cell for cell in cells if cell != "ok"), "ok")

    def mean(self, parts: list[Any], weights: list[int] | None = None) -> Any:
        """Return the mean of losses and gradients, weighted by targets."""
        weights = weights or [1] * len(parts)
        shares = [weight / sum(weights) for weight in weights]
        loss = sum(share * part[0] for share, part in zip(shares, parts, strict=True))
        grads = {}
        for name in parts[0][1]:
            each = [
                share * part[1][name] for share, part in zip(shares, parts, strict=True) if part[1][name] is not None
            ]
            grads[name] = sum(each) if each else None
        return loss, grads

    def rows_alone(self, rows: list[Any]) -> Any:
        """Return loss and gradients of rows in separate forwards, with one router loss over all tokens."""
        model, torch = copy.deepcopy(self.model), self.torch
        total, targets, logits = 0.0, 0, []
        with float64():
            for row in rows:
                out = model(input_ids=row[None], use_cache=False, output_router_logits=True)
                found = torch.log_softmax(out.logits[0, :-1].double(), -1)
                total = total - found.gather(1, row[1:, None]).sum()
                targets += len(row) - 1
                logits.append(out.router_logits)
            dim = 1 if logits[0][0].dim() == 3 else 0
            joined = tuple(torch.cat(layer, dim) for layer in zip(*logits, strict=True))
            loss = total / targets + COEFFICIENT * self.own_loss(model, joined)
            loss.backward()
        return float(loss.detach()), {n: p.grad for n, p in model.named_parameters()}

    def own_loss(self, model: Any, logits: Any) -> Any:
        """Return the loss of transformers' own function for all router logits of a step."""
        function: Callable[..., Any] = sys.modules[type(model).__module__].load_balancing_loss_func  # type: ignore[attr-defined]
        text = model.config.get_text_config()
        names = inspect.signature(function).parameters
        experts = getattr(model, "num_experts", None) or text.num_experts
        top_k = getattr(model, "num_experts_per_tok", None) or text.num_experts_per_tok
        keys = {"num_keys": int(experts**0.5)} if "num_keys" in names else {}
        return function(logits, num_experts=experts, top_k=top_k, **keys)

    def short(self) -> Any:
        """Return loss and gradients of a last step with fewer microbatches."""
        return plain(self.model, self.ids[:2])

    def batch(self, rows: slice) -> dict[str, Any]:
        """Return a microbatch without padding."""
        return {"input_ids": self.ids[rows], "labels": self.ids[rows]}

    def rows(self) -> list[dict[str, Any]]:
        """Return one microbatch per row."""
        return [self.batch(slice(i, i + 1)) for i in range(ROWS)]

    def padded(self, rows: slice) -> dict[str, Any]:
        """Return a microbatch with rows of unequal length."""
        ids, mask = self.ids[rows].clone(), self.mask[rows]
        ids[~mask] = 2
        return {"input_ids": ids, "labels": ids.masked_fill(~mask, -100), "token_mask": mask}

    def packed(self) -> dict[str, Any]:
        """Return a microbatch with a row of one document and a row of two."""
        starts = [
            self.torch.arange(LENGTH),
            self.torch.cat([self.torch.arange(11), self.torch.arange(5)]),
        ]
        labels = self.ids[:2].clone()
        labels[1, 11] = -100
        labels[:, 0] = -100
        return {
            "input_ids": self.ids[:2],
            "labels": labels,
            "position_ids": self.torch.stack(starts),
        }

    def apart(self) -> bool:
        """Return whether packed documents are independent in plain transformers."""
        batch, model = self.packed(), copy.deepcopy(self.model)
        with float64(), self.torch.no_grad():
            given = {k: v for k, v in batch.items() if k != "labels"}
            both = model(**given, use_cache=False).logits[1, 11:]
            alone = model(input_ids=self.ids[1:2, 11:], use_cache=False).logits[0]
        return bool((both - alone).abs().max() < 1e-9)

    def rows_apart(self) -> bool:
        """Return whether plain transformers gives equal results for a row alone and in a batch."""
        model = copy.deepcopy(self.model)
        with float64(), self.torch.no_grad():
            both = model(input_ids=self.ids, use_cache=False).logits[1]
            alone = model(input_ids=self.ids[1:2], use_cache=False).logits[0]
        return bool((both - alone).abs().max() < 1e-9)

    def cuts(self, strategy: str, count: int, rank: int) -> list[slice]:
        """Return the slice of rows of each of a rank's `count` microbatches."""
        share = slice(2 * rank, 2 * rank + 2) if "dp_shard" in strategy else slice(0, 4)
        size = (share.stop - share.start) // count
        return [slice(share.start + i * size, share.start + (i + 1) * size) for i in range(count)]

    def step(self, strategy: str, parts: list[dict[str, Any]]) -> Callable[[], Any]:
        """Return a function that runs a step by `forward_backward` on these microbatches."""

        def work() -> Any:
            from hyper_parallel.ir import Workload
            from hyper_parallel.runtime import forward_backward

            workload = Workload(
                LENGTH, microbatch=len(parts[0]["input_ids"]), accumulation_steps=len(parts),
                compute_dtype="float64", param_dtype="float64", reduce_dtype="float64",
            )  # fmt: skip
            return self.on_ranks(strategy, workload, lambda m: float(forward_backward(m, parts)))

        return work

    def loop(self, strategy: str, parts: list[Any]) -> Callable[[], Any]:
        """Return a function that runs a step of a user's loop, which calls the model itself and has no workload."""

        def work() -> Any:
            tokens = sum(part[:, 1:].numel() for part in parts)

            def steps(model: Any) -> float:
                total = 0.0
                for part in parts:
                    loss = model(input_ids=part, labels=part, num_items_in_batch=tokens).loss
                    loss.backward()
                    total += float(loss.detach())
                return total

            return self.on_ranks(strategy, None, steps)

        return work

    def on_ranks(self, strategy: str, workload: Any, work: Callable[[Any], float]) -> Any:
        """Return loss and gradients of `work` on a copy of the model, parallelized by a strategy, on this rank."""
        from tests.parity.planned import whole

        from hyper_parallel.runtime import World, parallelize, plan_of

        model = copy.deepcopy(self.model)
        with World.join("cpu") as world:
            parallelize(model, plan_of(model, strategy, workload), world)
            loss = work(model)
            return loss, {n: whole(p.grad) if p.grad is not None else None for n, p in model.named_parameters()}

    def cell(self, work: Callable[[], Any], want: Any) -> str:
        """Return the result text of a run, whose result must be equal to `want`."""
        try:
            loss, grads = work()
        except Exception as error:
            return refusal_or_failure(error)
        off = abs(loss - want[0]) / abs(want[0])
        if off > LIMIT:
            return f"wrong: loss {loss:.8f}, plain {want[0]:.8f}"
        norm = max(float(g.abs().max()) for g in want[1].values() if g is not None)
        for name, grad in grads.items():
            theirs = want[1][name]
            if grad is None or theirs is None:
                if (grad is None) == (theirs is None) or not (theirs if grad is None else grad).any():
                    continue
                return f"wrong: only one side has a gradient of {name}"
            off = float((grad - theirs).abs().max()) / max(float(theirs.abs().max()), 1e-6 * norm)
            if off > LIMIT:
                return f"wrong: gradient of {name} is off by {off:.1e}"
        return "ok"
