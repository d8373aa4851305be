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
        typer.Option(
            help='File of many prompts instead: JSON lines with "prompt".', dir_okay=False
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="With --prompts: JSON lines file to write. Default: stdout."
        ),
    ] = None,
    slots: Annotated[
        int, typer.Option(help="With --prompts: sequences decoded at a time.", min=1)
    ] = 32,
    parallel: Annotated[
        str,
        typer.Option(
            help='With --prompts: layout, with keys of the section `parallel`: "tp=2", "pp=2".'
        ),
    ] = "",
    max_new_tokens: Annotated[
        int, typer.Option(help="Maximum tokens of the continuation.", min=1)
    ] = 128,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature. 0: most likely token.", min=0.0)
    ] = 0.8,
    top_p: Annotated[
        float, typer.Option(help="Sample from the most likely tokens up to this probability.")
    ] = 0.95,
    top_k: Annotated[
        int, typer.Option(help="Sample from this many most likely tokens; 0: all.", min=0)
    ] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the continuation; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Treat the prompt as a user's message. Without a prompt: interactive."
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, ... Default: as stored.")
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="Device memory to use, such as 4GiB; other data is streamed from DRAM. On a CPU: simulated."
        ),
    ] = None,
    dram: Annotated[
        str | None,
        typer.Option(help="With --device-memory: DRAM to use. Default: unlimited."),
    ] = None,
    flash_dir: Annotated[
        Path | None,
        typer.Option(help="With --device-memory: folder for data that exceeds DRAM."),
    ] = None,
    topology: Annotated[
        str, typer.Option(help="With --device-memory: machine to plan for.")
    ] = "local",
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run Python code in the model directory."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with text, tokens and time.")
    ] = False,
    no_code: NoCode = False,
) -> None:
    """Continue a prompt with the model of a run; text is printed on stdout as it is generated.

    With --chat and no prompt, every line of standard input is a user's turn of one conversation. With --prompts, many
    prompts are continued at once, with the same results as one at a time and in input order. Each output line has
    `text`, `token_ids`, `logprobs` and `finish`. Output lines of an interrupted run can be given as input again and are
    completed.
    """
    from hyper_parallel.trainer.generation import Generator, Sampling
    from hyper_parallel.trainer.generation_memory import describe_use

    if no_code and trust_remote_code:
        raise Contradiction(
            "--trust-remote-code allows code that --no-code forbids",
            got="--no-code --trust-remote-code",
            hint=f"hyper-parallel generate {run_dir} --no-code",
        )
    collect_cycles()
    memory = _memory(device_memory, dram, flash_dir, topology)
    sampling = Sampling(max_new_tokens, temperature, top_p, seed, top_k, tuple(stop or ()))
    if prompts is not None:
        if prompt is not None or as_json or (parallel and memory is not None):
            problem = "--prompt and --json apply to a single prompt"
            if parallel and memory is not None:
                problem = "--device-memory applies to a single device"
            raise Contradiction(
                problem,
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
            "no prompt is given" if prompt is None else "-o and --parallel need --prompts",
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
            "--dram, --flash-dir and --topology apply only with --device-memory",
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
    """Continue the prompts of a file.

    After a signal, the text generated so far is written and the exit status is that of the signal.
    """
    from hyper_parallel.trainer.generation import Generator
    from hyper_parallel.trainer.generation_memory import describe_use
    from hyper_parallel.trainer.prompt_file import read_prompts, write_generations
    from hyper_parallel.trainer.signals import StopRequest

    records, requests = read_prompts(prompts, output)
    stop, chosen = StopRequest("writes finished and partial texts"), {"chat": chat, "slots": slots}
    place = {"device": device, "dtype": dtype, "trusted": trusted}
    with stop.watched():
        if parallel:
            from hyper_parallel.trainer.generation_ranks import generate_on_ranks

            generations = generate_on_ranks(
                run_dir, requests, sampling, parallel, stop=stop, **chosen, **place
            )
        else:
            model = Generator(run_dir, memory=memory, **place)
            generations = model.generate_batch(
                requests, sampling, interrupt=lambda: stop.asked, **chosen
            )
            for line in describe_use(model.memory_use, topology) if model.memory_use else ():
                say(line, err=True)
    if os.environ.get("RANK", "0") == "0":
        write_generations(records, generations, output)
    if stop.asked:
        unfinished = sum(g.finish is None for g in generations)
        message = f"interrupted: {unfinished} of {len(generations)} prompts are not finished"
        say(f"{message}; give the output file as --prompts to complete them", err=True)
        raise typer.Exit(128 + (stop.signum or signal.SIGTERM))
