"""Sweep: packed documents are independent, or the run is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sweeps.interface import causal_types, image_text_types, one_line, plain_model

TITLE = "Packing in SFT"
TEXT = """
One training step of `stage: sft` in float64 on four conversations of different lengths, once packed into rows (the
default) and once one conversation a row. `step`: loss and gradient norm are equal to 1e-9, or the packed run is
refused. A refusal is `wrong` when plain transformers, given positions that restart with each document, computes the
same loss for packed and separate conversations. Of equal values `topk` takes the first here: which one torch takes
depends on the length of the row, and small indexers (deepseek_v32) score many tokens with exactly 0.
"""
COLUMNS = ("step",)
SECONDS = 300
LIMIT = 1e-9
SEQ_LEN = 96
TURNS = (
    ("How do you do?", "Fine."),
    ("Name a colour", "Green, like a leaf in spring."),
    ("2 + 2", "4"),
    ("Say something longer about the sea", "It is deep."),
)
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def model_types() -> list[str]:
    """Return all causal and image-text types."""
    return [*causal_types(), *image_text_types()]


def run(model_type: str, folder: Path) -> dict[str, str]:
    """Check one model type, and return its result text by column."""
    from hyper_parallel.backends.torch.measure_properties import StableTopK

    with StableTopK():
        return compared(model_type, folder)


def compared(model_type: str, folder: Path) -> dict[str, str]:
    """Check one model type, given that `topk` prefers the first of equal values; return its result by column."""
    from census import run_cell, write_tokenizer

    try:
        model = plain_model(model_type)
    except Exception as error:
        return {"step": f"skipped: {one_line(error)}"}
    model.save_pretrained(folder / "weights")
    write_tokenizer(folder / "tokenizer")
    add_template(folder / "tokenizer")
    lines = [json.dumps({"messages": conversation(q, a)}) for q, a in TURNS]
    (folder / "chat.jsonl").write_text("\n".join(lines) + "\n")
    file = folder / "recipe.json"
    file.write_text(json.dumps(recipe(folder)))
    apart, got = run_cell(file, folder, ["data.packing=false", tokens(4)])
    if apart != "ok":
        refused = apart.startswith("HP") or plain_fails(model)
        return {"step": apart if apart.startswith("HP") else f"{'skipped' if refused else 'fails'}: {apart}"}
    packed, rows = run_cell(file, folder, [tokens(packed_rows(folder))])
    if packed != "ok":
        untrue = packed.startswith("HP104") and plain_is_independent(model)
        return {"step": f"wrong: refused, but independent: {packed}" if untrue else packed}
    off = max(abs(a - b) / abs(a) for a, b in pairs(got[0], rows[0]))
    return {"step": "ok" if off <= LIMIT else f"wrong: packed differs by {off:.1e}"}


def pairs(a: dict[str, float], b: dict[str, float]) -> list[tuple[float, float]]:
    """Return pairs of the two steps' losses and of their gradient norms."""
    return [(a[key], b[key]) for key in ("loss", "grad_norm")]


def tokens(rows: int) -> str:
    """Return the override for a step of `rows` rows."""
    return f"training.tokens_per_step={rows * SEQ_LEN}"


def packed_rows(folder: Path) -> int:
    """Return the number of rows that the packed conversations fill."""
    from hyper_parallel.config import load_recipe
    from hyper_parallel.trainer.data import prepare
    from hyper_parallel.trainer.engine.recipe_model import read_spec  # noqa: F401

    recipe = load_recipe(folder / "recipe.json", [tokens(1)]).recipe
    data = prepare(
        recipe.data,
        stage="sft",
        model_path=recipe.model.path,
        seed=3,
        progress=False,
        vocab_limit=320,
    )
    return len(data.train)


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    """Return a conversation of one question and answer, in OpenAI's format."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def add_template(tokenizer: Path) -> None:
    """Add a chat template to a saved tokenizer."""
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(tokenizer)
    made.chat_template = TEMPLATE
    made.save_pretrained(tokenizer)


def recipe(folder: Path) -> dict[str, Any]:
    """Return the recipe of a run of one step."""
    return {
        "model": {"path": str(folder / "weights"), "init": "pretrained"},
        "stage": "sft",
        "parallel": {"dp_shard": 1},
        "data": {
            "source": str(folder / "chat.jsonl"),
            "seq_len": SEQ_LEN,
            "tokenizer": str(folder / "tokenizer"),
            "holdout": 0.0,
            "cache_dir": str(folder / "cache"),
        },
        "training": {"steps": 1, "dtype": "float64", "seed": 3},
        "checkpoint": {"export": False, "resume": "never"},
    }


def documents() -> list[Any]:
    """Return the token ids of two texts."""
    import torch

    drawn = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(5))
    return [drawn[:1, :17], drawn[1:, :29]]


def plain_fails(model: Any) -> bool:
    """Return whether plain transformers fails to compute a loss on text."""
    try:
        model(input_ids=documents()[0], use_cache=False)
    except Exception as error:
        sys.stderr.write(f"{one_line(error)}\n")
        return True
    return False


def plain_is_independent(model: Any) -> bool:
    """Return whether plain transformers gives equal logits for packed and separate texts."""
    import torch

    from hyper_parallel.backends.torch.forward_variants import keep_float64

    keep_float64(model.eval())
    texts = documents()
    places = [torch.arange(text.shape[1])[None] for text in texts]
    try:
        with torch.no_grad():
            packed = model(input_ids=torch.cat(texts, 1), position_ids=torch.cat(places, 1), use_cache=False).logits
            apart = [
                model(input_ids=t, position_ids=p, use_cache=False).logits for t, p in zip(texts, places, strict=True)
            ]
    except Exception:
        return False
    off = (packed - torch.cat(apart, 1)).abs().max() / packed.abs().max()
    return float(off) <= LIMIT
