"""`prepare`: from a recipe's `data` section to packed sequences, once, before any rank starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hyper_parallel.config import PAIRED_STAGES, Data
from hyper_parallel.errors import BadValue, NoData
from hyper_parallel.trainer.data._cache import cache_root, digest, entry
from hyper_parallel.trainer.data._sequences import JoinedSequences, PackedSequences
from hyper_parallel.trainer.data.chat import PLAIN
from hyper_parallel.trainer.data.counts import DataCounts
from hyper_parallel.trainer.data.packing import pack, tokenise
from hyper_parallel.trainer.data.preview import LengthHistogram, SourcePreview, preview_examples
from hyper_parallel.trainer.data.saved_tokenizer import has_tokenizer
from hyper_parallel.trainer.data.sources import Source, resolve, with_template
from hyper_parallel.trainer.data.streaming import Place, Stream
from hyper_parallel.trainer.data.template_properties import generation_stops
from hyper_parallel.trainer.data.tokenizer import Tokenizer, obtain, unknown_token

logger = logging.getLogger(__name__)

_VERSION = 1
_TARGETS = "targets behind the generation prompt, cut at answers"
"""Rule by which conversations are masked and tokenised; in the key of their entries."""
_PLAIN_TEXT = "pairs of texts are joined without a template"
_COUNTED = "every key of a record has a meaning, targets are counted as trained, and empty answers are left out"
"""Rules of readers of records; in the key of entries."""


@dataclass(frozen=True)
class PackedData:
    """What a run reads."""

    train: PackedSequences | JoinedSequences | Stream
    holdout: (
        PackedSequences | JoinedSequences | None
    )  # empty when `data.holdout` is 0; None: nothing of a stream
    tokenizer_dir: str  # Hugging Face tokenizer directory that made the tokens
    vocab_size: int  # largest token id plus one
    fingerprint: str  # hash of the packed content: equal wherever the same text is packed alike
    cached: bool  # whether the cache already held the result
    notes: tuple[str, ...] = ()  # what was cut or left out, in words
    counts: tuple[DataCounts, ...] = ()  # of each source of the recipe; of a stream live
    previews: tuple[SourcePreview, ...] = ()  # of each source of the recipe; of a stream live
    weights: tuple[float, ...] = ()  # of the sources of a mixture
    tokenizer_fingerprint: str = ""  # hash of the tokenizer's files
    tokenizer_notes: tuple[str, ...] = ()  # what other programs read otherwise, in words
    validation_fingerprint: str | None = None  # as `fingerprint`, of `data.validation`
    records_fingerprint: str | None = None  # hash of the columns that rewards read
    files_fingerprint: str | None = None  # hash of names, sizes and times of the files of a stream


def _joined(found: list[PackedData], weights: list[float]) -> PackedData:
    """Several sources as one."""
    holdouts = [f.holdout for f in found if f.holdout]
    return replace(
        found[0],
        train=JoinedSequences([f.train for f in found]),
        holdout=JoinedSequences(holdouts) if holdouts else None,
        fingerprint=digest([[f.fingerprint for f in found], weights]),
        cached=all(f.cached for f in found),
        notes=tuple(note for f in found for note in f.notes),
        counts=tuple(counts for f in found for counts in f.counts),
        previews=tuple(preview for f in found for preview in f.previews),
        records_fingerprint=digest([f.records_fingerprint for f in found]),
        weights=tuple(weights),
    )


def _validated(data: PackedData, validation: PackedData) -> PackedData:
    """Data whose held-out part is all of another source."""
    fingerprint = validation.fingerprint
    return replace(data, holdout=validation.train, validation_fingerprint=fingerprint)


def open_sources(
    data: Data,
    *,
    stage: str,
    model_path: str | None,
    progress: bool,
    vocab_limit: int | None,
    model_config: Mapping[str, Any] | None = None,
) -> tuple[Tokenizer, list[tuple[Data, Source]]]:
    """Return the tokenizer of a recipe and its sources, each with its section; arguments and errors as of `prepare`."""
    sources = [(one, resolve(one, stage)) for one, _ in data.parts()]
    cache = cache_root(data.cache_dir)
    found = [s for _, s in sources]
    tokenizer = obtain(data, found, model_path, cache, progress, vocab_limit, model_config)
    if vocab_limit is not None and tokenizer.vocab_size > vocab_limit:
        trained = not data.tokenizer and not has_tokenizer(model_path)
        own = (
            f"data.vocab_size={vocab_limit}"
            if trained
            else "data.tokenizer=THE_MODEL'S_OWN_DIRECTORY"
        )
        raise BadValue(
            "the tokenizer has more tokens than the model's vocabulary",
            where=f"tokenizer: {tokenizer.directory}",
            got=f"tokenizer={tokenizer.vocab_size}, model={vocab_limit}",
            allowed=f"a tokenizer of at most {vocab_limit} tokens",
            hint=own,
        )
    own_template = tokenizer.hf.chat_template != PLAIN
    for _, source in sources:
        source.counts.unknown_id = unknown_token(tokenizer.hf)
    return tokenizer, [(one, with_template(source, one, own_template)) for one, source in sources]


def prepare(
    data: Data,
    *,
    stage: str,
    model_path: str | None,
    seed: int,
    progress: bool = True,
    vocab_limit: int | None = None,
    model_config: Mapping[str, Any] | None = None,
) -> PackedData:
    """Tokenise and pack the source of a recipe, or open the cached result.

    Call it before ranks are forked and before a process group exists. Processes that call it at the same time
    (torchrun) wait for the first one on a file lock, not in a collective.

    Args:
        data: Section `data` of the recipe.
        stage: Stage of the recipe: with `pt` every token is a target, else those of answers are.
        model_path: `model.path` of the recipe; its tokenizer is used when it has one.
        seed: Draws the held-out documents.
        progress: Show bars on stderr.
        vocab_limit: Size of the model's vocabulary. None: a tokenizer of any size is good.
        model_config: Values of the model's config, which an export has beside the tokenizer. None: no model is known.

    Raises:
        NoData: HP602 when the source is missing, unreadable, empty, or shorter than one sequence.
        BadValue: HP102 when the tokenizer has more tokens than the model, or would give other tokens in an export.
        Contradiction: HP104 when the stage does not suit the records.
        OutputNotWritable: HP105 when the cache cannot be written.
    """
    cache = cache_root(data.cache_dir)
    tokenizer, sources = open_sources(
        data,
        stage=stage,
        model_path=model_path,
        progress=progress,
        vocab_limit=vocab_limit,
        model_config=model_config,
    )
    tokenizer_fingerprint = tokenizer.fingerprint  # reads its files
    stops = generation_stops(tokenizer.hf)  # end markers of answers depend on them
    pad_id = tokenizer.hf.pad_token_id
    pad_id = tokenizer.hf.eos_token_id if pad_id is None else pad_id

    def packed(data: Data, source: Source) -> PackedData:
        def build(target: Path) -> dict[str, Any]:
            flat = tokenise(source, tokenizer, stage, target, progress)
            if not len(flat.tokens):
                raise NoData(
                    "the data source holds no text",
                    where=f"data.source: {data.source}",
                    got=", ".join(source.counts.notes) or f"{len(source.files)} files, no record",
                )
            notes = pack(target, flat, data, pad_id, seed, masked, source.counts)
            # Every second document of `kto` is a prompt with the answer to another one.
            lengths = LengthHistogram()
            for span in flat.spans[:: 2 if stage == "kto" else 1]:
                lengths.add(span.stop - span.start)
            examples = preview_examples(source, tokenizer.hf, stage, data.seq_len)
            return {
                "notes": source.counts.losses + notes,
                "counts": source.counts.as_dict(),
                "preview": SourcePreview(examples, lengths).as_dict(),
            }

        masked = data.masks(stage)
        matters = [_VERSION, source.identity(), tokenizer_fingerprint, data.seq_len]
        rows: list[Any] = [data.packing, masked] if masked or not data.packing else []
        rows += ["last answer"] if stage in PAIRED_STAGES else []
        rows += [_TARGETS, *stops] if stage != "pt" else []
        rows += [] if source.plain == "never" else [_PLAIN_TEXT, source.plain]
        key = digest([*matters, stage, data.holdout, seed, *rows, "num_real", _COUNTED])
        directory, meta = entry(cache / "packed", key, build)
        for note in meta["notes"]:
            logger.warning("%s: %s", data.source, note)
        # These change no token and no order, which is what a checkpoint's place in the data means.
        extra = ("_positions.npy", "_num_real.npy", "_records.jsonl", ".ends.npy", ".keys.json")
        files = {n: file for n, file in meta["files"].items() if not n.endswith(extra)}
        arrays = {name: file["sha256"] for name, file in files.items()}
        records = {n: file for n, file in meta["files"].items() if n.endswith("_records.jsonl")}
        return PackedData(
            train=PackedSequences(directory, "train", data.seq_len),
            holdout=PackedSequences(directory, "holdout", data.seq_len),
            tokenizer_dir=str(tokenizer.directory),
            vocab_size=tokenizer.vocab_size,
            fingerprint=digest([arrays, data.seq_len]),
            cached=meta["cached"],
            notes=tuple(meta["notes"]),
            counts=(DataCounts.from_dict(meta["counts"]),),
            previews=(SourcePreview.from_dict(meta["preview"]),),
            tokenizer_fingerprint=tokenizer_fingerprint,
            tokenizer_notes=tokenizer.notes,
            records_fingerprint=digest({n: file["sha256"] for n, file in records.items()}),
        )

    validation: PackedData | None = None
    if data.validation is not None:
        name = data.name if data.validation == data.source else None
        update = {"source": data.validation, "split": data.validation_split, "name": name}
        held = data.model_copy(update={**update, "holdout": 0.0, "streaming": False})
        own_template = tokenizer.hf.chat_template != PLAIN
        found_held = resolve(held, stage)
        found_held.counts.unknown_id = unknown_token(tokenizer.hf)
        validation = packed(held, with_template(found_held, held, own_template))
        sources = [(one.model_copy(update={"holdout": 0.0}), s) for one, s in sources]
    if not data.streaming:
        found = [packed(one, source) for one, source in sources]
        whole = found[0] if len(found) == 1 else _joined(found, [w for _, w in data.parts()])
        return whole if validation is None else _validated(whole, validation)
    ((data, source),) = sources
    stream = Stream(source, tokenizer.hf, data, stage, seed, pad_id)
    next(stream.rows(Place()))  # a source without a sequence is refused here
    examples = preview_examples(source, tokenizer.hf, stage, data.seq_len)
    settings = [data.seq_len, data.packing, stream.masked, data.max_bytes, data.text_key]
    settings += [data.max_records] if data.max_records else []
    settings += [_TARGETS, *stops] if stage != "pt" else []
    settings += [] if source.plain == "never" else [_PLAIN_TEXT, source.plain]
    settings += [source.rules.identity] if source.rules.identity else []
    # A recipe may name the source from its own folder, and the run's copy of the recipe from the root.
    path = Path(source.name).expanduser()
    name = str(path.absolute()) if path.exists() else source.name
    streamed = PackedData(
        train=stream,
        holdout=None,
        tokenizer_dir=str(tokenizer.directory),
        vocab_size=tokenizer.vocab_size,
        fingerprint=digest([_VERSION, name, source.shape, stage, tokenizer_fingerprint, *settings]),
        cached=False,
        counts=(stream.counts,),
        previews=(SourcePreview(examples, stream.lengths),),
        tokenizer_fingerprint=tokenizer_fingerprint,
        tokenizer_notes=tokenizer.notes,
        files_fingerprint=digest(source.identity()),
    )
    return streamed if validation is None else _validated(streamed, validation)
