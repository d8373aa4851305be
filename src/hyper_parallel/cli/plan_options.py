"""Options of `hyper-parallel plan`: type and help text of each parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

Model = Annotated[
    str | None,
    Argument(
        help="Preset name, Hugging Face directory, config.json, or a name on the Hugging Face hub.",
        show_default=False,
    ),
]
Topology = Annotated[
    str | None,
    Option(
        "--topology",
        "-t",
        help="Preset name (an unknown name lists all), YAML file, or local. Default: local, or the recipe's.",
    ),
]
Devices = Annotated[int | None, Option(min=1, help="Devices to use. Default: all of the topology.")]
SeqLen = Annotated[int | None, Option(min=2, help="Tokens per sequence. Default: the model's, at most 8192.")]
TokensPerStep = Annotated[int | None, Option(min=1, help="Tokens of one step over all devices.")]
Pin = Annotated[list[str] | None, Option(help="Fix a degree or choice: tp=8, schedule=zbv. May be repeated.")]
Exclude = Annotated[
    list[str] | None,
    Option(help="Axes and choices to exclude: cp,gathered_inputs. May be repeated."),
]
Objective = Annotated[
    str,
    Option(
        help="step-time, tokens-per-device-second, memory or fewest-devices. For generation: throughput or latency."
    ),
]
Deadline = Annotated[
    float | None,
    Option(help="Maximum step time in seconds, for fewest-devices or memory.", min=0.0),
]
Top = Annotated[int, Option(min=0, help="Runners-up to print.")]
Offload = Annotated[
    bool,
    Option(
        "--offload",
        help="Allow offload to host memory and recomputation if device memory is exceeded.",
    ),
]
AllLayouts = Annotated[bool, Option("--all-layouts", help="For studies: include layouts that this version cannot run.")]
MemoryHeadroom = Annotated[
    str | None,
    Option(help="Fraction of device memory to leave free. Default: 5% on accelerators, 0% on a CPU."),
]
Media = Annotated[
    int | None,
    Option(min=0, help="For multimodal models: images or recordings of 30 s per sequence. Default: 4."),
]
ImageSize = Annotated[
    int | None,
    Option(
        min=1,
        help="For multimodal models: side of an image in pixels, if its encoder reads any size. Default: 896.",
    ),
]
Recipe = Annotated[Path | None, Option(help="Plan this recipe instead of a model.")]
Output = Annotated[Path | None, Option("--output", "-o", help="Write the plan to this file.")]
ScheduleCsv = Annotated[
    Path | None,
    Option(help="Write the actions of every pipeline rank as CSV for torch.distributed.pipelining."),
]
AsJson = Annotated[bool, Option("--json", help="Print the plan as JSON.")]
DryRun = Annotated[bool, Option("--dry-run", help="Write no files.")]
Explain = Annotated[bool, Option("--explain", help="Print every cost term, layout, collective and runner-up.")]
Gantt = Annotated[bool, Option("--gantt", help="Also draw the simulated schedule.")]
Launch = Annotated[
    str | None,
    Option(
        help="Print launch settings instead of the plan: ours (a recipe) or megatron (flags).",
        show_default=False,
    ),
]
Diff = Annotated[
    tuple[Path, Path] | None,
    Option(help="Print the differences of two plan files instead of planning."),
]
Purpose = Annotated[str, Option("--for", help="Purpose: train, or generate (prompts continued by `generate`).")]
Prompts = Annotated[int | None, Option(help="For generation: prompts over all devices. Default: 32.")]
PromptLen = Annotated[int | None, Option(help="For generation: tokens per prompt. Default: 512.")]
NewTokens = Annotated[int | None, Option(help="For generation: tokens per continuation. Default: 128.")]
Parallel = Annotated[str | None, Option(help='For generation: use this layout: "tp=8", "pp=2 tp=4".')]
Dtype = Annotated[str | None, Option(help="For generation: float32, bfloat16, ... Default: as stored.")]
