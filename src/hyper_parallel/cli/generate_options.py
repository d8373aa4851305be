"""Options of `hyper-parallel generate`: type and help text of each parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

RunDir = Annotated[
    Path,
    Argument(help="Directory of a run, Hugging Face model directory, or a name on the Hugging Face hub."),
]
Prompt = Annotated[str | None, Option(help="Text to continue.")]
Image = Annotated[
    list[str] | None,
    Option(help="With --prompt: image file in the user's message; may be repeated."),
]
Audio = Annotated[
    list[str] | None,
    Option(help="With --prompt: audio file in the user's message; may be repeated."),
]
Prompts = Annotated[
    Path | None,
    Option(help='JSON lines file of many prompts, each line with the key "prompt".', dir_okay=False),
]
Output = Annotated[
    Path | None,
    Option("--output", "-o", help="With --prompts: JSON lines file to write. Default: stdout."),
]
NoCode = Annotated[
    bool,
    Option(
        "--no-code",
        help="Forbid code in the model directory (default). An error with --trust-remote-code.",
    ),
]
Slots = Annotated[int, Option(help="With --prompts: sequences decoded at a time.", min=1)]
Parallel = Annotated[str, Option(help='With --prompts: layout, with keys of the section `parallel`: "tp=2", "pp=2".')]
MaxNewTokens = Annotated[int, Option(help="Maximum tokens of the continuation.", min=1)]
Temperature = Annotated[float, Option(help="Sampling temperature. 0: most likely token.", min=0.0)]
TopP = Annotated[float, Option(help="Sample from the most likely tokens up to this total probability.")]
TopK = Annotated[int, Option(help="Sample from this many most likely tokens; 0: all.", min=0)]
Stop = Annotated[list[str] | None, Option(help="Text that ends the continuation; may be repeated.")]
Seed = Annotated[int, Option(help="Random seed. The same seed gives the same text.")]
Chat = Annotated[
    bool,
    Option("--chat", help="Treat the prompt as a user's message. Without a prompt: interactive."),
]
Device = Annotated[str, Option(help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str | None, Option(help="float32, bfloat16, ... Default: as stored.")]
DeviceMemory = Annotated[
    str | None,
    Option(help="Device memory to use, such as 4GiB; other data is streamed from DRAM. On a CPU: simulated."),
]
Dram = Annotated[str | None, Option(help="With --device-memory: DRAM to use. Default: unlimited.")]
FlashDir = Annotated[Path | None, Option(help="With --device-memory: folder for data that exceeds DRAM.")]
Topology = Annotated[str, Option(help="With --device-memory: machine to plan for (preset name, YAML file, or local).")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object with text, tokens and time.")]
