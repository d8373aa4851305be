"""`hyper-parallel generate`: continue prompts with the model of a run."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hyper_parallel.cli import generate_options as options
from hyper_parallel.cli.app import TrustRemoteCode, enable_garbage_collection, say
from hyper_parallel.errors import BadValue, Contradiction

if TYPE_CHECKING:
    from hyper_parallel.trainer.generation import Generator, Sampling
    from hyper_parallel.trainer.generation_memory import DeviceMemory


def generate(
    run_dir: options.RunDir,
    prompt: options.Prompt = None,
    image: options.Image = None,
    audio: options.Audio = None,
    prompts: options.Prompts = None,
    output: options.Output = None,
    slots: options.Slots = 32,
    parallel: options.Parallel = "",
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.8,
    top_p: options.TopP = 0.95,
    top_k: options.TopK = 0,
    stop: options.Stop = None,
    seed: options.Seed = 0,
    chat: options.Chat = False,
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    device_memory: options.DeviceMemory = None,
    dram: options.Dram = None,
    flash_dir: options.FlashDir = None,
    topology: options.Topology = "local",
    trust_remote_code: TrustRemoteCode = False,
    as_json: options.AsJson = False,
    no_code: options.NoCode = False,
) -> None:
    """Continue a prompt with the model of a run; without --json, text is printed on stdout as it is generated.

    With --chat and no prompt, every line of standard input is a user's turn of one conversation. With --prompts, many
    prompts are continued at once, with the same results as one at a time and in input order. Each output line has
    `text`, `token_ids`, `logprobs` and `finish`. To complete an interrupted run, give its output file as --prompts.
    """
    from hyper_parallel.trainer.generation import Sampling

    _check_code_options(no_code, trust_remote_code)
    enable_garbage_collection()
    memory = _memory(device_memory, dram, flash_dir, topology)
    sampling = Sampling(max_new_tokens, temperature, top_p, seed, top_k, tuple(stop or ()))
    source = _ModelSource(run_dir, device, dtype, trust_remote_code, memory, topology)
    media = [("image", path) for path in image or ()] + [("audio", path) for path in audio or ()]
    if media and (prompt is None or prompts is not None):
        raise _media_error(*media[0], from_file=prompts is not None)
    if prompts is not None:
        if prompt is not None or as_json or (parallel and memory is not None):
            raise _prompts_conflict(source, prompt is not None, as_json, parallel)
        _continue_file(source, prompts, output, sampling, parallel, chat=chat, slots=slots)
    elif prompt is None and chat and not (as_json or output is not None or parallel):
        from hyper_parallel.cli.chat_session import converse

        converse(source.load(), sampling)
    elif output is not None or parallel:
        raise _prompts_missing(output is not None, bool(parallel), prompt is not None, as_json)
    elif prompt is None:
        raise BadValue("no prompt is given", hint='--prompt "Once"')
    else:
        _continue_prompt(source, prompt, media, sampling, chat=chat, as_json=as_json)


@dataclass(frozen=True, slots=True)
class _ModelSource:
    """Directory or Hub name of a model, with the command's options for loading it."""

    run_dir: Path
    device: str
    dtype: str | None
    trusted: bool
    memory: DeviceMemory | None
    topology: str

    def load(self) -> Generator:
        from hyper_parallel.trainer.generation import Generator

        return Generator(self.run_dir, device=self.device, dtype=self.dtype, memory=self.memory, trusted=self.trusted)


def _check_code_options(no_code: bool, trusted: bool) -> None:
    if no_code and trusted:
        raise Contradiction(
            "--trust-remote-code allows code that --no-code forbids",
            got="--no-code --trust-remote-code",
            hint="leave out --trust-remote-code, or --no-code if you trust the code",
        )


def _media_error(kind: str, path: str, *, from_file: bool) -> BadValue:
    hint = f"leave out --{kind}, or give --prompt instead of --prompts" if from_file else '--prompt "What is this?"'
    return BadValue(f"--{kind} needs --prompt, the text of the message that contains it", got=path, hint=hint)


