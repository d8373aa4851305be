"""`prepare`: from a recipe's `data` section to packed sequences, once, before any rank starts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.config import Data
from hyper_parallel.errors import BadValue, NoData
from hyper_parallel.trainer.data._batches import PackedSequences
from hyper_parallel.trainer.data._cache import cache_root, digest, entry
from hyper_parallel.trainer.data._pack import (
    Flat,
    split_documents,
    tokenise,
    write_conversations,
    write_text,
)
from hyper_parallel.trainer.data._sources import Source, resolve
from hyper_parallel.trainer.data._tokenizer import (
    Tokenizer,
    has_tokenizer,
    model_vocab_size,
    obtain,
)

logger = logging.getLogger(__name__)

_VERSION = 1


@dataclass(frozen=True)
class PackedData:
    """What a run reads.

    Attributes:
        train: Training sequences.
        holdout: Held-out sequences; empty when `data.holdout` is 0.
        tokenizer_dir: Hugging Face tokenizer directory that made the tokens.
        vocab_size: Largest token id plus one.
        fingerprint: Hash of the packed content: the same on every machine that packs the same text alike.
        cached: Whether the cache already held the result.
        notes: What was cut or left out, in words.
    """

    train: PackedSequences
    holdout: PackedSequences
    tokenizer_dir: str
    vocab_size: int
    fingerprint: str
    cached: bool
    notes: tuple[str, ...] = ()


def prepare(
    data: Data,
    *,
    stage: str,
    model_path: str | None,
    seed: int,
    progress: bool = True,
    vocab_limit: int | None = None,
) -> PackedData:
    """Tokenise and pack the source of a recipe, or open the cached result.

    Call it before ranks are forked and before a process group exists. Processes that call it at the same time
    (torchrun) wait for the first one on a file lock, not in a collective.

    Args:
        data: Section `data` of the recipe.
        stage: `pt` (every token is a target) or `sft` (the assistant's tokens are).
        model_path: `model.path` of the recipe; its tokenizer is used when it has one.
        seed: Draws the held-out documents.
        progress: Show bars on stderr.
        vocab_limit: Size of the model's vocabulary. None: read from the config.json at `model_path` when there is one.

    Raises:
        NoData: HP602 when the source is missing, unreadable, empty, or shorter than one sequence.
        BadValue: HP102 when the tokenizer has more tokens than the model.
        Contradiction: HP104 when the stage does not suit the records.
        OutputNotWritable: HP105 when the cache cannot be written.
    """
    source = resolve(data, stage)
    cache = cache_root(data.cache_dir)
    tokenizer = obtain(data, source, model_path, cache, progress)
    limit = model_vocab_size(model_path) if vocab_limit is None else vocab_limit
    if limit is not None and tokenizer.vocab_size > limit:
        trained = not data.tokenizer and not has_tokenizer(model_path)
        raise BadValue(
            "the tokenizer has more tokens than the model's vocabulary",
            where=f"tokenizer: {tokenizer.directory}",
            got=f"tokenizer={tokenizer.vocab_size}, model={limit}",
            allowed=f"a tokenizer of at most {limit} tokens",
            hint=f"data.vocab_size={limit}"
            if trained
            else "data.tokenizer=THE_MODEL'S_OWN_DIRECTORY",
        )

    def build(target: Path) -> dict[str, Any]:
        flat = tokenise(source, tokenizer, stage, target, progress)
        meta = _pack(flat, target, data, source, tokenizer, stage, seed)
        for name in ("flat.tokens", "flat.learn"):
            (target / name).unlink()
        return meta

    matters = [_VERSION, source.identity(), tokenizer.fingerprint, data.seq_len]
    key = digest([*matters, stage, data.holdout, seed])
    directory, meta = entry(cache / "packed", key, build)
    for note in meta["notes"]:
        logger.warning("%s: %s", data.source, note)
    arrays = {n: facts["sha256"] for n, facts in meta["files"].items()}
    return PackedData(
        train=PackedSequences(directory, "train", data.seq_len),
        holdout=PackedSequences(directory, "holdout", data.seq_len),
        tokenizer_dir=str(tokenizer.directory),
        vocab_size=tokenizer.vocab_size,
        fingerprint=digest([arrays, data.seq_len]),
        cached=meta["cached"],
        notes=tuple(meta["notes"]),
    )


def _pack(
    flat: Flat,
    directory: Path,
    data: Data,
    source: Source,
    tokenizer: Tokenizer,
    stage: str,
    seed: int,
) -> dict[str, Any]:
    """Write the sequences of a token stream; what was cut or left out goes into the meta data."""
    notes = [f"{count} {reason}" for reason, count in sorted(source.counts.items()) if count]
    if len(flat.tokens) == 0:
        raise NoData(
            "the data source holds no text",
            where=f"data.source: {source.name}",
            got=", ".join(notes) or f"{len(source.files)} files, no record",
        )
    train, holdout = split_documents(flat, data.holdout, seed, data.seq_len)
    hf = tokenizer.hf
    pad_id = hf.eos_token_id if hf.pad_token_id is None else hf.pad_token_id
    for split, parts in (("train", train), ("holdout", holdout)):
        if stage == "pt":
            write_text(flat, parts, directory, split)
            continue
        num_cut, num_out = write_conversations(flat, parts, directory, split, data.seq_len, pad_id)
        if num_cut:
            notes.append(f"{num_cut} {split} conversations cut to seq_len={data.seq_len}")
        if num_out:
            notes.append(
                f"{num_out} {split} conversations left out: no token of the assistant in them"
            )
    if len(PackedSequences(directory, "train", data.seq_len)) == 0:
        raise _too_short(data, stage, len(flat.tokens), sum(s.stop - s.start for s in train))
    if data.holdout and len(PackedSequences(directory, "holdout", data.seq_len)) == 0:
        notes.append("nothing held out: too little text for one more sequence")
    return {"notes": notes, "num_documents": len(flat.spans), "num_tokens": len(flat.tokens)}


def _too_short(data: Data, stage: str, num_tokens: int, num_train: int) -> NoData:
    if stage == "sft":
        return NoData(
            "no conversation has a token of the assistant within one sequence",
            where=f"data.source: {data.source}",
            got=f"seq_len={data.seq_len}",
            hint=f"data.seq_len={data.seq_len * 4}",
        )
    return NoData(
        "the text is shorter than one training sequence",
        where=f"data.source: {data.source}",
        got=f"{num_tokens} tokens, {num_train} of them for training, seq_len={data.seq_len}",
        allowed=f"more than {data.seq_len} training tokens",
        hint=f"data.seq_len={max(2, num_train // 4)}" if num_train > 8 else "data.holdout=0",
    )
