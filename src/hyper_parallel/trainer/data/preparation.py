"""Preparation of a recipe's `data` section as packed sequences, in one process before any rank starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hyper_parallel.config import PAIRED_STAGES, Data
from hyper_parallel.errors import Contradiction, NoData, reported_by
from hyper_parallel.trainer.data._cache import cache_root, digest, entry
from hyper_parallel.trainer.data.counts import DataCounts
from hyper_parallel.trainer.data.packing import pack, tokenize
from hyper_parallel.trainer.data.preview import LengthHistogram, SourcePreview, preview_examples
from hyper_parallel.trainer.data.sequences import JoinedSequences, PackedSequences
from hyper_parallel.trainer.data.sources import VALIDATION, Source, resolve
from hyper_parallel.trainer.data.streaming import Place, Stream
from hyper_parallel.trainer.data.tokenizer import Tokenizer, bind_tokenizer, open_sources

logger = logging.getLogger(__name__)

# The texts below are part of cache keys and fingerprints: changing one invalidates prepared data and checkpoints.
_VERSION = 2
_TARGETS = "targets behind the generation prompt, cut at answers"
"""Description of how conversations are masked and tokenized."""
_PLAIN_TEXT = "pairs of texts are joined without a template"
_COUNTED = "every key of a record has a meaning, targets are counted as trained, and empty answers are left out"
"""Description of how records are read."""
_MEDIA_COSTS = "media and their tokens are counted"
_WITHOUT_INFLUENCE = (
    "_positions.npy", "_num_real.npy", "_media_costs.npy", "_records.jsonl", ".ends.npy", ".keys.json",
)  # fmt: skip
"""Name endings of files of a cache entry that affect no token and no order; the data's fingerprint excludes them."""


@dataclass(frozen=True)
class PackedData:
    """Training data of a run.

    Attributes:
        train: Packed sequences, or a stream.
        holdout: Sequences of `data.validation`, else the held-out sequences of a source, which may be empty. None: a
            stream or mixture without held-out sequences.
        tokenizer_dir: Hugging Face directory of the tokenizer.
        vocab_size: Largest token id plus one.
        fingerprint: Hash of the packed content, equal on every machine; for a stream, of source name and settings.
        cached: Whether the result was in the cache.
        notes: Sentences on text that was truncated, dropped or changed, and on the held-out split.
        counts: Counts of each source; those of a stream are updated while it is read.
        previews: Preview of each source; those of a stream are updated while it is read.
        weights: Weight of each source in a mixture; empty for a single source.
        tokenizer_fingerprint: Hash of the tokenizer's files.
        tokenizer_notes: Warnings that other programs get different tokens from the tokenizer's files.
        validation_fingerprint: Hash of the packed content of `data.validation`; None: not set.
        records_fingerprint: Hash of the record columns that reward functions read; None for a stream.
        files_fingerprint: Hash of names, sizes and times of a stream's files; None for packed sequences.
    """

    train: PackedSequences | JoinedSequences | Stream
    holdout: PackedSequences | JoinedSequences | None
    tokenizer_dir: str
    vocab_size: int
    fingerprint: str
    cached: bool
    notes: tuple[str, ...] = ()
    counts: tuple[DataCounts, ...] = ()
    previews: tuple[SourcePreview, ...] = ()
    weights: tuple[float, ...] = ()
    tokenizer_fingerprint: str = ""
    tokenizer_notes: tuple[str, ...] = ()
    validation_fingerprint: str | None = None
    records_fingerprint: str | None = None
    files_fingerprint: str | None = None


