"""Summary of the data as text, for the command `data`, the start panel and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from hyper_parallel.trainer.data.conversations import CONVERSATIONS
from hyper_parallel.trainer.data.counts import DataCounts

TARGETS: Final = {
    "pt": "loss on every token",
    "sft": "loss on the assistant's tokens",
    "dpo": "the chosen answer is to become likelier than the rejected one",
    "orpo": "loss on the chosen answer, and the rejected one is to become less likely",
    "kto": "good answers are to become likelier, bad ones less likely",
    "rm": "the chosen answer is to get a higher score than the rejected one",
    "grpo": "completions of prompts are sampled and rewarded",
}
"""Description of the training objective of each stage."""
_RECORDS: Final = {
    "pt": "documents", "sft": "conversations", "kto": "answers with labels", "grpo": "prompts",
}  # fmt: skip
_FORMATS: Final = {
    "text": "text (each file is a document)",
    "records": "records with a text",
    "sharegpt": "sharegpt or messages (turns with roles)",
    "alpaca": "alpaca (instruction, input, output)",
    "prompt_completion": "prompt and completion",
    "preference": "preference (a prompt with two answers)",
}


def records_word(stage: str) -> str:
    """Return the plural noun for the records of a stage, such as `conversations` or `pairs`."""
    return _RECORDS.get(stage, "pairs")


def summary_rows(
    stage: str, counts: Sequence[DataCounts], weights: Sequence[float], *, sampled: bool
) -> dict[str, str]:
    """Return the rows of the summary table as a dict from row name to text.

    `weights` has the weight of each source in a mixture. `sampled`: only the beginning of the data was counted.
    """
    source = counts[0].source
    if len(counts) > 1:
        parts = zip(weights, counts, strict=True)
        source = " + ".join(f"{w / sum(weights):.4g} of {c.source}" for w, c in parts)
    formats = dict.fromkeys(_FORMATS.get(c.format, c.format) for c in counts)
    rows = {
        "stage": f"{stage}: {TARGETS[stage]}",
        "source": source,
        "format": ", ".join(formats),
        "examples": _examples(stage, counts, sampled),
    }
    dropped: Counter[str] = sum((c.dropped for c in counts), Counter())
    if dropped.total():
        rows["left out"] = "; ".join(f"{n:,}: {why}" for why, n in dropped.most_common())
    if (note := targets_text(stage, counts)) is not None:
        rows["target tokens"] = note
    return rows


def _examples(stage: str, counts: Sequence[DataCounts], sampled: bool) -> str:
    read, used, cut = (sum(getattr(c, n) for c in counts) for n in ("read", "used", "cut"))
    text = f"{used:,} {records_word(stage)} of {read:,} records"
    if sampled:
        text = f"{used:,} {records_word(stage)} of the first {read:,} records"
    if cut:
        lengths = dict.fromkeys(f"{c.seq_len:,}" for c in counts)
        text += f"; {cut:,} cut to {' or '.join(lengths)} tokens"
    return text


def targets_text(stage: str, counts: Sequence[DataCounts]) -> str | None:
    """Return text on the number of tokens with loss; None for GRPO, which trains on sampled completions."""
    if stage == "grpo":
        return None
    if stage == "rm":
        return "none: each answer is scored at its last token"
    tokens, targets = sum(c.tokens for c in counts), sum(c.target_tokens for c in counts)
    share = f" ({targets / tokens:.1%})" if tokens else ""
    return f"{targets:,} of {tokens:,} tokens{share}"


def notes(stage: str, counts: Sequence[DataCounts]) -> list[str]:
    """Return sentences on ignored keys, changes to the text, and a stage that does not fit the records."""
    sentences = []
    if stage == "pt" and (talks := [c for c in counts if c.format in CONVERSATIONS]):
        sentences.append(
            f"{talks[0].source} holds conversations, and stage `pt` trains on every token of them, the user's "
            "included; `stage=sft` trains on the answers"
        )
    for one in counts:
        lines = [f"{n:,} {remark}" for remark, n in sorted(one.remarks.items()) if n]
        lines += one.passed_over
        sentences += [f"{one.source}: {line}" if len(counts) > 1 else line for line in lines]
    return sentences
