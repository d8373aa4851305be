"""Packing of a data source: tokenize, split by document, and write the arrays of one cache entry.

There are three passes. The first writes the tokens of all documents to one flat file (the token stream), in batches to
limit memory. The second draws the held-out documents. The third copies the tokens of both splits to their arrays, in
document order. A target is a token with loss.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.config import MOST_SEQ_LEN, PAIRED_STAGES, Data
from hyper_parallel.errors import NoData, overrides
from hyper_parallel.trainer.data._cache import byte_bar
from hyper_parallel.trainer.data.chat import (
    complete_text,
    encode_conversation,
    encode_pair,
    encode_prompt,
    media_line,
)
from hyper_parallel.trainer.data.counts import (
    ALLOWED,
    BEHIND_SEQ_LEN,
    EMPTY_RECORD,
    LONG_MEDIA,
    DataCounts,
    missing_target,
)
from hyper_parallel.trainer.data.document import MEDIA_BLOB, Conversation, Document
from hyper_parallel.trainer.data.sequences import (
    IGNORE_INDEX,
    DocumentFacts,
    PackedSequences,
    permutation,
)
from hyper_parallel.trainer.data.sources import Source, with_mismatched
from hyper_parallel.trainer.data.tokenizer import Tokenizer
from hyper_parallel.trainer.data.tokenizer_limits import tokenizing
from hyper_parallel.units import MiB

_OTHER: Final = "data.tokenizer=TOKENIZER_DIR"
"""Hint for a tokenizer that fails on a text."""
_BATCH_BYTES = 4 * MiB
_OPEN_ROWS = 64
"""Maximum number of rows that `first_fit` still fills."""


@dataclass(frozen=True)
class Flat:
    """Token stream: tokens of all documents of a source, with the span of each document.

    Attributes:
        tokens: [T] token ids, memory-mapped.
        spans: Span in `tokens` of each document.
        learn: [T] mask of targets; None: all tokens are targets.
        facts: Values of documents that a stage needs besides tokens.
        stage: Stage of the recipe.
        reasons: For each document without target, the reason, by [start, end) of its span.
    """

    tokens: NDArray[Any]
    spans: list[slice]
    learn: NDArray[np.bool_] | None
    facts: DocumentFacts
    stage: str
    reasons: dict[tuple[int, int], str]

    @property
    def group_size(self) -> int:
        """Number of consecutive documents of one record: 2 if a stage reads two answers to a prompt, else 1."""
        return 2 if self.stage in PAIRED_STAGES else 1

    @property
    def num_label_only(self) -> int:
        """Number of tokens at the end of a document that are labels but no inputs: 0 with `stage: rm`, else 1."""
        return 0 if self.stage == "rm" else 1


def pack(directory: Path, flat: Flat, source: Source, pad_id: int, seed: int) -> list[str]:
    """Write the training and held-out sequences of a token stream, count the documents, return notes for the user.

    Raises:
        NoData: HP602 when there is no training sequence.
    """
    data, counts, notes = source.data, source.counts, list[str]()
    masked = data.masks(flat.stage) and not flat.facts.media
    if flat.facts.media and data.packing:
        notes.append("conversations with images or audio are padded, not packed")
    if flat.learn is None:
        for span in flat.spans:
            if counts.by_document and _length(span) < 2:
                counts.dropped[EMPTY_RECORD] += 1
                continue
            counts.add_unknown(_has_unknown(flat, span, counts.unknown_id), flat.stage)
            # `write_rows` counts the targets of separate documents.
            counts.add_used(_length(span), 0 if counts.by_document else _length(span))
    train, holdout = split_documents(flat, data.holdout, seed, data.seq_len)
    for split, spans in (("train", train), ("holdout", holdout)):
        if flat.learn is None and data.packing and not masked:
            write_text(flat, spans, directory / f"{split}.npy")
        else:
            write_rows(flat, spans, directory / split, source, pad_id, masked)
    if len(PackedSequences(directory, "train", data.seq_len)) == 0:
        raise _too_short(flat, source, sum(map(_length, train)))
    if data.holdout and len(PackedSequences(directory, "holdout", data.seq_len)) == 0:
        notes.append("nothing held out: too little text for one more sequence")
    return notes


def _too_short(flat: Flat, source: Source, num_train: int) -> NoData:
    data, where = source.data, f"data.source: {source.data.source}"
    if flat.learn is not None:
        starts = range(0, len(flat.spans), flat.group_size)
        lengths = [_needed_seq_len(flat, flat.spans[i : i + flat.group_size]) for i in starts]
        needed = min((length for length in lengths if length is not None), default=None)
        return no_target("no conversation has a token to learn from", source.counts, data, needed)
    if source.counts.by_document:
        return NoData(
            "no text has two tokens, which are an input and its target",
            where=where,
            got=f"{len(flat.spans)} texts, {len(flat.tokens)} tokens",
            hint="add text to `data.source`",
        )
    # A divisor of the old value keeps `training.tokens_per_step` a multiple of the sequence length.
    shorter = (data.seq_len // n for n in range(2, data.seq_len // 2 + 1) if data.seq_len % n == 0)
    # If nearly all text is held out, the reason is that a held-out sequence has as many tokens.
    available = num_train if num_train > 8 else len(flat.tokens)
    seq_len = next((length for length in shorter if length <= available // 4), None)
    return NoData(
        "the text that is not held out is shorter than one sequence",
        where=where,
        got=f"{len(flat.tokens)} tokens, {len(flat.tokens) - num_train} of them held out, seq_len={data.seq_len}",
        allowed=f"more than {data.seq_len} tokens that are not held out",
        hint={"data.seq_len": seq_len} if seq_len else "add text to `data.source`",
    )


def _needed_seq_len(flat: Flat, group: Sequence[slice]) -> int | None:
    """Return the smallest `data.seq_len` with which a record is not dropped; None: no length is enough."""
    assert flat.learn is not None
    if group[0].start in flat.facts.media:
        return _length(group[0]) - flat.num_label_only
    targets = [np.flatnonzero(flat.learn[span][flat.num_label_only :]) for span in group]
    return max(int(own[0]) + 1 for own in targets) if all(map(len, targets)) else None


def no_target(problem: str, counts: DataCounts, data: Data, needed: int | None = None) -> NoData:
    """Return the error for a source without training targets.

    It contains `problem` and the most frequent reason, unless all conversations with targets are held out. `needed` is
    the smallest `data.seq_len` with which a conversation has a target; None: unknown.
    """
    where = f"data.source: {data.source}"
    if counts.used:  # all conversations with targets are held out
        got = f"{counts.used} conversations, data.holdout={data.holdout}"
        advice = "add conversations, or set `data.holdout=0` (evaluation then needs `data.validation`)"
        return NoData("no conversation is left to train on", where=where, got=got, hint=advice)
    reasons = counts.dropped.most_common()
    hint: str | dict[str, int] | None = None
    if reasons[0][0] in (BEHIND_SEQ_LEN, LONG_MEDIA):
        factor = 4 if needed is None else max(2, 1 << (-(-needed // data.seq_len) - 1).bit_length())
        # A power of two usually keeps `training.tokens_per_step` a multiple of the sequence length.
        hint = {"data.seq_len": factor * data.seq_len}
        hint = hint if needed is not None else f"a larger value, such as {overrides(hint)}"
        hint = hint if factor * data.seq_len <= MOST_SEQ_LEN else "shorten the conversations"
    return NoData(
        f"{problem}: {reasons[0][0]}",
        where=where,
        got=", ".join(f"{count} left out: {reason}" for reason, count in reasons),
        allowed=ALLOWED[reasons[0][0]],
        hint=hint,
    )


def token_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """Return uint16 or, for a vocabulary of more than 65,536 tokens, uint32."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def tokenize(source: Source, tokenizer: Tokenizer, directory: Path, show: bool) -> Flat:
    """Return the token stream of a source, in temporary files in `directory`.

    Images and recordings whose bytes are in the records are written to the file `MEDIA_BLOB` in `directory`. Errors are
    those of `Source.documents` and `encode`.
    """
    stage, dtype = source.stage, token_dtype(tokenizer.vocab_size)
    spans: list[slice] = []
    facts, end = DocumentFacts(), 0
    reasons: dict[tuple[int, int], str] = {}
    documents = source.documents()
    with (
        byte_bar("tokenise", source.num_bytes, show) as advance,
        TemporaryFile(dir=directory) as tokens_file,
        TemporaryFile(dir=directory) as learn_file,
        (directory / MEDIA_BLOB).open("wb") as blob,
    ):
        for batch in _batches(with_mismatched(documents) if stage == "kto" else documents):
            encoded = encode(batch, tokenizer.hf, stage)
            for document, (ids, learn) in zip(batch, encoded, strict=True):
                spans.append(slice(end, end + len(ids)))
                facts.add(end, document, stage)
                if (one := document.conversation) is not None and one.media:
                    line = one, document.where, document.num_context, blob
                    facts.media[end], text_tokens = media_line(tokenizer.hf, *line)
                    facts.media_costs[end] = len(one.media), len(ids) - text_tokens
                if stage != "pt" and not any(learn):
                    reasons[end, end + len(ids)] = missing_target(document, stage)
                end += len(ids)
                tokens_file.write(np.asarray(ids, dtype))
                learn_file.write(np.asarray(learn, np.bool_))
            advance(sum(d.num_bytes for d in batch))
        if not blob.tell():
            (directory / MEDIA_BLOB).unlink()
        tokens = _map(tokens_file, dtype)
        learn = None if stage == "pt" else _map(learn_file, np.bool_)
        if stage == "kto" and spans:  # the mismatched answer to the first prompt comes last
            spans.insert(1, spans.pop())
        return Flat(tokens, spans, learn, facts, stage, reasons)


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


