"""Datasets of LlamaFactory (`dataset_info.json`) as sources of a recipe, and its templates as texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from hyper_parallel.config import read_mapping
from hyper_parallel.errors import Contradiction, RecipeUnreadable, UnknownKey, abbreviated
from hyper_parallel.received import names_outside, outside_target
from hyper_parallel.trainer.data import render
from hyper_parallel.trainer.data._records import read_records
from hyper_parallel.trainer.data._tokenizer import load_tokenizer

_COLUMNS: Final = {
    "prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history",
    "chosen": "chosen", "rejected": "rejected",
}  # fmt: skip
_OF_SEVERAL: Final = {"messages": ("conversations", "messages"), "kto_tag": ("kto_tag", "label")}
_TAGS: Final = {
    "role_tag": ("from", "role"), "content_tag": ("value", "content"), "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"), "system_tag": ("system",), "observation_tag": (), "function_tag": (),
}  # fmt: skip
_CHATML: Final = (False, "<|im_start|>{role}\n{content}<|im_end|>\n")
_TEMPLATES: Final = {
    "chatml": _CHATML,
    "qwen3_nothink": _CHATML,
    "llama3": (True, "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>"),
}
"""Whether the text begins with the token for that, and a turn, in LlamaFactory's templates of 0.9.5."""


def source_of(name: str, directory: str, stage: str) -> tuple[dict[str, Any], int]:
    """A dataset as keys of `data`, and how many records its file has.

    Raises:
        RecipeUnreadable: HP103 without `dataset_info.json`. UnknownKey: HP101 for a name that it has not.
        Contradiction: HP104 for a dataset whose columns, tags or place are not read here.
    """
    listed = Path(directory) / "dataset_info.json"
    known = read_mapping(listed, RecipeUnreadable, "list of datasets")
    if name not in known:
        raise UnknownKey(f"unknown dataset `{name}`", where=str(listed), allowed=sorted(known))
    info: dict[str, Any] = known[name]

    def refuse(key: str, got: object, allowed: object) -> Contradiction:
        what = f"the dataset `{name}` says `{key}`, which is not read here"
        return Contradiction(
            what,
            where=str(listed),
            got=got,
            allowed=allowed,
            hint="data.source=<a file with these keys>",
        )

    parts = (info.get("columns") or {}, info.get("tags") or {}) if isinstance(info, dict) else ()
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise refuse(name, abbreviated(info), "an object with keys, also under columns and tags")
    columns, shape = dict(parts[0]), info.get("formatting", "alpaca")
    for key in info:
        if key not in ("file_name", "formatting", "ranking", "columns", "tags"):
            raise refuse(key, info[key], "file_name, formatting, ranking, columns, tags")
    text_key = columns.pop("prompt", "instruction") if stage == "pt" else None
    for key, value in columns.items():
        wanted = _OF_SEVERAL.get(key) or (_COLUMNS.get(key, ""),)
        if value not in wanted:
            raise refuse(f"columns.{key}", value, wanted)
    for key, value in (info.get("tags") or {}).items():
        if value not in _TAGS.get(key, ()) and _TAGS.get(key) != ():
            raise refuse(f"tags.{key}", value, _TAGS.get(key, list(_TAGS)))
    file = info.get("file_name")
    if not isinstance(file, str) or names_outside(file):
        raise refuse("file_name", abbreviated(file), "the name of a file in the folder")
    path, number, record = Path(directory) / file, 0, {}
    if (target := outside_target(path, Path(directory))) is not None:
        raise refuse("file_name", f"{file}, a link to {target}", "a file in the folder")
    for number, (_, record) in enumerate(read_records(path), start=1):
        for key in ("system", "history", "tools", "images"):
            if record.get(key) and key not in columns and stage != "pt":
                raise refuse(
                    f"a record with `{key}`, and no column for it", f"record {number}", columns
                )
    found = {"source": str(path), "format": "preference" if info.get("ranking") else shape}
    return (
        {"source": str(path), "format": "jsonl", "text_key": text_key} if text_key else found
    ), number


def check_template(name: str, model: str, where: str) -> None:
    """Raise Contradiction (HP104) unless the model's own chat template writes what LlamaFactory's of this name does."""
    turns = [("system", "A"), ("user", "B"), ("assistant", "C"), ("user", "D"), ("assistant", "E")]
    messages = [{"role": role, "content": content} for role, content in turns]
    tokenizer, known = load_tokenizer(model), _TEMPLATES.get(name)
    own, wanted = "", None
    if tokenizer.chat_template:
        own = render(tokenizer, messages, where=model).rstrip()
    if known is not None:
        begin, turn = known
        text = "".join(turn.format(role=r, content=c) for r, c in turns)
        wanted = ((tokenizer.bos_token or "") * begin + text).rstrip()
    if own != wanted:
        raise Contradiction(
            f"conversations are written by the model's own chat template, and `{name}` is not known to be the same",
            where=where,
            got=repr(own) if own else "a model without one",
            allowed=repr(wanted)
            if wanted
            else f"null, or one of {', '.join(_TEMPLATES)} where they are the same",
            hint="template=null",
        )