@dataclass(frozen=True)
class _Setup:
    tokenizer: Tokenizer
    seed: int
    cache: Path
    progress: bool

    def encoding_rules(self, source: Source) -> list[Any]:
        """Return JSON values that describe how a source's documents are tokenized, for cache keys and fingerprints."""
        rules: list[Any] = [_TARGETS, *self.tokenizer.stops] if source.stage != "pt" else []
        return rules + ([] if source.plain == "never" else [_PLAIN_TEXT, source.plain])


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
    """Tokenize and pack the sources of a recipe, or open the cached result.

    Call this before ranks are forked and before a process group exists. If several processes call it at once, as with
    torchrun, the first one works. The others wait on a file lock, not in a collective.

    Args:
        data: Section `data` of the recipe.
        stage: Stage of the recipe.
        model_path: `model.path` of the recipe; a tokenizer in this directory is used if `data.tokenizer` is not set.
        seed: Seed of the choice of held-out documents and, with `data.streaming`, of the order of documents.
        progress: Whether to show progress bars on stderr.
        vocab_limit: Size of the model's vocabulary; None: a tokenizer of any size is accepted.
        model_config: Values of the model's config, which an export stores next to the tokenizer; None: no model is
            known.

    Raises:
        NoData: HP602 when the source is missing, unreadable, empty, without targets, or shorter than one sequence.
        BadValue: HP102 when tokenizer or chat template fail, the tokenizer has more tokens than the model, or its
            export would produce different tokens.
        Contradiction: HP104 when the stage cannot train on the records.
        OutputNotWritable: HP105 when the cache cannot be written.
        ModelUnreadable: HP305 when a config file next to the tokenizer cannot be read.
        MissingDependency: HP501 when a package that the source needs is not installed.
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
    setup = _Setup(tokenizer, seed, cache, progress)
    validation = None if data.validation is None else _pack_validation(data, stage, setup)
    if validation is not None:
        update = {"holdout": 0.0}
        sources = [replace(s, data=s.data.model_copy(update=update)) for s in sources]
    if data.streaming:
        packed = _open_stream(*sources, setup)
    else:
        parts = [_pack_source(source, setup) for source in sources]
        packed = parts[0] if len(parts) == 1 else _join(data, parts)
    if validation is None:
        return packed
    fingerprint = validation.fingerprint
    return replace(packed, holdout=validation.train, validation_fingerprint=fingerprint)


def _join(data: Data, parts: list[PackedData]) -> PackedData:
    weights = [weight for _, weight in data.parts()]
    if data.packing and 0 < sum(part.train.has_media for part in parts) < len(parts):
        raise Contradiction(
            "some sources have images or audio, but the conversations of the others are packed",
            where="data.source",
            got="data.packing=true",
            allowed="sources that all have them, or none; or conversations in rows of their own",
            changes={"data.packing": False, "data.mask_documents": None},
        )
    holdouts = [part.holdout for part in parts if part.holdout]
    return replace(
        parts[0],
        train=JoinedSequences([part.train for part in parts]),
        holdout=JoinedSequences(holdouts) if holdouts else None,
        fingerprint=digest([[part.fingerprint for part in parts], weights]),
        cached=all(part.cached for part in parts),
        notes=tuple(note for part in parts for note in part.notes),
        counts=tuple(counts for part in parts for counts in part.counts),
        previews=tuple(preview for part in parts for preview in part.previews),
        records_fingerprint=digest([part.records_fingerprint for part in parts]),
        weights=tuple(weights),
    )


def _pack_validation(data: Data, stage: str, setup: _Setup) -> PackedData:
    """Return the packed data of `data.validation`: all sequences are in `train`, and `holdout` is empty."""
    section = data.model_copy(
        update={
            "source": data.validation,
            "split": data.validation_split,
            "name": data.name if data.validation == data.source else None,
            "holdout": 0.0,
            "streaming": False,
        }
    )
    source = resolve(section, stage, media=setup.tokenizer.media, key=VALIDATION)
    return _pack_source(bind_tokenizer(source, setup.tokenizer), setup)


def _pack_source(source: Source, setup: _Setup) -> PackedData:
    data, tokenizer = source.data, setup.tokenizer
    key = _cache_key(source, setup)
    with reported_by(source.key):
        directory, meta = entry(setup.cache / "packed", key, lambda target: _build(target, source, setup))
    for note in meta["notes"]:
        logger.warning("%s: %s", data.source, note)
    hashes = {name: file["sha256"] for name, file in meta["files"].items()}
    content = {n: hashed for n, hashed in hashes.items() if not n.endswith(_WITHOUT_INFLUENCE)}
    records = {n: hashed for n, hashed in hashes.items() if n.endswith("_records.jsonl")}
    root = source.rules.media_root
    media = None if root is None else (tokenizer.directory, root)
    return PackedData(
        train=PackedSequences(directory, "train", data.seq_len, media),
        holdout=PackedSequences(directory, "holdout", data.seq_len, media),
        tokenizer_dir=str(tokenizer.directory),
        vocab_size=tokenizer.vocab_size,
        fingerprint=digest([content, data.seq_len]),
        cached=meta["cached"],
        notes=tuple(meta["notes"]),
        counts=(DataCounts.from_dict(meta["counts"]),),
        previews=(SourcePreview.from_dict(meta["preview"]),),
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer_notes=tokenizer.notes,
        records_fingerprint=digest(records),
    )


def _cache_key(source: Source, setup: _Setup) -> str:
    data, stage = source.data, source.stage
    masked = data.masks(stage)
    inputs = [_VERSION, source.identity(), setup.tokenizer.fingerprint, data.seq_len]
    rules: list[Any] = [data.packing, masked] if masked or not data.packing else []
    rules += ["last answer"] if stage in PAIRED_STAGES else []
    rules += setup.encoding_rules(source)
    rules += [] if source.rules.media_root is None else [_MEDIA_COSTS]
    return digest([*inputs, stage, data.holdout, setup.seed, *rules, "num_real", _COUNTED])


def _build(target: Path, source: Source, setup: _Setup) -> dict[str, Any]:
    tokenizer = setup.tokenizer
    flat = tokenize(source, tokenizer, target, setup.progress)
    if not len(flat.tokens):
        raise NoData(
            "the data source has no text to train on",
            where=f"data.source: {source.data.source}",
            got=", ".join(source.counts.notes) or f"{len(source.files)} files, no record",
        )
    notes = pack(target, flat, source, tokenizer.pad_id, setup.seed)
    lengths = LengthHistogram()
    # With KTO, every second document has a mismatched answer and is not counted.
    for span in flat.spans[:: 2 if source.stage == "kto" else 1]:
        lengths.add(span.stop - span.start)
    examples = preview_examples(source, tokenizer.hf)
    return {
        "notes": source.counts.losses + notes,
        "counts": source.counts.as_dict(),
        "preview": SourcePreview(examples, lengths).as_dict(),
    }


def _open_stream(source: Source, setup: _Setup) -> PackedData:
    data, tokenizer = source.data, setup.tokenizer
    stream = Stream(source, tokenizer.hf, setup.seed, tokenizer.pad_id)
    next(stream.rows(Place()))  # raise now if the source yields no sequence
    examples = preview_examples(source, tokenizer.hf)
    settings = [data.seq_len, data.packing, stream.masked, data.max_bytes, data.text_key]
    settings += [data.max_records] if data.max_records else []
    settings += setup.encoding_rules(source)
    settings += [source.rules.identity] if source.rules.identity else []
    # The run's copy of the recipe has an absolute path where the recipe may have a relative one.
    path = Path(data.source).expanduser()
    name = str(path.absolute()) if path.exists() else data.source
    inputs = [_VERSION, name, source.shape, source.stage, tokenizer.fingerprint]
    return PackedData(
        train=stream,
        holdout=None,
        tokenizer_dir=str(tokenizer.directory),
        vocab_size=tokenizer.vocab_size,
        fingerprint=digest([*inputs, *settings]),
        cached=False,
        counts=(stream.counts,),
        previews=(SourcePreview(examples, stream.lengths),),
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer_notes=tokenizer.notes,
        files_fingerprint=digest(source.identity()),
    )
