"""Tokenise, split by document, pack and write: what fills one cache entry.

Three passes: documents to one flat file of tokens (in batches, so memory stays bounded); the hold-out drawn by
document; the tokens of each part copied, in document order, into its final arrays.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.config import PAIRED_STAGES, Data
from hyper_parallel.errors import NoData
from hyper_parallel.trainer.data._cache import byte_bar
from hyper_parallel.trainer.data._sequences import IGNORE_INDEX, DocumentFacts, PackedSequences
from hyper_parallel.trainer.data.chat import (
    complete_text,
    encode_conversation,
    encode_pair,
    encode_prompt,
)
from hyper_parallel.trainer.data.counts import (
    ALLOWED,
    BEHIND_SEQ_LEN,
    EMPTY_RECORD,
    DataCounts,
    missing_target,
)
from hyper_parallel.trainer.data.document import Conversation, Document
from hyper_parallel.trainer.data.sources import Source, with_mismatched
from hyper_parallel.trainer.data.tokenizer import Tokenizer
from hyper_parallel.trainer.data.tokenizer_limits import tokenizing
from hyper_parallel.units import MiB

_BATCH_BYTES = 4 * MiB
_OPEN_ROWS = 64  # rows first-fit may still add to; more gains little and costs time


@dataclass(frozen=True)
class Flat:
    """All tokens of a source in one stream."""

    tokens: NDArray[Any]  # [T], memory-mapped
    spans: list[slice]  # of every document
    learn: NDArray[np.bool_] | None = None  # whether a token is a target, [T]; None: all are
    pairs: bool = False  # two neighbours are answers to one prompt
    facts: DocumentFacts = field(default_factory=DocumentFacts)
    scored: bool = False  # the one target is the last token itself, which says that it is read
    stage: str = "sft"
    reasons: dict[tuple[int, int], str] = field(default_factory=dict)
    """Why documents have no target, by the first token and the one behind the last."""


def pack(
    directory: Path,
    flat: Flat,
    data: Data,
    pad_id: int,
    seed: int,
    masked: bool,
    counts: DataCounts,
) -> list[str]:
    """Write the training and the held-out sequences of a stream; add to the counts, and return further notes."""
    notes: list[str] = []
    if flat.learn is None:
        for span in flat.spans:
            if counts.by_document and _length(span) < 2:
                counts.dropped[EMPTY_RECORD] += 1
                continue
            counts.add_unknown(_has_unknown(flat, span, counts.unknown_id), flat.stage)
            # Targets of documents in rows are counted with the rows.
            counts.add_used(_length(span), 0 if counts.by_document else _length(span))
    train, holdout = split_documents(flat, data.holdout, seed, data.seq_len)
    for split, spans in (("train", train), ("holdout", holdout)):
        if flat.learn is None and data.packing and not masked:
            write_text(flat, spans, directory / f"{split}.npy")
        else:
            write_rows(flat, spans, directory / split, data, pad_id, masked, counts)
    if len(PackedSequences(directory, "train", data.seq_len)) == 0:
        raise _too_short(flat, data, sum(map(_length, train)), counts)
    if data.holdout and len(PackedSequences(directory, "holdout", data.seq_len)) == 0:
        notes.append("nothing held out: too little text for one more sequence")
    return notes


def _too_short(flat: Flat, data: Data, num_train: int, counts: DataCounts) -> NoData:
    where = f"data.source: {data.source}"
    if flat.learn is not None:
        return no_target("no conversation has a token to learn from", counts, data)
    return NoData(
        "the text is shorter than one training sequence",
        where=where,
        got=f"{len(flat.tokens)} tokens, {num_train} of them for training, seq_len={data.seq_len}",
        allowed=f"more than {data.seq_len} training tokens",
        hint=f"data.seq_len={max(2, num_train // 4)}" if num_train > 8 else "data.holdout=0",
    )


def no_target(what: str, counts: DataCounts, data: Data) -> NoData:
    """Return the refusal of conversations of which none has a target, with the most frequent reason."""
    where = f"data.source: {data.source}"
    if counts.used:  # all of them are held out
        got = f"{counts.used} conversations, data.holdout={data.holdout}"
        return NoData(
            "no conversation is left to train on", where=where, got=got, hint="data.holdout=0"
        )
    reasons = counts.dropped.most_common()
    return NoData(
        f"{what}: {reasons[0][0]}",
        where=where,
        got=", ".join(f"{count} left out: {reason}" for reason, count in reasons),
        allowed=ALLOWED[reasons[0][0]],
        hint=f"data.seq_len={data.seq_len * 4}" if reasons[0][0] == BEHIND_SEQ_LEN else None,
    )


def token_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """Narrowest type that holds every token id."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def tokenise(source: Source, tokenizer: Tokenizer, stage: str, directory: Path, show: bool) -> Flat:
    """Tokens of every document, text closed by the end-of-text token, in unnamed files in `directory`."""
    dtype = token_dtype(tokenizer.vocab_size)
    spans: list[slice] = []
    facts, end = DocumentFacts(), 0
    reasons: dict[tuple[int, int], str] = {}
    found = source.documents()
    with (
        byte_bar("tokenise", source.num_bytes, show) as advance,
        TemporaryFile(dir=directory) as tokens_file,
        TemporaryFile(dir=directory) as learn_file,
    ):
        for batch in _batches(with_mismatched(found) if stage == "kto" else found):
            encoded = encode(batch, tokenizer.hf, stage)
            for document, (ids, learn) in zip(batch, encoded, strict=True):
                spans.append(slice(end, end + len(ids)))
                facts.add(end, document, stage)
                if stage != "pt" and not any(learn):
                    reasons[end, end + len(ids)] = missing_target(document, stage)
                end += len(ids)
                tokens_file.write(np.asarray(ids, dtype))
                learn_file.write(np.asarray(learn, np.bool_))
            advance(sum(d.num_bytes for d in batch))
        tokens = _map(tokens_file, dtype)
        learn = None if stage == "pt" else _map(learn_file, np.bool_)
        if stage == "kto" and spans:  # the first prompt's other answer is the last record's
            spans.insert(1, spans.pop())
        return Flat(
            tokens, spans, learn, stage in PAIRED_STAGES, facts, stage == "rm", stage, reasons
        )


