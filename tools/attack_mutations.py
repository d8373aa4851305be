"""Random mutations of files for `attack.py`: of values in a known format, of bytes, or of the type of file."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import yaml

DEEP = 20_000
ODD: tuple[Any, ...] = (
    None, True, False, "", " ", "x" * 100_000, "\0", "\ud800", "\u202e\u4e2d\U0001f642", "../../x", "nan", "1e9",
    "12GiB", "auto", 0, 1, -1, 3, 2**31, 2**63, 10**18, 10**400, -(10**30), 0.5, -1.5, 1e308, 1e-320, 
    float("nan"), float("inf"), -float("inf"), [], {}, [[]], [None], {"": {}}, [0] * 5000, {"a": [1, {"b": 2}]},
)  # fmt: skip


# Mutations of values; `doc` is a list or mapping of JSON values.
def places(doc: Any) -> list[tuple[Any, Any]]:
    """Return every pair (container, key) in a document."""
    found, pending = [], [doc]
    while pending:
        here = pending.pop()
        keys = list(here) if isinstance(here, dict) else range(len(here))
        found += [(here, key) for key in keys]
        pending += [here[key] for key in keys if isinstance(here[key], (dict, list))]
    return found


def mutate_value(doc: Any, draw: random.Random) -> Any:
    """Change one random value of a document in place, and return the document; replaces a document without values."""
    if not isinstance(doc, (dict, list)) or not (found := places(doc)):
        return draw.choice(ODD)
    here, key = draw.choice(found)
    value, kind = here[key], draw.randrange(8)
    if kind == 0:
        del here[key]
    elif kind == 1:
        here[key] = deepcopy(draw.choice(ODD))
    elif kind == 2:  # another type
        here[key] = draw.choice([str(value), [value], {"x": value}, {str(value)[:9]: 1}, bool(value)])
    elif kind == 3 and isinstance(value, (int, float)):
        here[key] = draw.choice([-value, value + 1, value * 10**9, value / 3, value * 1e300, str(value)])
    elif kind == 4:  # the value of another place
        there, name = draw.choice(found)
        here[key] = deepcopy(there.get(name) if isinstance(there, dict) else (there[name:] or [0])[0])
    elif kind == 5 and isinstance(here, dict):  # another or one more key
        other = draw.choice([str(key) + "s", "", "\u0000", str(key).upper(), "k" * 5000, "__class__"])
        here[other] = here.pop(key) if draw.random() < 0.5 else value
    elif kind == 6 and isinstance(value, list):
        here[key] = value * draw.choice([2, 100]) if len(value) < 1000 else value[::-1]
    else:
        here[key] = value[: len(value) // 2] if isinstance(value, (str, list)) else draw.choice(ODD)
    return doc


def mutate_bytes(raw: bytes, draw: random.Random) -> bytes:
    """Return the content of a file with random changes of bytes."""
    data, kind = bytearray(raw), draw.randrange(10)
    at = draw.randrange(len(data) + 1)
    to = min(len(data), at + draw.choice([1, 4, 16, 100, 1000]))
    if kind <= 2 and data:
        for _ in range(draw.choice([1, 2, 8])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == 3:
        del data[at:]
    elif kind == 4:
        del data[at:to]
    elif kind == 5:
        data[at:at] = data[at:to] * draw.choice([1, 2, 50])
    elif kind == 6:
        data[at:at] = draw.randbytes(draw.choice([1, 8, 300]))
    elif kind == 7:
        data[at:to] = draw.choice(
            [
                b"\0",
                b"\xff\xfe",
                b"\xef\xbb\xbf",
                b"[" * DEEP,
                b'{"a":' * DEEP,
                b"- " * DEEP,
                b"&a *a ",
                b'"',
            ]
        )
    elif kind == 8:
        data = bytearray(
            data.decode("utf-8", "replace").encode(draw.choice(["utf-16", "utf-32", "utf-8-sig", "cp037"]), "replace")
        )
    else:
        data = bytearray() if draw.random() < 0.2 else data + data
    return bytes(data)


# Codecs: a document of the bytes of a file, and back.
def _json(doc: Any) -> bytes:
    return json.dumps(doc, indent=1).encode()


def _lines(raw: bytes) -> Any:
    return [json.loads(line) for line in raw.splitlines()]


def _header(raw: bytes) -> Any:
    size = int.from_bytes(raw[:8], "little")
    return [json.loads(raw[8 : 8 + size]), raw[8 + size :].hex()]


def _with_header(doc: Any) -> bytes:
    header, data = (*doc, "", "")[:2] if isinstance(doc, list) else (doc, "")
    text = json.dumps(header).encode()
    whole = bytes.fromhex(data) if isinstance(data, str) and len(data) % 2 == 0 and data.isalnum() else b""
    return len(text).to_bytes(8, "little") + text + whole


CODECS: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes]]] = {
    ".json": (json.loads, _json),
    ".yaml": (
        yaml.safe_load,
        lambda doc: yaml.safe_dump(doc, allow_unicode=True).encode("utf-8", "surrogatepass"),
    ),
    ".jsonl": (_lines, lambda doc: b"\n".join(json.dumps(row).encode() for row in doc)),
    ".safetensors": (_header, _with_header),
    ".pickle": (pickle.loads, pickle.dumps),
}


BOMB: Final = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
"""YAML text of 400 bytes that expands to 3.9e8 elements."""
TEMPLATES: Final = (
    "{{ 1/0 }}", "{{ messages[9999] }}", "{% for a in range(10**9) %}{% endfor %}", "{{ 'a' * 10**10 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% include '/etc/passwd' %}", "{{ [].__class__.__mro__ }}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{{ raise_exception('no') }}", "{% if %}", "{{ messages | map(attribute='content') | join * 10**9 }}", "",
)  # fmt: skip
PATTERNS: Final = (
    "(a|aa|a+)+$",
    r"(.*_?)*x",
    "(" * 3000,
    "(?:a{0,30000}){0,30000}",
    "[",
    "a" * 100_000,
)
"""Regular expressions: catastrophic, nested, large or none."""


def mutate_text(path: Path, raw: bytes, draw: random.Random) -> bytes | None:
    """Return a text that is known to be difficult for the file's format; None without such a text."""
    if path.suffix in (".yaml", ".yml") and draw.random() < 0.15:
        return BOMB.encode() + draw.choice([b"", raw])
    if path.suffix == ".jinja" and draw.random() < 0.7:
        return draw.choice(TEMPLATES).encode()
    if path.name == "adapter_config.json" and draw.random() < 0.4:
        doc = json.loads(raw)
        key, values = draw.choice(ADAPTER_VALUES)
        doc[key] = draw.choice(values)
        return _json(doc)
    return None


