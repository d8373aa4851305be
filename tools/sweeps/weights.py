"""Sweep: weight directories in common forms are loaded as by plain transformers, or refused."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sweeps.interface import (
    causal_types,
    image_text_types,
    one_line,
    plain_model,
    refusal_or_failure,
)

TITLE = "Weight directories in other forms"
TEXT = (
    "A directory that transformers has written is changed: tensors in random order over three shards (`shuffled`), the "
    "same shards without an index, tied parameters under either name, under both with equal and with different values, "
    "and in the index alone (`tied`), names of foreign tensors in the index (`ghost`), tensors that the class ignores "
    "or computes, and unknown ones (`foreign`), and one of several kinds of tensors removed (`missing`). Every "
    "parameter and buffer equals that of plain `from_pretrained` in float64, bitwise in the dtype that it has there "
    "(some stay in float32); where that misses or does not know a tensor, the directory is refused. `export` is read "
    "by plain transformers, bitwise, in float64 and in bfloat16, which leaves in float32 what transformers leaves."
)
COLUMNS = ("shuffled", "without index", "tied", "ghost", "foreign", "missing", "export")
SECONDS = 600

Tensors = dict[str, Any]


def model_types() -> list[str]:
    """Return all causal and image-text types."""
    return [*causal_types(), *image_text_types()]


def run(model_type: str, folder: Path) -> dict[str, str]:
    """Check one model type, and return the result text of each column."""
    try:
        case = _Case(model_type, folder)
    except Exception as error:
        return dict.fromkeys(COLUMNS, f"skipped: {one_line(error)}")
    cells = {}
    for column in COLUMNS:
        try:
            cells[column] = getattr(case, column.replace(" ", "_"))()
        except _WrongResult as error:
            cells[column] = f"wrong: {error}"
        except Exception as error:
            cells[column] = refusal_or_failure(error)
    return cells


class _WrongResult(Exception):
    """Error for a column whose result differs from plain transformers."""


class _Case:
    """Model saved by plain transformers, with its tensors, and its state as loaded by plain transformers."""

    def __init__(self, model_type: str, folder: Path) -> None:
        from census import auto_class
        from safetensors.torch import load_file

        self._auto, self._folder = auto_class(model_type), folder
        self._random = random.Random(model_type)
        self._number = itertools.count()
        self._model_type = model_type
        model = plain_model(model_type).eval()
        self._base = folder / "base"
        model.save_pretrained(self._base)
        self._tensors: Tensors = load_file(self._base / "model.safetensors")
        self._ignored = [*(model._keys_to_ignore_on_load_unexpected or ())]
        self._state, missing = self._plain(self._base)
        if missing:
            raise RuntimeError(f"transformers does not read its own files: {sorted(missing)[0]}")

    def shuffled(self) -> str:
        """Compare shards in random order, with an index."""
        return self._same(self._write(self._tensors, shards=3))

    def without_index(self) -> str:
        """Compare shards without an index, which plain transformers cannot read."""
        return self._same(self._write(self._tensors, shards=3, index=False), self._state)

    def ghost(self) -> str:
        """Compare an index that lists foreign tensors, and tied parameters that no file contains."""
        directory = self._write(self._tensors, shards=3, ghosts=["surplus.weight", "lm_head.weight"])
        return self._same(directory, self._state)

    def tied(self) -> str:
        """Compare files that contain tied parameters under either name, and under both."""
        import torch

        model = self._tied_model()
        if model is None:
            return "skipped: the class ties nothing"
        base = self._folder / "tied"
        model.save_pretrained(base)
        from safetensors.torch import load_file

        tensors = load_file(base / "model.safetensors")
        pairs = []
        state = model.state_dict()
        for target, source in model.all_tied_weights_keys.items():
            absent = source if target in tensors else target
            alike = [n for n, t in tensors.items() if n != absent and _is_same(t, state[source])]
            if alike and absent not in tensors:
                pairs.append((alike[0], absent))
        if not pairs:
            return "skipped: published names of tied parameters are others"
        for there, absent in pairs[:2]:
            value = tensors[there]
            others = {name: t for name, t in tensors.items() if name != there}
            different = value + torch.randn_like(value)
            forms: dict[str, tuple[Tensors, list[str]]] = {
                "other name": ({**others, absent: value}, []),
                "both, equal": ({**tensors, absent: value.clone()}, []),
                "both, different": ({**tensors, absent: different}, []),
                "in the index": (tensors, [absent]),
            }
            for form, (changed, ghosts) in forms.items():
                directory = self._write(changed, shards=2, ghosts=ghosts, config=base)
                try:
                    self._same(directory)
                except _WrongResult as error:
                    raise _WrongResult(f"{absent} {form}: {error}") from None
                if form == "both, different":
                    self._exported(directory)
        return "ok"

    def foreign(self) -> str:
        """Compare files with tensors that the class ignores or computes; unknown tensors must be refused."""
        import torch

        layer = next((n for n in self._tensors if re.search(r"\.\d+\.", n)), "model.layers.0.x")
        stem = re.split(r"(?<=\.\d)\.", layer)[0]
        computed = {
            f"{stem}.attn.masked_bias": torch.tensor(-1e9),
            f"{stem}.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
            f"{stem}.self_attn.rotary_emb.inv_freq": torch.rand(4),
        }
        examples = (_example(pattern) for pattern in self._ignored)
        ignored = {name: torch.rand(3, 2) for name in examples if name is not None}
        known = {n: t for n, t in {**computed, **ignored}.items() if n not in self._tensors}
        directory = self._write({**self._tensors, **known}, shards=2)
        self._same(directory, self._state)
        kept = self._exported(directory)
        for name in ignored:
            if name in known and name not in kept:
                raise _WrongResult(f"the export lacks `{name}`")
        return self._refused({**self._tensors, "surplus.weight": torch.rand(2)}, "surplus.weight")

    def missing(self) -> str:
        """Compare files that lack a tensor of an expert, of a layer, or outside the layers."""
        names = sorted(self._tensors)
        experts = [n for n in names if re.search(r"experts\.1\.", n)]
        chosen = [self._random.choice(names) for _ in range(2)]
        chosen += experts[:1] + experts[-1:] + [n for n in names if "embed" in n][:1]
        for name in dict.fromkeys(chosen):
            left = {n: t for n, t in self._tensors.items() if n != name}
            directory = self._write(left, shards=1)
            try:
                state, missing = self._plain(directory)
            except Exception:  # transformers refuses it too
                state, missing = {}, {name}
            if missing or not state or name in experts:
                self._refused(left, name)
            else:
                self._same(directory, state)
        return "ok"

    def export(self) -> str:
        """Compare exports in float64 and bfloat16 with the original, both loaded by plain transformers."""
        import torch

        from hyper_parallel.trainer.checkpoints.model_export import export_hf

        model = self._loaded(self._base)
        for dtype in (None, torch.bfloat16):
            out = self._folder / f"export{next(self._number)}"
            export_hf(model, model.config, None, out, dtype)
            expected, _ = self._plain(self._base, dtype or torch.float64)
            found, missing = self._plain(out, dtype or torch.float64)
            if missing:
                raise _WrongResult(f"the export lacks {sorted(missing)[0]}")
            _compare(found, expected, f"{dtype or torch.float64}: ")
        return "ok"

    def _same(self, directory: Path, expected: Tensors | None = None) -> str:
        """Compare the loaded state of a directory with `expected`; None: with what plain transformers loads."""
        if expected is None:
            expected, missing = self._plain(directory)
            if missing:
                return self._refuses(directory, sorted(missing)[0])
        _compare(_state(self._loaded(directory)), expected)
        return "ok"

    def _refused(self, tensors: Tensors, name: str) -> str:
        return self._refuses(self._write(tensors, shards=1), name)

    def _refuses(self, directory: Path, name: str) -> str:
        from hyper_parallel.errors import WeightsUnreadable

        try:
            self._loaded(directory)
        except WeightsUnreadable:
            return "ok"
        raise _WrongResult(f"`{name}` is missing or unknown, and the directory is loaded")

    def _plain(self, directory: Path, dtype: Any = None) -> tuple[Tensors, set[str]]:
        """Return the state that plain transformers loads, and the names that it reports as missing."""
        import torch

        model, info = self._auto.from_pretrained(
            directory, dtype=dtype or torch.float64, output_loading_info=True, local_files_only=True
        )
        return _state(model), {*info["missing_keys"]}

    def _loaded(self, directory: Path) -> Any:
        import torch

        from hyper_parallel.backends.torch import load_pretrained
        from hyper_parallel.model import load_model, read_config
        from hyper_parallel.trainer.engine.auto_model import model_from_config

        if _is_known(self._model_type):
            load_model(directory)
        model = model_from_config(read_config(directory), torch.float64).eval()
        load_pretrained(model, directory)
        return model

    def _tied_model(self) -> Any:
        from census_models import tiny

        with suppress(Exception):
            config = tiny(self._model_type)
            config["tie_word_embeddings"] = True
            for part in ("text_config",):
                if isinstance(config.get(part), dict):
                    config[part]["tie_word_embeddings"] = True
            model = plain_model(self._model_type, config).eval()
            return model if model.all_tied_weights_keys else None
        return None

    def _exported(self, directory: Path) -> Tensors:
        """Export a directory, and return the export's tensors as loaded by plain transformers; ours must be equal."""
        from safetensors.torch import load_file

        from hyper_parallel.trainer.checkpoints.model_export import export_hf

        model = self._loaded(directory)
        out = self._folder / f"export{next(self._number)}"
        export_hf(model, model.config, None, out)
        expected = _state(model)
        found, missing = self._plain(out)
        if missing:
            raise _WrongResult(f"the export lacks {sorted(missing)[0]}")
        _compare(found, expected, "export: ")
        return load_file(out / "model.safetensors")

    def _write(
        self,
        tensors: Tensors,
        *,
        shards: int,
        index: bool = True,
        ghosts: list[str] | None = None,
        config: Path | None = None,
    ) -> Path:
        """Write tensors as a directory of shards in random order."""
        from safetensors.torch import save_file

        directory = self._folder / f"d{next(self._number)}"
        directory.mkdir()
        for name in ("config.json", "generation_config.json"):
            if ((config or self._base) / name).is_file():
                shutil.copyfile((config or self._base) / name, directory / name)
        names = [*tensors]
        self._random.shuffle(names)
        weight_map = {}
        for k in range(shards):
            file = f"model-{k + 1:05d}-of-{shards:05d}.safetensors"
            own = {name: tensors[name].contiguous() for name in names[k::shards]}
            save_file(own, directory / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(own, file)
        for name in ghosts or ():
            weight_map.setdefault(name, f"model-{1:05d}-of-{shards:05d}.safetensors")
        if index:
            order = sorted(weight_map, key=lambda _: self._random.random())
            text = json.dumps({"metadata": {}, "weight_map": {name: weight_map[name] for name in order}})
            (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        return directory


def _state(model: Any) -> Tensors:
    """Return all parameters and buffers, under every name of a shared one."""
    buffers = dict(model.named_buffers())
    return {n: t.detach() for n, t in {**buffers, **model.state_dict()}.items()}


def _compare(found: Tensors, expected: Tensors, head: str = "") -> None:
    import torch

    if found.keys() != expected.keys():
        raise _WrongResult(f"{head}other names: {sorted(found.keys() ^ expected.keys())[:2]}")
    for name, value in expected.items():
        own = found[name]
        if own.shape != value.shape or not torch.equal(own.to(value.dtype), value):
            raise _WrongResult(f"{head}{name} differs")


def _example(pattern: str) -> str | None:
    """Return a name that matches a pattern of ignored names; None if none is found."""
    replaced: list[tuple[str, str | Callable[[Any], str]]] = [
        (r"\(\?[:!=<].*?\)", ""), (r"\\d\+?", "0"), (r"\\w\+", "x"), (r"\[[^]]*\][+*]?", "0"),
        (r"\.\*|\.\+", ".x"), (r"\\", ""), (r"[\^$?]", ""), (r"\(([^|)]*)[^)]*\)", r"\1"),
    ]  # fmt: skip
    name = pattern
    for old, new in replaced:
        name = re.sub(old, new, name)
    stem = re.sub(r"\.+", ".", name).strip(".")
    names = (f"{stem}.weight", stem, f"{stem}.weight.0.weight")
    return next((n for n in names if re.search(pattern, n)), None)


def _is_same(first: Any, second: Any) -> bool:
    import torch

    return first.shape == second.shape and torch.equal(first, second)


def _is_known(model_type: str) -> bool:
    from hyper_parallel.model import FAMILIES_READ

    return model_type in FAMILIES_READ
