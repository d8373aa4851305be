"""Tokenise, split by document, pack and write: what fills one cache entry.

Three passes: documents to one flat file of tokens (in batches, so memory stays bounded); the hold-out drawn by
document; the tokens of each part copied, in document order, into its final arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.trainer.data._batches import IGNORE_INDEX
from hyper_parallel.trainer.data._cache import byte_bar
from hyper_parallel.trainer.data._chat import encode_conversation, render
from hyper_parallel.trainer.data._sources import Document, Source
from hyper_parallel.trainer.data._tokenizer import Tokenizer
from hyper_parallel.units import MiB

_BATCH_BYTES = 4 * MiB
_OPEN_ROWS = 64  # rows first-fit may still add to; more gains little and costs time
_COPY_TOKENS = 4 * MiB


@dataclass(frozen=True)
class Flat:
    """All tokens of a source in one stream."""

    tokens: NDArray[Any]  # [T], memory-mapped
    spans: list[slice]  # of every document
    learn: NDArray[np.bool_] | None = None  # whether a token is a target, [T]; None: all are


def token_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """Narrowest type that holds every token id."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def tokenise(source: Source, tokenizer: Tokenizer, stage: str, directory: Path, show: bool) -> Flat:
    """Write the tokens of every document to `directory`, text closed by the end-of-text token."""
    dtype = token_dtype(tokenizer.vocab_size)
    lengths: list[int] = []
    files = directory / "flat.tokens", directory / "flat.learn"
    with (
        byte_bar("tokenise", source.num_bytes, show) as advance,
        files[0].open("wb") as tokens_file,
        files[1].open("wb") as learn_file,
    ):
        for batch in _batches(source.documents()):
            for ids, learn in _encode(batch, tokenizer.hf, stage):
                lengths.append(len(ids))
                tokens_file.write(np.asarray(ids, dtype).tobytes())
                if learn is not None:
                    learn_file.write(np.asarray(learn, np.bool_).tobytes())
            advance(sum(d.num_bytes for d in batch))
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    spans = [slice(*ends) for ends in itertools.pairwise((0, *ends))]
    tokens, learn = _map(files[0], dtype), _map(files[1], np.bool_)
    return Flat(tokens, spans, learn if stage == "sft" else None)


def _map(path: Path, dtype: Any) -> NDArray[Any]:
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.num_bytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(
    batch: list[Document], hf: Any, stage: str
) -> Iterator[tuple[list[int], list[bool] | None]]:
    if stage == "sft":
        for document in batch:
            yield encode_conversation(hf, document.messages, document.where)
        return
    texts = [d.text or render(hf, d.messages, where=d.where) for d in batch]
    for ids in _encode_texts(hf, texts):
        yield [*ids, hf.eos_token_id], None


def _encode_texts(hf: Any, texts: list[str]) -> Iterator[list[int]]:
    if not hf.is_fast:
        yield from hf(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return
    # Straight to the Rust library: the wrapper also builds masks and offsets, which doubles the time.
    backend = hf.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    for encoding in backend.encode_batch_fast(texts, add_special_tokens=False):
        yield encoding.ids


def split_documents(
    flat: Flat, share: float, seed: int, seq_len: int
) -> tuple[list[slice], list[slice]]:
    """Token spans of the training and of the held-out documents, each in document order.

    `round(share * documents)` documents are drawn with the seed, and more of them until they fill one sequence. When
    that number is zero, the longest document gives its tail: `share` of all tokens, at least one sequence. A
    conversation is never cut: of few conversations one is held out.
    """
    spans, count = flat.spans, len(flat.spans)
    if share == 0 or count == 0:
        return spans, []
    wanted = round(share * count)
    if wanted == 0 and flat.learn is None:
        return _hold_out_tail(spans, max(seq_len + 1, int(share * len(flat.tokens))))
    # Raw bits of PCG64 are fixed for ever; numpy may change how `permutation` draws.
    order = np.argsort(np.random.PCG64([seed, 1]).random_raw(count), kind="stable")
    held: set[int] = set()
    tokens = 0
    for document in order[:-1].tolist():
        if len(held) >= max(wanted, 1) and (flat.learn is not None or tokens > seq_len):
            break
        held.add(document)
        tokens += _length(spans[document])
    return [s for d, s in enumerate(spans) if d not in held], [spans[d] for d in sorted(held)]


def _hold_out_tail(spans: list[slice], num_tokens: int) -> tuple[list[slice], list[slice]]:
    span = max(spans, key=_length)
    cut = max(span.start, span.stop - num_tokens)
    return [slice(s.start, cut) if s is span else s for s in spans], [slice(cut, span.stop)]


def _length(span: slice) -> int:
    return int(span.stop - span.start)


def write_text(flat: Flat, spans: list[slice], directory: Path, split: str) -> None:
    """Copy spans of the stream into `split.npy`, one flat array."""
    path, dtype, size = directory / f"{split}.npy", flat.tokens.dtype, sum(map(_length, spans))
    if size == 0:
        np.save(path, np.zeros(0, dtype))
        return
    out = np.lib.format.open_memmap(path, "w+", dtype=dtype, shape=(size,))
    at = 0
    for span in spans:
        for start in range(span.start, span.stop, _COPY_TOKENS):
            part = flat.tokens[start : min(start + _COPY_TOKENS, span.stop)]
            out[at : at + len(part)] = part
            at += len(part)
    out.flush()


def write_conversations(
    flat: Flat, spans: list[slice], directory: Path, split: str, seq_len: int, pad_id: int
) -> tuple[int, int]:
    """Pack conversations into rows of `seq_len` and write inputs, shifted labels and the labels per row.

    A conversation of T tokens takes T - 1 positions (its last token is only a label). One that is longer than a row
    is cut to its first `seq_len` + 1 tokens; one without a token to learn is left out. Returns how many of each.
    """
    assert flat.learn is not None
    kept = [slice(s.start, min(s.stop, s.start + seq_len + 1)) for s in spans]
    num_cut = sum(k.stop < s.stop for k, s in zip(kept, spans, strict=True))
    used = [k for k in kept if flat.learn[k.start + 1 : k.stop].any()]
    rows = first_fit([_length(s) - 1 for s in used], seq_len)
    inputs = np.full((len(rows), seq_len), pad_id, flat.tokens.dtype)
    labels = np.full((len(rows), seq_len), IGNORE_INDEX, np.int32)
    for row, members in enumerate(rows):
        at = 0
        for member in members:
            tokens, learn = flat.tokens[used[member]], flat.learn[used[member]]
            end = at + len(tokens) - 1
            inputs[row, at:end] = tokens[:-1]
            labels[row, at:end] = np.where(learn[1:], tokens[1:].astype(np.int32), IGNORE_INDEX)
            at = end
    np.save(directory / f"{split}.npy", inputs)
    np.save(directory / f"{split}_labels.npy", labels)
    np.save(directory / f"{split}_num_valid.npy", (labels != IGNORE_INDEX).sum(1, dtype=np.int64))
    return num_cut, len(kept) - len(used)


def first_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Put items into rows of a capacity: each into the oldest open row that has room, else into a new one.

    Source: first-fit bin packing, Johnson et al. 1974, over a bounded number of open rows.
    """
    rows: list[list[int]] = []
    room: dict[int, int] = {}
    for item, length in enumerate(lengths):
        row = next((r for r, free in room.items() if free >= length), None)
        if row is None:
            if len(room) >= _OPEN_ROWS:
                del room[min(room, key=lambda r: room[r])]
            row = len(rows)
            rows.append([])
            room[row] = capacity
        rows[row].append(item)
        room[row] -= length
    return rows
