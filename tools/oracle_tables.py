"""Inputs of `tools/oracles.py`: test files, model types, plan commands and benchmark cells.

Test ids are those of the recorded baseline. A renamed test or file is entered under `renames` of
tools/oracles_baseline.json, not here. When an option or script is renamed, its command changes here, and the recorded
values remain.
"""

from __future__ import annotations

from dataclasses import dataclass

ERROR_FILES: tuple[tuple[str, ...], ...] = (
    (
        "tests/config/test_load.py", "tests/config/test_foreign_keys.py", "tests/config/test_pasted_hints.py",
        "tests/topology/test_presets.py", "tests/shard/test_rules.py", "tests/ir/test_layout.py",
        "tests/mpmd/test_verify.py", "tests/mpmd/test_strategy.py", "tests/model/test_load.py",
        "tests/planner/test_recipe.py", "tests/planner/test_pins.py",
    ),
    (
        "tests/received/test_limits.py", "tests/received/test_recipes.py", "tests/received/test_configs.py",
        "tests/received/test_runs.py", "tests/trainer_data/test_source_forms.py",
        "tests/trainer_data/test_record_forms.py", "tests/trainer_data/test_sources.py",
        "tests/trainer/test_offload_refusals.py", "tests/planner/test_generation.py",
    ),
)  # fmt: skip
"""Test files, in groups that run in one process each, whose coded errors are recorded."""

PARITY_FILES: tuple[tuple[str, ...], ...] = (
    (
        "tests/torch_memory/test_parity.py", "tests/torch_backend/test_swap.py",
        "tests/weights/test_packed.py", "tests/parity/test_tensor_2d.py", "tests/parity/test_reshard.py",
    ),
    (
        "tests/parity/test_parity.py", "tests/parity/test_context.py", "tests/parity/test_router_loss.py",
        "tests/parity/test_experts.py", "tests/parity/test_pipeline.py",
    ),
)  # fmt: skip
"""Groups of test files that compare results bitwise or within rounding."""

CENSUS_TYPES = (
    "cohere", "deepseek_v3", "falcon_h1", "gemma2", "glm4_moe", "gpt_neox", "gpt_oss", "llama", "mamba", "opt",
    "qwen2_vl", "qwen3_moe",
)  # fmt: skip
"""Model types of the live census: grouped and plain attention, experts, latent attention, state space, images."""
CENSUS_AXES = "pp,tp,cp"

PLANS: dict[str, str] = {
    "dense": "llama-3-8b -t dgx-h100 --devices 16",
    "dense, one device": "qwen3-8b -t dgx-h200 --devices 1 --seq-len 4096",
    "dense, pipeline pinned": "llama-3-70b -t dgx-a100 --devices 64 --pin pp=4 --pin schedule=zbv",
    "dense, long sequences": "llama-3-8b -t dgx-b200 --devices 32 --seq-len 131072 --exclude pp",
    "dense, large pool": "llama-3-405b -t cloudmatrix384 --devices 384 --all-layouts",
    "experts": "qwen3-30b-a3b -t dgx-h100 --devices 16",
    "experts, fewest devices": "mixtral-8x7b -t gb200-nvl72 --objective fewest-devices --deadline 20",
    "experts, pinned": "gpt-oss-120b -t atlas-900-a2 --devices 64 --pin ep=8",
    "latent attention": "deepseek-v3 -t cloudmatrix384 --devices 384",
    "offload": "llama-3-8b -t h100-96gb --devices 1 --seq-len 4096 --offload",
    "refused": "llama-3-405b -t dgx-h800 --devices 8",
    "generate": "llama-3-70b -t dgx-h100 --devices 8 --for generate",
    "generate, experts": "mixtral-8x7b -t tpu-v5p --devices 8 --for generate --objective latency --prompts 8",
}
"""Arguments of `hyper-parallel plan --json` by name."""

EXACT = 0.0
FORMULA = 1e-12
SOLVER = 1e-6


