"""LlamaFactory's datasets (`dataset_info.json`) as sources of a recipe, and checks of its chat templates."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from hyper_parallel.config import read_mapping
from hyper_parallel.errors import Contradiction, NoData, RecipeUnreadable, UnknownKey, abbreviated
from hyper_parallel.received import names_outside, outside_target
from hyper_parallel.trainer.data import render
from hyper_parallel.trainer.data.records import read_records
from hyper_parallel.trainer.data.saved_tokenizer import has_tokenizer, load_tokenizer
from hyper_parallel.units import MiB

_KEYS: Final = ("file_name", "formatting", "ranking", "columns", "tags")
"""Supported keys of a dataset's entry."""
_COLUMNS: Final = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output"},
    "sharegpt": {"messages": "messages"},
}
"""Columns that LlamaFactory reads by default, by dataset format: key of `columns` to key of `data.columns`."""
_DEFAULTS: Final = {"messages": "conversations"}
_NAMED: Final = {
    "prompt": "instruction", "query": "input", "response": "output", "history": "history", "messages": "messages",
    "system": "system", "tools": "tools", "chosen": "chosen", "rejected": "rejected", "kto_tag": "label",
    "images": "images", "audios": "audio",
}  # fmt: skip
"""Keys of LlamaFactory's `columns`, with the corresponding keys of `data.columns`."""
_OPTIONAL: Final = ("query", "history", "system", "tools", "kto_tag", "images", "audios")
_TAGS: Final = {"role_tag": "role", "content_tag": "content"}
_ROLES: Final = {
    "user_tag": "user", "assistant_tag": "assistant", "system_tag": "system", "observation_tag": "tool",
    "function_tag": "function_call",
}  # fmt: skip
_SAID: Final = ("system", "history", "tools", "images", "videos", "audios")
"""Keys that LlamaFactory ignores unless `columns` names them; a record with a value for one is refused here."""
_CHATML: Final = (False, "<|im_start|>{role}\n{content}<|im_end|>\n")
_TEMPLATES: Final = {
    "chatml": _CHATML,
    "qwen3_nothink": _CHATML,
    "llama3": (True, "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>"),
}
"""By name of a template of LlamaFactory 0.9.5: whether the text starts with the BOS token; format of a turn."""


def _unknown(name: str, listed: Path, known: list[str]) -> UnknownKey:
    near = get_close_matches(name, known, 1)
    hint = f"did you mean `{near[0]}`?" if near else f"add `{name}` to {listed}"
    return UnknownKey(f"unknown dataset `{name}`", where=str(listed), allowed=known, hint=hint)


def source_of(name: str, directory: str, stage: str, most: int = 64 * MiB) -> tuple[dict[str, Any], int]:
    """Return the keys of the recipe section `data` for a dataset of LlamaFactory, and its number of records.

    `directory` contains `dataset_info.json`. With `stage` pt, the result has a text key instead of columns. `most` is
    the maximum size of a record in bytes. Further errors are those of `read_mapping` and `read_records`.

    Raises:
        UnknownKey: HP101 for a name that `dataset_info.json` does not list.
        Contradiction: HP104 for unsupported keys, columns, tags or file locations.
    """
    listed = Path(directory) / "dataset_info.json"
    known = read_mapping(listed, RecipeUnreadable, "list of datasets")
    if name not in known:
        raise _unknown(name, listed, sorted(known))
    info: dict[str, Any] = known[name]

    def refuse(problem: str, got: object, allowed: object) -> Contradiction:
        return Contradiction(
            f"the dataset `{name}` {problem}",
            where=str(listed),
            got=got,
            allowed=allowed,
            hint=f"correct the entry `{name}` of {listed}",
        )

    parts = (info.get("columns") or {}, info.get("tags") or {}) if isinstance(info, dict) else ()
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise refuse("is not described by an object", abbreviated(info), "an object, also under columns and tags")
    columns, tags, shape = *map(dict, parts), info.get("formatting", "alpaca")
    for key in info:
        if key not in _KEYS:
            raise refuse(f"has the key `{key}`, which is not supported", info[key], _KEYS)
    if shape not in _COLUMNS:
        raise refuse("has a format that is not supported", abbreviated(shape), list(_COLUMNS))
    for part, values, names in (("columns", columns, _NAMED), ("tags", tags, {**_TAGS, **_ROLES})):
        for key, value in values.items():
            if key not in names or not isinstance(value, str):
                problem = f"sets `{part}.{key}`, which is not supported"
                raise refuse(problem, abbreviated(value), list(names))
    file = info.get("file_name")
    if not isinstance(file, str) or names_outside(file):
        raise refuse("has no valid `file_name`", abbreviated(file), "a file in the folder")
    path = Path(directory) / file
    if (target := outside_target(path, Path(directory))) is not None:
        raise refuse("has a `file_name` outside of the folder", f"{file}, a link to {target}", "a file in the folder")
    number, keys = 0, set[str]()
    for number, (_, record) in enumerate(read_records(path, most), start=1):
        keys |= record.keys()
        for key in _SAID if stage != "pt" else ():
            if record.get(key) and key not in columns.values():
                problem = f"contains a record with `{key}`, and no column for it"
                raise refuse(problem, f"record {number}", columns)
    for key, value in columns.items():
        if value not in keys and key not in _OPTIONAL:
            raise refuse(f"has no record with the key that `columns.{key}` names", value, sorted(keys))
    if stage == "pt":
        text_key = columns.get("prompt", "instruction")
        return {"source": str(path), "format": "jsonl", "text_key": text_key}, number
    source = {"source": str(path), "format": "preference" if info.get("ranking") else shape}
    return source | _names(columns, tags, shape, keys), number


