"""`hyper-parallel generate`: continue a prompt with the model of a run."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def generate(
    run_dir: Annotated[
        Path, typer.Argument(help="Directory of a run, or a Hugging Face model directory.")
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(help="Limit of the continuation.", min=1)] = 128,
    temperature: Annotated[
        float, typer.Option(help="0: most likely token; higher: more varied.", min=0.0)
    ] = 0.8,
    top_p: Annotated[float, typer.Option(help="Share of probability drawn from.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's turn; use the chat template.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, ...; default: as stored.")
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="Device memory to use, such as 4GiB; the rest is streamed from DRAM. Simulated on a CPU."
        ),
    ] = None,
    dram: Annotated[
        str | None,
        typer.Option(help="With --device-memory: DRAM of this size; default: unlimited."),
    ] = None,
    flash_dir: Annotated[
        Path | None, typer.Option(help="With --device-memory: folder for what DRAM does not hold.")
    ] = None,
    topology: Annotated[
        str, typer.Option(help="With --device-memory: machine to plan for.")
    ] = "local",
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run Python code that lies in the directory."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object with text, tokens and time.")
    ] = False,
) -> None:
    """Continue a prompt with the model of a run; the text appears on stdout as it is made."""
    from hyper_parallel.errors import BadValue
    from hyper_parallel.trainer._generate import Generator, Sampling
    from hyper_parallel.trainer._generate_memory import DeviceMemory, describe_use

    memory = None
    if device_memory is not None:
        memory = DeviceMemory.parse(device_memory, dram, flash_dir, topology)
    elif dram is not None or flash_dir is not None or topology != "local":
        raise BadValue(
            "--dram, --flash-dir and --topology say what --device-memory may use beside the device",
            hint="--device-memory 4GiB",
        )
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    model = Generator(run_dir, device=device, dtype=dtype, memory=memory, trusted=trust_remote_code)
    if as_json:
        typer.echo(json.dumps(asdict(model.generate(prompt, sampling, chat=chat))))
        return
    pieces = model.stream(prompt, sampling, chat=chat)
    if not chat:
        typer.echo(prompt, nl=False)
    for piece in pieces:
        typer.echo(piece, nl=False)
        sys.stdout.flush()
    typer.echo()
    if model.memory_use is not None:
        for line in describe_use(model.memory_use, topology):
            typer.echo(line, err=True)