def _map(file: IO[bytes], dtype: Any) -> NDArray[Any]:
    return np.memmap(file, dtype, mode="r") if file.tell() else np.zeros(0, dtype)


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


def encode(
    batch: list[Document], hf: Any, stage: str
) -> Iterator[tuple[Sequence[int], Sequence[bool]]]:
    """Yield the tokens of each document; of a conversation also whether they are targets."""
    if not batch:
        return
    if stage != "pt":
        encode_one = encode_prompt if stage == "grpo" else encode_conversation
        for document in batch:
            conversation = document.conversation or Conversation(())
            if document.templated:
                yield encode_one(hf, conversation, document.where, document.num_context)
            else:
                words, at = _contents(document), document.num_context
                yield encode_pair(hf, "".join(words[:at]), "".join(words[at:]), document.where)
        return
    texts = [
        complete_text(hf, d.conversation, d.where)
        if d.conversation and d.templated
        else d.text or "".join(_contents(d))
        for d in batch
    ]
    if hf.is_fast:
        # Straight to the Rust library: the wrapper also builds masks and offsets, which doubles the time.
        backend = hf.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        with tokenizing(batch[0].where):
            encoded = [e.ids for e in backend.encode_batch_fast(texts, add_special_tokens=False)]
    else:
        with tokenizing(batch[0].where):
            encoded = hf(texts, add_special_tokens=False, verbose=False)["input_ids"]
    for ids in encoded:
        yield [*ids, hf.eos_token_id], ()


def _contents(document: Document) -> list[str]:
    one = document.conversation
    return [turn["content"] for turn in one.messages] if one else []


