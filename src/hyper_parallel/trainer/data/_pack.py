"""Tokenise, split by document, pack and write: what fills one cache entry.

Three passes: documents to one flat file of tokens (in batches, so memory stays bounded); the hold-out drawn by
document; the tokens of each part copied, in document order, into its final arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.trainer.data._chat import encode_conversation, render
from hyper_parallel.trainer.data._progress import Progress
from hyper_parallel.trainer.data._sequences import IGNORE_INDEX, Int64
from hyper_parallel.trainer.data._sources import Document, Source
from hyper_parallel.trainer.data._tokenizer import Tokenizer
from hyper_parallel.units import MiB

_BATCH_BYTES = 4 * MiB
_OPEN_ROWS = 64  # rows first-fit may still add to; more gains little and costs time
_COPY_TOKENS = 4 * MiB


@dataclass(frozen=True)
class Flat:
    """All tokens of a source in one stream.

    Attributes:
        tokens: Memory-mapped [T].
        ends: End of each document in `tokens`.
        learn: Whether a token is a target, [T]; None: all are.
    """

    tokens: NDArray[Any]
    ends: Int64
    learn: NDArray[np.bool_] | None = None

    def span(self, document: int) -> slice:
        """Where a document lies."""
        return slice(int(self.ends[document - 1]) if document else 0, int(self.ends[document]))

    def length(self, document: int) -> int:
        """Tokens of a document."""
        span = self.span(document)
        return span.stop - span.start


def token_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """Narrowest type that holds every token id."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def tokenise(
    source: Source, tokenizer: Tokenizer, stage: str, directory: Path, progress: Progress
) -> Flat:
    """Write the tokens of every document to `directory`, text closed by the end-of-text token."""
    dtype = token_dtype(tokenizer.vocab_size)
    lengths: list[int] = []
    files = directory / "flat.tokens", directory / "flat.learn"
    with (
        progress.task("tokenise", source.num_bytes) as task,
        files[0].open("wb") as tokens_file,
        files[1].open("wb") as learn_file,
    ):
        for batch in _batches(source.documents()):
            for ids, learn in _encode(batch, tokenizer.hf, stage):
                lengths.append(len(ids))
                tokens_file.write(np.asarray(ids, dtype).tobytes())
                if learn is not None:
                    learn_file.write(np.asarray(learn, np.bool_).tobytes())
            task.advance(sum(d.num_bytes for d in batch))
    tokens, learn = _map(files[0], dtype), _map(files[1], np.bool_)
    return Flat(tokens, np.cumsum(lengths, dtype=np.int64), learn if stage == "sft" else None)


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
    count = len(flat.ends)
    spans = [flat.span(d) for d in range(count)]
    if share == 0 or count == 0:
        return spans, []
    wanted = round(share * count)
    if wanted == 0 and flat.learn is None:
        return _hold_out_tail(spans, max(seq_len + 1, int(share * len(flat.tokens))))
    # Raw bits of PCG64 are fixed for ever; numpy may change how `permutation` draws.
    order = np.argsort(np.random.PCG64([seed, 1]).random_raw(count), kind="stable")
    held: set[int] = set()
    tokens = 0
    for document in order[: max(count - 1, 0)].tolist():
        if len(held) >= max(wanted, 1) and (flat.learn is not None or tokens > seq_len):
            break
        held.add(document)
        tokens += flat.length(document)
    return [s for d, s in enumerate(spans) if d not in held], [spans[d] for d in sorted(held)]


def _hold_out_tail(spans: list[slice], num_tokens: int) -> tuple[list[slice], list[slice]]:
    longest = max(range(len(spans)), key=lambda d: spans[d].stop - spans[d].start)
    span = spans[longest]
    cut = max(span.start, span.stop - num_tokens)
    return [*spans[:longest], slice(span.start, cut), *spans[longest + 1 :]], [
        slice(cut, span.stop)
    ]


def write_text(flat: Flat, spans: list[slice], directory: Path, split: str) -> None:
    """Copy spans of the stream into `split.npy`, one flat array."""
    size = sum(s.stop - s.start for s in spans)
    if size == 0:
        np.save(directory / f"{split}.npy", np.zeros(0, flat.tokens.dtype))
        return
    out = np.lib.format.open_memmap(
        directory / f"{split}.npy", "w+", dtype=flat.tokens.dtype, shape=(size,)
    )
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
    keeps its first `seq_len` + 1 tokens; one without a token to learn is left out.

    Returns:
        Number of conversations cut, and number left out.
    """
    assert flat.learn is not None
    kept = [slice(s.start, min(s.stop, s.start + seq_len + 1)) for s in spans]
    num_cut = sum(k.stop < s.stop for k, s in zip(kept, spans, strict=True))
    used = [k for k in kept if flat.learn[k.start + 1 : k.stop].any()]
    rows = first_fit([s.stop - s.start - 1 for s in used], seq_len)
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
