"""Sweep: cached generation gives the same tokens as a full forward per token, alone and in a batch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sweeps.interface import (
    causal_types,
    image_text_types,
    one_line,
    plain_model,
    refusal_or_failure,
)

TITLE = "Decoding"
TEXT = """
Greedy decoding of 8 tokens in float64. `one`: the tokens of one prompt are those of plain transformers reading the
whole text again for each token. `batch`: five prompts of different lengths in two slots give the tokens of each prompt
alone. Of equal values `topk` takes the first, as in the sweep of packing.
"""
COLUMNS = ("one", "batch")
SECONDS = 240
NEW_TOKENS = 8
PROMPTS = ("The sea", "a", "Permission is granted to anyone who", "law", "x y z, and so on")


def model_types() -> list[str]:
    """Return all causal and image-text types."""
    return [*causal_types(), *image_text_types()]


def run(model_type: str, folder: Path) -> dict[str, str]:
    """Check one model type, and return the result text of each column."""
    from hyper_parallel.backends.torch.measure_properties import StableTopK

    with StableTopK():
        return compared(model_type, folder)


def compared(model_type: str, folder: Path) -> dict[str, str]:
    """Check one model type, given that `topk` prefers the first of equal values; return the results by column."""
    import torch
    from census import write_tokenizer
    from transformers import AutoTokenizer

    from hyper_parallel.backends.torch.forward_variants import keep_float64
    from hyper_parallel.backends.torch.measure_properties import prepare_model
    from hyper_parallel.trainer.decoding import Sampling
    from hyper_parallel.trainer.generation import Generator

    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    try:
        model = plain_model(model_type).eval()
        prepare_model(model)
        write_tokenizer(folder / "model")
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        prompts = [tokenizer(text, add_special_tokens=False).input_ids for text in PROMPTS]
        whole = [whole_text(model, prompt) for prompt in prompts]
        model.save_pretrained(folder / "model")
        stops = stop_tokens(model, tokenizer)
    except Exception as error:
        return dict.fromkeys(COLUMNS, f"skipped: {one_line(error)}")
    sampling = Sampling(NEW_TOKENS, temperature=0.0)
    cells = {}
    try:
        generator = Generator(folder / "model", device="cpu", dtype="float64")
        for parameter in generator.model.parameters():  # some types keep parameters in float32
            parameter.data = parameter.data.double()
        keep_float64(generator.model)
        torch.set_num_threads(1)
        with torch.no_grad():
            one = [generator.generate(text, sampling).token_ids for text in PROMPTS]
        cells["one"] = compare(one, whole, stops)
        batch = generator.generate_batch(PROMPTS, sampling, slots=2)
        cells["batch"] = compare([made.token_ids for made in batch], whole, stops)
    except BaseException as error:
        cells.setdefault("one", refusal_or_failure(error))
        cells.setdefault("batch", refusal_or_failure(error))
    return cells


def whole_text(model: Any, prompt: list[int]) -> list[int]:
    """Return the greedy continuation, computed with a full forward of the text for each token."""
    import torch

    text = [*prompt]
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
            text.append(int(logits.argmax()))
    return text[len(prompt) :]


def stop_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Return the tokens that end a text, from the tokenizer, the config and the generation config."""
    stops = {tokenizer.eos_token_id}
    for source in (model.config.get_text_config(), model.config, model.generation_config):
        named = getattr(source, "eos_token_id", None)
        stops.update(named if isinstance(named, list) else [named])
    return stops


def compare(found: list[Any], whole: list[list[int]], stops: set[int]) -> str:
    """Return the result text for generated continuations, compared with full-forward ones up to a stop token."""
    for number, (got, want) in enumerate(zip(found, whole, strict=True)):
        got = [*got]
        if got and got[-1] in stops:
            got.pop()
        ended = len(got) == len(want) or want[len(got)] in stops
        if got != want[: len(got)] or not ended:
            return f"wrong: prompt {number} gives {got}, the whole text {want}"
    return "ok"