def encode(batch: list[Document], hf: Any, stage: str) -> Iterator[tuple[Sequence[int], Sequence[bool]]]:
    """Yield (token ids, target mask) of each document in a batch, given the tokenizer of transformers.

    With `stage: pt`, the last token is end-of-text and the mask is empty. Errors are those of `tokenizing` and of the
    functions of `chat` that are called.
    """
    if not batch:
        return
    if stage != "pt":
        encode_one = encode_prompt if stage == "grpo" else encode_conversation
        for document in batch:
            conversation = document.conversation or Conversation(())
            if document.templated:
                yield encode_one(hf, conversation, document.where, document.num_context)
            else:
                words, count = document.contents, document.num_context
                prompt, answer = "".join(words[:count]), "".join(words[count:])
                yield encode_pair(hf, prompt, answer, document.where)
        return
    texts = [
        complete_text(hf, d.conversation, d.where) if d.conversation and d.templated else d.text or "".join(d.contents)
        for d in batch
    ]
    if hf.is_fast:
        # Call the Rust library directly: the transformers wrapper also builds masks and offsets, at twice the time.
        backend = hf.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        with tokenizing(batch[0].where, _OTHER):
            encoded = [e.ids for e in backend.encode_batch_fast(texts, add_special_tokens=False)]
    else:
        with tokenizing(batch[0].where, _OTHER):
            encoded = hf(texts, add_special_tokens=False, verbose=False)["input_ids"]
    for ids in encoded:
        yield [*ids, hf.eos_token_id], ()