def split_documents(
    flat: Flat, share: float, seed: int, seq_len: int
) -> tuple[list[slice], list[slice]]:
    """Token spans of the training and of the held-out documents, each in document order.

    `round(share * documents)` documents are drawn with the seed, and more of them until they fill one sequence. When
    that number is zero, the longest document gives its tail: `share` of all tokens, at least one sequence. A
    conversation is never cut: of few conversations one is held out. Two that belong together are drawn as one.
    """
    unit = 2 if flat.pairs else 1
    spans, count = flat.spans, len(flat.spans) // unit
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
        tokens += _length(spans[document * unit])
    kept = [s for i, s in enumerate(spans) if i // unit not in held]
    return kept, [s for i, s in enumerate(spans) if i // unit in held]


def _hold_out_tail(spans: list[slice], num_tokens: int) -> tuple[list[slice], list[slice]]:
    span = max(spans, key=_length)
    cut = max(span.start, span.stop - num_tokens)
    return [slice(s.start, cut) if s is span else s for s in spans], [slice(cut, span.stop)]


def _length(span: slice) -> int:
    return int(span.stop - span.start)


def write_text(flat: Flat, spans: list[slice], path: Path) -> None:
    """Copy spans of the stream into one flat array."""
    dtype, size = flat.tokens.dtype, sum(map(_length, spans))
    if size == 0:
        np.save(path, np.zeros(0, dtype))
        return
    out = np.lib.format.open_memmap(path, "w+", dtype=dtype, shape=(size,))
    # Space is claimed before: a full disk would end the process where it writes to mapped memory.
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, out.offset + out.nbytes)
    at = 0
    for span in spans:
        out[at : at + _length(span)] = flat.tokens[span]
        at += _length(span)
    out.flush()


def write_rows(
    flat: Flat,
    spans: list[slice],
    path: Path,
    data: Data,
    pad_id: int,
    masked: bool,
    counts: DataCounts,
) -> None:
    """Put documents into rows of `seq_len`; write inputs, shifted labels, labels per row and, `masked`, positions.

    A document of T tokens takes T - 1 positions (its last token is only a label; T where it is scored) of a row that
    it shares with others, or without packing of its own. A longer text is cut into pieces that share one token, so
    that every token but its first is a label once; a longer conversation keeps its first `seq_len` + 1 tokens, of which
    `seq_len` are scored. One without a token to learn is left out. Positions begin at 0 with every document and with
    the padding, and the number of tokens before it is kept for each row. Conversations are added to the counts.
    """
    seq_len, learn = data.seq_len, flat.learn
    more = 0 if flat.scored else 1  # tokens that are a label only
    kept = [slice(s.start, min(s.stop, s.start + seq_len + more)) for s in spans]
    if learn is None:
        used = [
            slice(at, min(s.stop, at + seq_len + 1))
            for s in spans
            for at in range(s.start, s.stop - 1, seq_len)
        ]
    else:
        used = _used_conversations(flat, spans, kept, counts)
        flat.facts.write(path, [k.start for k in used])
    lengths = [_length(s) - more for s in used]
    rows = first_fit(lengths, seq_len) if data.packing else [[i] for i in range(len(used))]
    inputs = np.empty((len(rows), seq_len), flat.tokens.dtype)
    labels, positions = (np.empty((len(rows), seq_len), np.int32) for _ in range(2))
    num_real = np.empty(len(rows), np.int32)
    for row, members in enumerate(rows):
        pieces = [_piece(flat, used[member], pad_id) for member in members]
        filled = fill_row(pieces, seq_len, pad_id)
        inputs[row], labels[row], positions[row], num_real[row] = filled
    num_valid = (labels != IGNORE_INDEX).sum(1, dtype=np.int64)
    counts.target_tokens += int(num_valid.sum()) if learn is None else 0
    arrays = {"": inputs, "_labels": labels, "_num_valid": num_valid, "_num_real": num_real}
    for name, array in {**arrays, **({"_positions": positions} if masked else {})}.items():
        np.save(path.with_name(f"{path.name}{name}.npy"), array)


def _used_conversations(
    flat: Flat, spans: list[slice], kept: list[slice], counts: DataCounts
) -> list[slice]:
    """Return the conversations that have a target, of a pair both or neither, and add all of them to the counts."""
    assert flat.learn is not None
    first, used, unit = int(not flat.scored), list[slice](), 2 if flat.pairs else 1
    targets = [int(flat.learn[k.start + first : k.stop].sum()) for k in kept]
    for at in range(0, len(kept), unit):
        group = range(at, at + unit)
        missing = next((i for i in group if not targets[i]), None)
        if missing is None:
            used += [kept[i] for i in group]
            # The second of two documents of `kto` gives a reference, and no loss.
            counted = group[:1] if flat.stage == "kto" else group
            lengths = sum(_length(kept[i]) for i in counted)
            is_cut = any(kept[i] != spans[i] for i in counted)
            counts.add_marked(lengths, [targets[i] for i in counted], flat.stage, is_cut=is_cut)
            unknown = any(_has_unknown(flat, kept[i], counts.unknown_id) for i in counted)
            counts.add_unknown(unknown, flat.stage)
        else:
            span = spans[missing]
            counts.dropped[flat.reasons.get((span.start, span.stop), BEHIND_SEQ_LEN)] += 1
    return used


def _has_unknown(flat: Flat, span: slice, unknown_id: int | None) -> bool:
    """Return whether a target of a document is the token for everything unknown."""
    if unknown_id is None:
        return False
    found = flat.tokens[span] == unknown_id
    return bool((found if flat.learn is None else found & flat.learn[span]).any())


def _piece(flat: Flat, span: slice, pad_id: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Inputs of a document and their targets."""
    tokens = flat.tokens[span]
    if flat.scored:  # where transformers reads the score: at the last token that does not pad
        last = np.flatnonzero(tokens != pad_id)[-1:]
        targets = np.full(len(tokens), IGNORE_INDEX, np.int32)
        targets[last] = tokens[last]
        return tokens, targets
    targets = tokens[1:].astype(np.int32)
    if flat.learn is not None:
        targets = np.where(flat.learn[span][1:], targets, IGNORE_INDEX)
    return tokens[:-1], targets


def fill_row(
    pieces: Sequence[tuple[NDArray[Any], NDArray[Any]]], seq_len: int, pad_id: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], int]:
    """Inputs, labels and positions of a row, [S] each, of pieces and of padding, and the tokens before the padding."""
    num_real = sum(len(tokens) for tokens, _ in pieces)
    room = seq_len - num_real
    padding = (np.full(room, pad_id), np.full(room, IGNORE_INDEX))
    inputs, labels = (np.concatenate(part) for part in zip(*pieces, padding, strict=True))
    positions = [np.arange(len(tokens)) for tokens, _ in (*pieces, padding)]
    return inputs, labels, np.concatenate(positions), num_real


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