def _names(columns: dict[str, str], tags: dict[str, str], shape: str, keys: set[str]) -> dict[str, Any]:
    """Return `data.columns`, `data.roles` and `data.ignore_keys` for the column and tag names of a dataset."""
    read = {standard: _DEFAULTS.get(standard, standard) for standard in _COLUMNS[shape].values()}
    read |= {_NAMED[name]: value for name, value in columns.items()}
    standard_names = {name: {name, _DEFAULTS.get(name, name)} for name in read}
    renamed = {name: value for name, value in read.items() if value not in standard_names[name]}
    renamed |= {_TAGS[tag]: value for tag, value in tags.items() if tag in _TAGS}
    roles = {_ROLES[tag]: value for tag, value in tags.items() if tag in _ROLES}
    keys_of_data: dict[str, Any] = {"columns": renamed, "roles": roles}
    keys_of_data["ignore_keys"] = sorted(keys - set(read.values()))
    return {key: value for key, value in keys_of_data.items() if value}


def check_template(name: str, model: str, where: str) -> None:
    """Raise Contradiction (HP104) unless the model's chat template writes the same texts as the template `name`.

    `name` is a template of LlamaFactory; `where` is its location for errors. Raise NoData (HP602) if the folder `model`
    has no tokenizer. Other errors are those of `load_tokenizer`.
    """
    if not has_tokenizer(Path(model).expanduser()):
        raise NoData(
            f"the model has no tokenizer whose chat template could be compared with the template `{name}`",
            where=where,
            got=model,
            hint="template=null",
        )
    turns = [("system", "A"), ("user", "B"), ("assistant", "C"), ("user", "D"), ("assistant", "E")]
    tokenizer, known = load_tokenizer(model), _TEMPLATES.get(name)
    # With and without a system text, because templates may insert a default one.
    for part in (turns, turns[1:]):
        messages = [{"role": role, "content": content} for role, content in part]
        own_text, expected = "", None
        if tokenizer.chat_template:
            own_text = render(tokenizer, messages, where=model).rstrip()
        if known is not None:
            begin, turn = known
            text = "".join(turn.format(role=r, content=c) for r, c in part)
            expected = ((tokenizer.bos_token or "") * begin + text).rstrip()
        if own_text == expected:
            continue
        problem = f"the model's own chat template, which is used, formats texts unlike the template `{name}`"
        if expected is None:
            problem = f"the template `{name}` cannot be compared with the model's own chat template, which is used"
        raise Contradiction(
            problem if own_text else f"the model has no chat template to use in place of the template `{name}`",
            where=where,
            got=f"own template: {own_text!r}" if own_text else "a model without chat template",
            allowed=f"as `{name}`: {expected!r}" if expected else f"null, or one of {', '.join(_TEMPLATES)} if equal",
            hint="template=null" if own_text else "add a chat template to the model's tokenizer, then template=null",
        )
