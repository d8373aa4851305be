"""`hyper-parallel generate`: continue prompts with the model of a run."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyper_parallel.cli.app import NoCode, collect_cycles, say
from hyper_parallel.errors import BadValue, Contradiction

if TYPE_CHECKING:
    from hyper_parallel.trainer.generation import Sampling
    from hyper_parallel.trainer.generation_memory import DeviceMemory


def generate(
    run_dir: Annotated[
        Path, typer.Argument(help="Directory of a run, or a Hugging Face model directory.")
    ],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help='Many at once instead: JSON lines with "prompt".', dir_okay=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="With --prompts: JSON lines to write. Default: stdout."
        ),
    ] = None,
    slots: Annotated[int, typer.Option(help="With --prompts: sequences at a time.", min=1)] = 32,
    parallel: Annotated[
        str,
        typer.Option(help='With --prompts: layout, in the words of a recipe: "tp=2", "pp=2".'),
    ] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Limit of the continuation.", min=1)] = 128,
    temperature: Annotated[
        float, typer.Option(help="0: most likely token; higher: more varied.", min=0.0)
    ] = 0.8,
    top_p: Annotated[float, typer.Option(help="Share of probability drawn from.")] = 0.95,
    top_k: Annotated[int, typer.Option(help="Most tokens drawn from; 0: all.", min=0)] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the continuation; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="The prompt is a user's turn. Without a prompt: a conversation."
        ),
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
    no_code: NoCode = False,
) -> None:
    """Continue a prompt with the model of a run; the text appears on stdout as it is made.

    With --chat and no prompt, every line of standard input is a user's turn of one conversation.
    With --prompts many are continued at once, each as if it were alone, and come out in their order: every line with
    `text`, `token_ids`, `logprobs` and `finish`. Lines of a run that was interrupted may be given again, and go on.
    """
    from hyper_parallel.trainer.generation import Generator, Sampling
    from hyper_parallel.trainer.generation_memory import describe_use

    if no_code and trust_remote_code:
        raise Contradiction(
            "code that lies in the directory is both trusted and refused",
            got="--no-code --trust-remote-code",
            hint=f"hyper-parallel generate {run_dir} --no-code",
        )
    collect_cycles()
    memory = _memory(device_memory, dram, flash_dir, topology)
    sampling = Sampling(max_new_tokens, temperature, top_p, seed, top_k, tuple(stop or ()))
    if prompts is not None:
        if prompt is not None or as_json or (parallel and memory is not None):
            what = "--prompt and --json are for one prompt"
            if parallel and memory is not None:
                what = "a budget of device memory is for one device"
            raise Contradiction(
                what,
                got=f"--prompts, --parallel {parallel}" if parallel else "--prompts",
                hint=f"hyper-parallel generate {run_dir} --prompts {prompts} -o OUT.jsonl",
            )
        place = {"device": device, "dtype": dtype, "trusted": trust_remote_code}
        chosen = {"chat": chat, "slots": slots, "parallel": parallel}
        _many(run_dir, prompts, output, sampling, memory, topology, **chosen, **place)
        return
    if prompt is None and chat and not (as_json or output is not None or parallel):
        from hyper_parallel.cli.chat_session import converse

        place = {"device": device, "dtype": dtype, "memory": memory}
        converse(Generator(run_dir, trusted=trust_remote_code, **place), sampling)
        return
    if prompt is None or output is not None or parallel:
        raise BadValue(
            "there is nothing to continue"
            if prompt is None
            else "-o and --parallel take --prompts",
            hint='--prompt "Once"' if prompt is None else "--prompts FILE.jsonl",
        )
    model = Generator(run_dir, device=device, dtype=dtype, memory=memory, trusted=trust_remote_code)
    if as_json:
        say(json.dumps(asdict(model.generate(prompt, sampling, chat=chat))))
        return
    pieces = model.stream(prompt, sampling, chat=chat)
    if not chat:
        say(prompt, nl=False)
    for piece in pieces:
        say(piece, nl=False)
        sys.stdout.flush()
    say()
    if model.memory_use is not None:
        for line in describe_use(model.memory_use, topology):
            say(line, err=True)


def _memory(
    device: str | None, dram: str | None, flash_dir: Path | None, topology: str
) -> DeviceMemory | None:
    from hyper_parallel.trainer.generation_memory import DeviceMemory

    if device is not None:
        return DeviceMemory.parse(device, dram, flash_dir, topology)
    if dram is not None or flash_dir is not None or topology != "local":
        raise BadValue(
            "--dram, --flash-dir and --topology say what --device-memory may use beside the device",
            hint="--device-memory 4GiB",
        )
    return None


def _many(
    run_dir: Path,
    prompts: Path,
    output: Path | None,
    sampling: Sampling,
    memory: DeviceMemory | None,
    topology: str,
    *,
    chat: bool,
    slots: int,
    parallel: str,
    device: str,
    dtype: str | None,
    trusted: bool,
) -> None:
    """Continue the prompts of a file; after a signal what there is is written, and the signal's status returned."""
    from hyper_parallel.trainer.generation import Generator
    from hyper_parallel.trainer.generation_memory import describe_use
    from hyper_parallel.trainer.prompt_file import read_prompts, write_generations
    from hyper_parallel.trainer.signals import StopRequest

    records, given = read_prompts(prompts, output)
    stop, chosen = StopRequest("writes what there is"), {"chat": chat, "slots": slots}
    place = {"device": device, "dtype": dtype, "trusted": trusted}
    with stop.watched():
        if parallel:
            from hyper_parallel.trainer.generation_ranks import generate_on_ranks

            made = generate_on_ranks(
                run_dir, given, sampling, parallel, stop=stop, **chosen, **place
            )
        else:
            model = Generator(run_dir, memory=memory, **place)
            made = model.generate_batch(given, sampling, interrupt=lambda: stop.asked, **chosen)
            for line in describe_use(model.memory_use, topology) if model.memory_use else ():
                say(line, err=True)
    if os.environ.get("RANK", "0") == "0":
        write_generations(records, made, output)
    if stop.asked:
        left = sum(g.finish is None for g in made)
        told = f"interrupted: {left} of {len(made)} prompts are not finished; their lines go on where they are given"
        say(told, err=True)
        raise typer.Exit(128 + (stop.signum or signal.SIGTERM))