ADAPTER_VALUES: Final = (
    ("r", (10**9, 0, -1, 2.5, "8", None, True, 2**63)),
    ("peft_type", ("IA3", "PREFIX_TUNING", "LOHA", "ADALORA", "VERA", "PROMPT_TUNING", "X", None, 3)),
    ("target_modules", (*PATTERNS, ["q_proj"] * 10_000, [], None, ["nothing"], 5, {"a": 1})),
    ("rank_pattern", (*({p: 4} for p in PATTERNS), {"q_proj": 10**9}, {"q_proj": "x"}, [])),
    ("layers_pattern", (*PATTERNS, ["layers"], 7)),
    ("layers_to_transform", ([0], 10**12, "x", [-1])),
    ("exclude_modules", (*PATTERNS, ["k_proj"])),
    ("init_lora_weights", ("pissa_niter_999999", "olora", "eva", "loftq", "lora_ga", "x", None, 3)),
    ("lora_alpha", (float("nan"), float("inf"), 1e308, -1, 0, "x", None)),
    ("use_dora", (True,)), ("lora_bias", (True,)), ("bias", ("all",)), ("modules_to_save", (["norm"], ["("], "x")),
)  # fmt: skip


def replaced(path: Path, others: list[Path], victim: Path, draw: random.Random) -> str:
    """Replace a file by a link, a pipe, a folder or another file, and return a description of the replacement."""
    kind = draw.choice(("exchange", "link out", "dangling link", "zeros", "pipe", "folder", "loop", "huge"))
    path.unlink()
    if kind == "exchange":
        shutil.copyfile(draw.choice(others), path)
    elif kind == "link out":
        path.symlink_to(draw.choice(sorted(p for p in victim.rglob("*") if p.is_file())))
    elif kind == "dangling link":
        path.symlink_to(victim / "planted" / path.name)
    elif kind == "zeros":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    return kind


def mutated(path: Path, raw: bytes, draw: random.Random) -> bytes:
    """Return the content of a file with one to three mutations, of values if its format is known, else of bytes."""
    if (text := mutate_text(path, raw, draw)) is not None:
        return text
    for _ in range(draw.choice([1, 1, 2, 3])):
        codec = CODECS.get(path.suffix)
        if codec is not None and draw.random() < 0.7:
            try:
                raw = codec[1](mutate_value(codec[0](raw), draw))
                continue
            except Exception:
                pass  # already damaged, or a value that the format cannot express
        raw = mutate_bytes(raw, draw)
    return raw
