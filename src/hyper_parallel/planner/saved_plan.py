"""Settings that start a run with a plan, and use of a saved plan for a recipe.

Launch settings are the text of a HyperParallel recipe, or flags of Megatron-LM.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import yaml

from hyper_parallel.config import Recipe
from hyper_parallel.errors import BadValue, PlanMismatch, value_text
from hyper_parallel.ir import AXES, Overlap, Plan, Strategy
from hyper_parallel.planner.request import unimplemented
from hyper_parallel.units import format_bytes

STACKS: Final = ("ours", "megatron")
_HEAD: Final = """\
# Layout and batch of a plan. Set three keys before training:
#   model.path   a directory with weights, or org/name on the hub; now {model}
#   data.source  a file, a directory or a data set; now the source text of Python's standard library
#   stage        pt (all tokens), sft (conversations), dpo, orpo, kto, rm or grpo; now pt
"""


def launch_settings(plan: Plan, stack: str) -> str:
    """Return a recipe or a command that starts a run with the plan.

    Comments at its top list the choices of the plan that it omits, or that this version cannot run.

    Args:
        plan: The plan.
        stack: `ours`: a recipe for `hyper-parallel train`. `megatron`: flags of Megatron-LM's `pretrain_gpt.py`.

    Raises:
        BadValue: HP102 for any other `stack`.
    """
    if stack not in STACKS:
        raise BadValue(
            f"there are no launch settings for the stack `{stack}`",
            got=stack,
            allowed=STACKS,
            hint="--launch ours",
            where="--launch",
        )
    if stack == "ours":
        comments = [f"# not supported: {text}" for text in unimplemented(plan.strategy)]
        omitted = {"parallel.rules": plan.strategy.rules, "parallel.schedule_file": plan.strategy.schedule_file}
        comments += [f"# not written: {key} of the plan" for key, value in omitted.items() if value]
        recipe_text: str = yaml.safe_dump(recipe_values(plan), sort_keys=False)
        settings = _HEAD.format(model=plan.model.name) + recipe_text.rstrip()
    else:
        comments = [f"# not expressed: {text}" for text in _not_in_megatron(plan)]
        settings = _megatron(plan)
    return "\n".join([*comments, settings]) + "\n"


def recipe_values(plan: Plan) -> dict[str, Any]:
    """Return a recipe for the plan, as a nested dict of keys and values.

    A plan has no data set, so `data.source` is `python-stdlib`. Sharding rules and the schedule file are omitted, and
    so are choices that a recipe cannot express: order of axes, etp, ZeRO-0, selective recomputation.
    """
    s, w = plan.strategy, plan.workload
    parallel: dict[str, object] = {name: degree for name, degree in s.degrees().items() if degree > 1} or {
        "dp_shard": 1
    }
    if s.tp_y > 1:
        parallel.update(attention_shape=s.attention_shape, mlp_shape=s.mlp_shape)
        if s.attention_shape == "2d" and s.attention_scatter == "token":
            parallel["attention_scatter"] = "token"
    if s.tp > 1 and s.gathered_inputs == "re-gather":
        parallel["gathered_inputs"] = "re-gather"
    if s.cp > 1:
        parallel["cp_kind"] = s.cp_kind
        if s.cp_kind == "hybrid":
            parallel["cp_ulysses"] = s.cp_ulysses
    if s.pp > 1:
        parallel.update(schedule=s.schedule, virtual_stages=s.virtual_stages)
        parallel["stage_layers"] = [stage.layers for stage in plan.stages]
    if s.zero_stage == 1:
        parallel["zero"] = 1
    else:
        parallel["reshard_after_forward"] = s.zero_stage in (0, 3)
    recipe: dict[str, Any] = {
        "model": {"path": plan.model.name},
        "stage": "pt",
        "data": {"source": "python-stdlib", "seq_len": w.seq_len},
        "training": {
            "dtype": w.compute_dtype,
            "microbatch": w.microbatch,
            "accumulation_steps": w.accumulation_steps,
            "recompute": "full" if s.recompute == "full" else "none",
            **({"recompute_layers": s.recompute_layers} if s.recompute_layers is not None else {}),
        },
        "parallel": parallel,
        "topology": plan.topology,
    }
    if s.offload:
        recipe["offload"] = {"budget": "auto"}
    if (overlap := s.overlap) != Overlap():
        tp = "half-batch" if overlap.half_batch else overlap.block_executor.replace("serial", "none")
        recipe["overlap"] = {"tp": tp, "ep": "chunks" if overlap.ep_chunks > 1 else "none"}
        if (chunks := max(overlap.tp_chunks, overlap.ep_chunks)) > 1:
            recipe["overlap"]["chunks"] = chunks
    return recipe


def _host_bytes(plan: Plan) -> dict[str, int]:
    """Return a dict from memory term to its bytes in host memory at the peak."""
    return {t.name: t.bytes for t in plan.memory if t.tier == "dram"}


def _layers_per_rank(plan: Plan) -> list[int]:
    """Return the number of decoder layers of every pipeline rank, all virtual stages of the rank included."""
    s = plan.strategy
    return [sum(plan.stages[i].layers for i in s.stages_of(rank)) for rank in range(s.pp)]


def _megatron(plan: Plan) -> str:
    """Return a `torchrun` command with Megatron-LM's flags for layout, batch, dtype, recomputation and offload.

    The number of devices per node is a placeholder.
    """
    s, w = plan.strategy, plan.workload
    sequences = (w.tokens_per_step or 0) // w.seq_len
    flags: list[str] = [
        f"--tensor-model-parallel-size {s.tp}",
        f"--pipeline-model-parallel-size {s.pp}",
        f"--context-parallel-size {s.cp}",
        f"--micro-batch-size {w.microbatch}",
        f"--global-batch-size {sequences}",
        f"--seq-length {w.seq_len}",
    ]
    if s.tp > 1:
        flags.append("--sequence-parallel")
    if s.cp > 1:
        kinds = {"ring": "p2p", "ulysses": "a2a", "hybrid": "a2a+p2p", "all_gather": "all_gather"}
        flags.append(f"--cp-comm-type {kinds[s.cp_kind]}")
        if s.cp_kind == "hybrid":
            ring = s.cp // s.cp_ulysses
            flags.append(f"--hierarchical-context-parallel-sizes {s.cp_ulysses} {ring}")
    if s.pp > 1:
        first, *middle, last = _layers_per_rank(plan)
        middle_layers = (middle or [max(first, last)])[0]
        if first != middle_layers:
            flags.append(f"--decoder-first-pipeline-num-layers {first}")
        if last != middle_layers:
            flags.append(f"--decoder-last-pipeline-num-layers {last}")
    if s.schedule == "interleaved" and s.virtual_stages > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {s.virtual_stages}")
    if s.ep > 1:
        flags += [
            f"--expert-model-parallel-size {s.ep}",
            f"--expert-tensor-parallel-size {s.expert_tp}",
        ]
    if s.zero_stage == 1:
        flags += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    elif s.dp_shard * s.cp > 1:
        flags.append("--use-torch-fsdp2")
    if s.dp_replicate > 1 and s.zero_stage == 1:
        flags.append(f"--num-distributed-optimizer-instances {s.dp_replicate}")
    if s.recompute == "full":
        layers = s.recompute_layers or max(stage.layers for stage in plan.stages)
        flags += ["--recompute-granularity full", "--recompute-method block"]
        flags.append(f"--recompute-num-layers {layers}")
    elif s.recompute == "selective":
        flags.append("--recompute-granularity selective")
    offloaded = _host_bytes(plan)
    if set(offloaded) == {"optimizer states"}:
        total = sum(t.bytes for t in plan.memory if t.name == "optimizer states")
        share = offloaded["optimizer states"] / total
        flags += ["--optimizer-cpu-offload", f"--optimizer-offload-fraction {share:.2f}"]
    if w.compute_dtype in ("bfloat16", "float16"):
        flags.append("--bf16" if w.compute_dtype == "bfloat16" else "--fp16")
    head = f"torchrun --nproc-per-node <devices per node> pretrain_gpt.py  # {s.world_size} devices"
    return "\n".join([head, *(f"    {flag}" for flag in flags)])


def _not_in_megatron(plan: Plan) -> Iterator[str]:
    """Yield phrases about choices of the plan that no flag of Megatron-LM can express."""
    s = plan.strategy
    if s.order != AXES:
        yield f"order of the axes {'>'.join(s.order)} (its own order is tp-cp-ep-dp-pp)"
    if s.tp_y > 1:
        yield f"two tensor-parallel axes {s.tp_x} x {s.tp_y}; {s.tp} ranks on one axis are used instead"
    offloaded = _host_bytes(plan)
    if offloaded and set(offloaded) != {"optimizer states"}:
        amounts = (f"{format_bytes(b)} of {name}" for name, b in offloaded.items())
        yield f"offload of {', '.join(amounts)}"
    if s.pp > 1 and s.schedule not in ("1f1b", "interleaved"):
        yield f"schedule {s.schedule}; 1F1B is used instead"
    layers = _layers_per_rank(plan)
    if len({*layers[1:-1]}) > 1:
        yield f"layers of the pipeline ranks {layers}; those between first and last are equal there"


def plan_overrides(plan: Plan, recipe: Recipe, where: Callable[[str], str], file: str) -> list[str]:
    """Return overrides (`key=value`) that give a recipe the degrees, choices, overlap and batch of a saved plan.

    Args:
        plan: The saved plan.
        recipe: The recipe without the overrides.
        where: Function from a recipe key to the origin of its value, for errors.
        file: Path of the plan, for errors.

    Raises:
        PlanMismatch: HP307 when sequence length, dtype or, if the recipe sets them, tokens per step differ.
    """
    work, training = plan.workload, recipe.training
    tokens = training.tokens_per_step
    for key, own, planned in (
        ("data.seq_len", recipe.data.seq_len, work.seq_len),
        ("training.dtype", training.dtype, work.compute_dtype),
        ("training.tokens_per_step", tokens, work.tokens_per_step if tokens else None),
    ):
        if own != planned:
            raise PlanMismatch(
                f"`{key}` differs between the recipe and the saved plan",
                where=f"{file}; {where(key)}",
                got=f"{key}={own} in the recipe, {planned} in the plan",
                changes={key: planned},
            )
    values = recipe_values(plan)
    reset = ("schedule", "virtual_stages", "zero", "cp_ulysses", "attention_scatter", "gathered_inputs")
    parallel = {n: getattr(Strategy(), n) for n in reset} | plan.strategy.degrees() | {"stage_layers": []}
    overrides: dict[str, object] = {f"parallel.{k}": v for k, v in {**parallel, **values["parallel"]}.items()}
    own_keys = ("microbatch", "accumulation_steps", "recompute", "recompute_layers")
    overrides |= {f"training.{k}": values["training"].get(k) for k in own_keys}
    overrides |= {f"overlap.{k}": v for k, v in {"tp": "none", "ep": "none", **values.get("overlap", {})}.items()}
    overrides |= {
        "overlap.auto": False,
        "parallel.auto": False,
        "parallel.world_size": None,
        "training.tokens_per_step": None,
    }
    if plan.strategy.offload and not recipe.offload.on:
        overrides["offload.budget"] = "auto"
    return [f"{key}={value_text(value)}" for key, value in overrides.items()]


def check_saved_plan(saved: Plan, run_plan: Plan, file: str) -> None:
    """Raise an error if the plan of a run, with the overrides of a saved plan, differs from the plan saved in `file`.

    Raises:
        PlanMismatch: HP307 if the model's numbers of parameters, the ranks, the tokens per step or the strategy differ.
    """
    sizes = ("num_params", "num_active_params")
    facts: Mapping[str, tuple[object, object]] = {
        "model": (
            f"{saved.model.name}, {saved.model.num_params:,} parameters",
            f"{run_plan.model.name}, {run_plan.model.num_params:,} parameters",
        )
        if any(getattr(saved.model, n) != getattr(run_plan.model, n) for n in sizes)
        else (0, 0),
        "number of ranks": (saved.strategy.world_size, run_plan.strategy.world_size),
        "tokens per step": (saved.workload.tokens_per_step, run_plan.workload.tokens_per_step),
        "strategy": (str(saved.strategy), str(run_plan.strategy)),
    }
    for name, (planned, own) in facts.items():
        if planned != own:
            raise PlanMismatch(
                f"the saved plan and the run differ in {name}",
                where=file,
                got=f"plan: {planned}; run: {own}",
                hint=f"hyper-parallel plan --recipe RECIPE.yaml -o {shlex.quote(file)}, with the recipe of the run",
            )