@dataclass(frozen=True)
class Benchmark:
    """Benchmark command, and the figures of its output to compare.

    Attributes:
        command: Script below benchmarks/ with its arguments; its output is JSON.
        cells: Pair of path and relative tolerance by name. A path consists of keys and indices separated by "/";
            `key=value` selects a row of a list.
        reason: Reason for the tolerance.
    """

    command: str
    cells: dict[str, tuple[str, float]]
    reason: str


CLOSED_FORM = "closed forms: the order of additions may change the last bits; counts and choices are exact"
SOLVED = (
    "bytes and counts of a captured program are exact; simulated seconds are sums in program order; plans come from a "
    "linear program and may move in the last digits with the solver"
)


def _policy(policy: str, goal: str, figure: str) -> str:
    """Return the path of a figure in the output of offload_policies.py."""
    simulated = "" if figure.startswith("arena") else "simulated_"
    return f"rows/policy={policy},goal={goal}/{simulated}{figure}"


BENCHMARKS: tuple[Benchmark, ...] = (
    Benchmark(
        "planner_speed.py --json --repeat 1 --only 8b",
        {
            "search: priced strategies": ("0/priced", EXACT),
            "search: cut strategies": ("0/cut", EXACT),
            "search: simulated strategies": ("0/simulated", EXACT),
            "search: strategy": ("0/strategy", EXACT),
            "search: gap": ("0/gap", FORMULA),
            "search: step_s": ("0/step_s", FORMULA),
            "search: MFU": ("0/mfu", FORMULA),
        },
        CLOSED_FORM,
    ),
    Benchmark(
        "planner_pins.py --json --draws 6 --each 3 --seed 5",
        {
            "pins: sub-spaces": ("summary/sub_spaces", EXACT),
            "pins: better than the free search": ("summary/better", EXACT),
            "pins: largest gap": ("summary/largest_gap", FORMULA),
        },
        CLOSED_FORM,
    ),
    Benchmark(
        "offload_addresses.py --json --parts random --random 4",
        {
            "addresses: plans": ("random/plans", EXACT),
            "addresses: plans over 2 %": ("random/over_2_percent/#", EXACT),
            "addresses: worst within 2 %": ("random/worst_within_2_percent", SOLVER),
        },
        SOLVED,
    ),
    Benchmark(
        "offload_policies.py --json --layers 2 --tokens 2048 --bandwidths 50 --budget-gb 4 --skip-error "
        "--policies ours,recompute-only,longest-gap,on-demand,keep",
        {
            "offload: operators": ("operators", EXACT),
            "offload: start bytes": ("start_peak_bytes", EXACT),
            "offload: start seconds": ("start_step_s", FORMULA),
            "offload: bound by copies": ("no_plan_below/0/copies/num_bytes", SOLVER),
            "offload: bound with recompute": ("no_plan_below/0/copies_and_recompute/num_bytes", SOLVER),
            "offload, least peak: ours, bytes": (_policy("ours", "peak", "peak_bytes"), SOLVER),
            "offload, least peak: ours, seconds": (_policy("ours", "peak", "step_s"), SOLVER),
            "offload, least peak: recompute-only, bytes": (_policy("recompute-only", "peak", "peak_bytes"), SOLVER),
            "offload, least peak: longest-gap, bytes": (_policy("longest-gap", "peak", "peak_bytes"), EXACT),
            "offload, least peak: on-demand, bytes": (_policy("on-demand", "peak", "peak_bytes"), EXACT),
            "offload, least peak: on-demand, seconds": (_policy("on-demand", "peak", "step_s"), FORMULA),
            "offload, 4 GB: ours, bytes": (_policy("ours", "time", "peak_bytes"), SOLVER),
            "offload, 4 GB: ours, seconds": (_policy("ours", "time", "step_s"), SOLVER),
            "offload, 4 GB: ours, arena over peak": (_policy("ours", "time", "arena_over_peak"), SOLVER),
            "offload, 4 GB: longest-gap, bytes": (_policy("longest-gap", "time", "peak_bytes"), EXACT),
        },
        SOLVED,
    ),
)  # fmt: skip
"""Cheap commands with deterministic figures. Measured ratios (overhead.py) are left out: they need an idle machine."""