def split_documents(flat: Flat, share: float, seed: int, seq_len: int) -> tuple[list[slice], list[slice]]:
    """Return the token spans of the training documents and of the held-out documents, each in document order.

    The seed draws `round(share * documents)` documents to hold out, and further texts until they fill one sequence, but
    never all documents. If the rounded number is 0, the tail of the longest text is held out: `share` of all tokens, at
    least one sequence, at most the whole text. Conversations are never divided; at least one of several conversations
    is held out. Both documents of a pair are in the same split. With `share` 0, nothing is held out.
    """
    size = flat.group_size
    spans, count = flat.spans, len(flat.spans) // size
    if share == 0 or count == 0:
        return spans, []
    wanted = round(share * count)
    if wanted == 0 and flat.learn is None:
        return _hold_out_tail(spans, max(seq_len + 1, int(share * len(flat.tokens))))
    order = permutation(count, seed, 1)
    chosen: set[int] = set()
    tokens = 0
    for document in order[:-1].tolist():
        if len(chosen) >= max(wanted, 1) and (flat.learn is not None or tokens > seq_len):
            break
        chosen.add(document)
        tokens += _length(spans[document * size])
    train = [s for i, s in enumerate(spans) if i // size not in chosen]
    return train, [s for i, s in enumerate(spans) if i // size in chosen]


def _hold_out_tail(spans: list[slice], num_tokens: int) -> tuple[list[slice], list[slice]]:
    span = max(spans, key=_length)
    cut = max(span.start, span.stop - num_tokens)
    return [slice(s.start, cut) if s is span else s for s in spans], [slice(cut, span.stop)]


def _length(span: slice) -> int:
    return int(span.stop - span.start)


def write_text(flat: Flat, spans: list[slice], path: Path) -> None:
    """Write the concatenated spans of a token stream as one flat array, an .npy file."""
    dtype, size = flat.tokens.dtype, sum(map(_length, spans))
    if size == 0:
        np.save(path, np.zeros(0, dtype))
        return
    out = np.lib.format.open_memmap(path, "w+", dtype=dtype, shape=(size,))
    # Allocate disk space first: on a full disk, a write to mapped memory would kill the process.
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, out.offset + out.nbytes)
    offset = 0
    for span in spans:
        out[offset : offset + _length(span)] = flat.tokens[span]
        offset += _length(span)
    out.flush()


def write_rows(flat: Flat, spans: list[slice], path: Path, source: Source, pad_id: int, masked: bool) -> None:
    """Pack documents into rows of `seq_len` tokens, write the rows as arrays `PATH*.npy`, and count the documents.

    The arrays are inputs, shifted labels, and for each row the numbers of labels with loss and of tokens before the
    padding. If `masked`, there are also positions, which restart at 0 with every document and with the padding.

    A document of T tokens takes T - 1 positions, because its last token is only a label. For a reward model it takes T
    positions. With packing and without media, documents share rows. A text longer than a row is divided into pieces
    that overlap by one token, so every token but the first is a label once. A longer conversation is truncated to
    `seq_len` positions. Conversations without a target, and conversations with media that are too long, are dropped.
    """
    seq_len, learn, counts = source.data.seq_len, flat.learn, source.counts
    cut = [slice(s.start, min(s.stop, s.start + seq_len + flat.num_label_only)) for s in spans]
    if learn is None:
        used = [
            slice(begin, min(s.stop, begin + seq_len + 1))
            for s in spans
            for begin in range(s.start, s.stop - 1, seq_len)
        ]
    else:
        used = _used_conversations(flat, spans, cut, counts)
        flat.facts.write(path, [s.start for s in used])
    lengths = [_length(s) - flat.num_label_only for s in used]
    packed = source.data.packing and not flat.facts.media
    rows = first_fit(lengths, seq_len) if packed else [[i] for i in range(len(used))]
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


def _used_conversations(flat: Flat, spans: list[slice], cut: list[slice], counts: DataCounts) -> list[slice]:
    """Count all conversations; return the truncated spans, from `cut`, of conversations or whole pairs with targets."""
    assert flat.learn is not None
    used = list[slice]()
    targets = [int(flat.learn[s.start + flat.num_label_only : s.stop].sum()) for s in cut]
    for begin in range(0, len(cut), flat.group_size):
        group = range(begin, begin + flat.group_size)
        missing = next((i for i in group if not targets[i]), None)
        if spans[begin].start in flat.facts.media and cut[begin] != spans[begin]:
            counts.dropped[LONG_MEDIA] += 1
        elif missing is None:
            used += [cut[i] for i in group]
            # The second document of a KTO pair, the mismatched answer, has no loss.
            counted = group[:1] if flat.stage == "kto" else group
            lengths = sum(_length(cut[i]) for i in counted)
            is_cut = any(cut[i] != spans[i] for i in counted)
            counts.add_marked(lengths, [targets[i] for i in counted], flat.stage, is_cut=is_cut)
            unknown = any(_has_unknown(flat, cut[i], counts.unknown_id) for i in counted)
            counts.add_unknown(unknown, flat.stage)
        else:
            span = spans[missing]
            counts.dropped[flat.reasons.get((span.start, span.stop), BEHIND_SEQ_LEN)] += 1
    return used


def _has_unknown(flat: Flat, span: slice, unknown_id: int | None) -> bool:
    if unknown_id is None:
        return False
    is_unknown = flat.tokens[span] == unknown_id
    return bool((is_unknown if flat.learn is None else is_unknown & flat.learn[span]).any())


def _piece(flat: Flat, span: slice, pad_id: int) -> tuple[NDArray[Any], NDArray[Any]]:
    tokens = flat.tokens[span]
    if flat.stage == "rm":  # transformers reads the score at the last token that is not padding
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
    """Concatenate and pad documents, given as (inputs, labels), to one row.

    Returns:
        Inputs, labels and positions, [S] each, and number of tokens before the padding.
    """
    num_real = sum(len(tokens) for tokens, _ in pieces)
    num_padding = seq_len - num_real
    padding = (np.full(num_padding, pad_id), np.full(num_padding, IGNORE_INDEX))
    inputs, labels = (np.concatenate(part) for part in zip(*pieces, padding, strict=True))
    positions = [np.arange(len(tokens)) for tokens, _ in (*pieces, padding)]
    return inputs, labels, np.concatenate(positions), num_real


def first_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Pack items of given lengths into rows of `capacity`; return the item indices of each row.

    Each item goes to the oldest of at most `_OPEN_ROWS` open rows that has enough space, or else to a new row.

    Source: first-fit bin packing, Johnson et al. 1974.
    """
    rows: list[list[int]] = []
    free: dict[int, int] = {}
    for item, length in enumerate(lengths):
        row = next((r for r, space in free.items() if space >= length), None)
        if row is None:
            if len(free) >= _OPEN_ROWS:
                del free[min(free, key=lambda r: free[r])]
            row = len(rows)
            rows.append([])
            free[row] = capacity
        rows[row].append(item)
        free[row] -= length
    return rows