def _prompts_conflict(source: _ModelSource, has_prompt: bool, as_json: bool, parallel: str) -> Contradiction:
    single = [name for name, is_given in (("--prompt", has_prompt), ("--json", as_json)) if is_given]
    if single:
        names = " and ".join(single)
        problem = f"{names} {'apply' if len(single) > 1 else 'applies'} to a single prompt"
        return Contradiction(problem, got=f"--prompts with {names}", hint=f"leave out {names}, or --prompts")
    assert source.memory is not None
    return Contradiction(
        "--device-memory applies to a single device",
        got=f"--device-memory with --parallel {parallel}",
        hint="leave out --parallel, or --device-memory and its options",
    )


def _prompts_missing(has_output: bool, has_parallel: bool, has_prompt: bool, as_json: bool) -> BadValue:
    """Return the error for options that need `--prompts`, which excludes `--prompt` and `--json`."""
    names = " and ".join(["-o"] * has_output + ["--parallel"] * has_parallel)
    single = " and ".join(["--prompt"] * has_prompt + ["--json"] * as_json)
    hint = f"leave out {names}, or give --prompts FILE.jsonl in place of {single}" if single else "--prompts FILE.jsonl"
    return BadValue(f"{names} {'need' if has_output and has_parallel else 'needs'} --prompts", hint=hint)


def _memory(device: str | None, dram: str | None, flash_dir: Path | None, topology: str) -> DeviceMemory | None:
    from hyper_parallel.trainer.generation_memory import DeviceMemory

    if device is not None:
        return DeviceMemory.parse(device, dram, flash_dir, topology)
    if dram is not None or flash_dir is not None or topology != "local":
        raise BadValue(
            "--dram, --flash-dir and --topology apply only with --device-memory",
            hint="--device-memory 4GiB",
        )
    return None


def _continue_prompt(
    source: _ModelSource,
    text: str,
    media: Sequence[tuple[str, str]],
    sampling: Sampling,
    *,
    chat: bool,
    as_json: bool,
) -> None:
    """Print a prompt, unless it is a chat, and its continuation as it is generated; with `as_json`, print JSON only.

    A prompt with media becomes a user's message, in which the media precede the text.
    """
    model = source.load()
    prompt: str | list[dict[str, object]] = text
    if media:
        parts: list[dict[str, str]] = [{"type": kind, kind: path} for kind, path in media]
        prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    chat = chat or bool(media)
    if as_json:
        say(json.dumps(asdict(model.generate(prompt, sampling, chat=chat))))
        return
    pieces = model.stream(prompt, sampling, chat=chat)
    if not chat:
        say(text, nl=False)
    for piece in pieces:
        say(piece, nl=False)
        sys.stdout.flush()
    say()
    _print_memory_use(model, source.topology)


def _print_memory_use(model: Generator, topology: str) -> None:
    from hyper_parallel.trainer.generation_memory import describe_use

    if model.memory_use is not None:
        for line in describe_use(model.memory_use, topology):
            say(line, err=True)


def _continue_file(
    source: _ModelSource,
    prompts: Path,
    output: Path | None,
    sampling: Sampling,
    parallel: str,
    *,
    chat: bool,
    slots: int,
) -> None:
    """Write the continuations of a file of prompts on rank 0, to `output` or, if it is None, to standard output.

    After a signal, the text generated so far is written, and the exit status is 128 plus the number of the signal.
    """
    from hyper_parallel.trainer.prompt_file import read_prompts, write_generations
    from hyper_parallel.trainer.signals import StopRequest

    records, requests = read_prompts(prompts, output)
    stop = StopRequest("the command writes finished and partial texts and ends")
    with stop.watched():
        if parallel:
            from hyper_parallel.trainer.generation_ranks import generate_on_ranks

            generations = generate_on_ranks(
                source.run_dir,
                requests,
                sampling,
                parallel,
                chat=chat,
                slots=slots,
                device=source.device,
                dtype=source.dtype,
                trusted=source.trusted,
                stop=stop,
            )
        else:
            model = source.load()
            generations = model.generate_batch(
                requests, sampling, chat=chat, slots=slots, interrupt=lambda: stop.is_requested
            )
            _print_memory_use(model, source.topology)
    if os.environ.get("RANK", "0") == "0":
        write_generations(records, generations, output)
    if stop.is_requested:
        unfinished = sum(g.finish is None for g in generations)
        message = f"interrupted: {unfinished} of {len(generations)} prompts are not finished"
        say(f"{message}; give the output file as --prompts to complete them", err=True)
        raise typer.Exit(128 + (stop.signum or signal.SIGTERM))
