"""Hostile tokenizers: refused when they are loaded, or with a code when they fail on a text."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.unit, pytest.mark.torch]
pytest.importorskip("transformers")

from hyper_parallel.trainer.data import copy_tokenizer, load_tokenizer, tokenizing  # noqa: E402
from hyper_parallel.trainer.data.packing import encode  # noqa: E402
from hyper_parallel.trainer.data.sources import Document  # noqa: E402
from hyper_parallel.trainer.data.tokenizer_limits import check_pattern  # noqa: E402
from tests.received.bounds import refusal, within_bounds  # noqa: E402
from tests.received.tokenizers import Edit, small, write  # noqa: E402


def split(pattern: str) -> Edit:
    part = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return lambda values: values.update(pre_tokenizer=part)


def normalize(*parts: dict[str, Any]) -> Edit:
    return lambda values: values.update(normalizer={"type": "Sequence", "normalizers": list(parts)})


def replace(found: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: found}, "content": content}


TWICE = [{"Sequence": {"id": "A", "type_id": 0}}]
POST = {
    "type": "TemplateProcessing",
    "single": TWICE * 1000,
    "pair": TWICE * 2,
    "special_tokens": {},
}
PIECES = {
    "type": "WordPiece",
    "unk_token": "a",
    "continuing_subword_prefix": "##",
    "vocab": {"a": 0, "<|end|>": 1},
}
ADDED = {"id": 2**70, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}  # fmt: skip
REFUSED: dict[str, tuple[Edit, str, str]] = {
    "choices": (split("(a|aa|a+)+$"), "HP102", "repeats a choice"),
    "repetitions": (split("(a+)+$"), "HP102", "repeats a choice"),
    "choice of one": (split("(?:a|a)*b"), "HP102", "repeats a choice"),
    "looking ahead": (split("(?=(a+)+b)"), "HP102", "repeats a choice"),
    "many repetitions": (split("a*a*a*a*a*b"), "HP102", "repeats a choice"),
    "counted choices": (split("(a|aa){40}b"), "HP102", "repeats a choice"),
    "twice counted": (split("(a|aa){3}{9}b"), "HP102", "repeats a choice"),
    "spaces before a repetition": (split("(?x)(a+) +b"), "HP102", "with comments"),
    "references": (split("(a+)\\1+b"), "HP102", "refers to a group"),
    "calls": (split("(?<x>a\\g<x>?)b"), "HP102", "refers to a group"),
    "counts": (split("a{100000}"), "HP102", "repetition of 100,000"),
    "groups": (split("(a)" * 300), "HP102", "300 groups"),
    "long": (split("a|" * 30_000), "HP102", "60,000 characters"),
    "open": (split("(a"), "HP602", "cannot be loaded"),
    "normalizer": (normalize(replace("(a|aa|a+)+$", "x", "Regex")), "HP102", "repeats a choice"),
    "nothing to much": (normalize(replace("", "x" * 10**6)), "HP102", "1,000,000 characters"),
    "letter to much": (normalize(replace("a", "x" * 10**6)), "HP102", "1,000,000 characters"),
    "doubled": (normalize(*[replace("a", "aa")] * 40), "HP102", "256 characters from one"),
    "doubled between": (normalize(*[replace("", "x")] * 40), "HP102", "256 characters from one"),
    "prepended": (normalize({"type": "Prepend", "prepend": "x" * 10**6}), "HP102", "characters"),
    "map": (normalize({"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "HP602", "loaded"),
    "sequences": (lambda v: v.update(post_processor=POST), "HP102", "1,000 parts"),
    "decoder": (lambda v: v.update(decoder=replace("", "x" * 10**6)), "HP102", "decoder"),
    "words": (
        lambda v: v.update(model=PIECES | {"max_input_chars_per_word": 10**9}, pre_tokenizer=None),
        "HP102", "too long",
    ),
    "numbers of tokens": (lambda v: v["added_tokens"].append(ADDED), "HP602", "u32"),
    "shape": (lambda v: v.update(model=5), "HP602", "cannot be loaded"),
    "empty": (lambda v: v.clear(), "HP602", "cannot be loaded"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_part_that_takes_unbounded_work_is_refused(tmp_path: Path, name: str) -> None:
    edit, code, word = REFUSED[name]
    directory = write(tmp_path, edit)
    refusal(lambda: load_tokenizer(directory), code, word, str(directory))


def test_a_panic_on_a_text_has_a_code(tmp_path: Path) -> None:
    """A pattern that passes, and gives up on this text: the library raises no Exception then."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a|aa|a+)+$"), "isolated")

    def read() -> None:
        with tokenizing("rows:7"):
            backend.encode_batch_fast(["a" * 4000 + "b"])

    refusal(read, "HP102", "fails on a text", "rows:7")


@pytest.mark.parametrize(
    "pattern",
    [
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{Lm}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+""",
        r" ?[^(\s|[.,!?\u2026\u3002])]+",
        r"[\p{Han}]+|[\p{Lu}\p{Lt}&&[^\p{Han}]]*[\p{Ll}\p{Lm}&&[^\p{Han}]]+",
        r"(?:\r?\n)+(?!\r?\n)",
        r"\p{N}{1,3}(?=(?:\p{N}{3})*$)",
    ],
)
def test_patterns_of_published_tokenizers_pass(pattern: str) -> None:
    check_pattern(pattern)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "tokenizer_config.json"])
def test_a_file_of_gigabytes_is_refused_before_it_is_read(tmp_path: Path, name: str) -> None:
    directory = write(tmp_path)
    (directory / name).touch()
    os.truncate(directory / name, 2 << 30)
    refusal(lambda: load_tokenizer(directory), "HP602", name, "2,147,483,648 bytes")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "processor_config.json"])
def test_a_link_to_another_file_outside_is_refused(tmp_path: Path, name: str) -> None:
    """Words of that file would be copied into caches and exports."""
    directory = write(tmp_path / "model")
    secret = tmp_path / "secret.json"
    secret.write_text('{"key": "words of somebody else"}')
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(secret)
    error = refusal(lambda: load_tokenizer(directory), "HP602", name, "secret.json")
    assert "replace the link" in str(error.hint)
    (tmp_path / "export").mkdir()
    refusal(lambda: copy_tokenizer(directory, tmp_path / "export"), "HP602", name)
    assert not [*(tmp_path / "export").iterdir()]


def test_a_link_of_the_same_name_to_another_link_is_followed(tmp_path: Path) -> None:
    directory, other = write(tmp_path / "model"), tmp_path / "other"
    (tmp_path / "secret.json").write_text('{"key": "words of somebody else"}')
    other.mkdir()
    (other / "processor_config.json").symlink_to("../secret.json")
    (directory / "processor_config.json").symlink_to("../other/processor_config.json")
    refusal(lambda: load_tokenizer(directory), "HP602", "processor_config.json", "secret.json")


def test_a_folder_of_links_to_the_files_of_a_model_is_read(tmp_path: Path) -> None:
    """The targets may be links themselves, or blobs in the cache of the hub."""
    blobs, store = tmp_path / "models--user--name" / "blobs", write(tmp_path / "store")
    blobs.mkdir(parents=True)
    directory, direct = tmp_path / "links", tmp_path / "direct"
    directory.mkdir()
    direct.mkdir()
    for number, path in enumerate(sorted(store.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
        (directory / path.name).symlink_to(path)
        (direct / path.name).symlink_to(blobs / str(number))
    assert load_tokenizer(directory).eos_token == "<|end|>"
    assert load_tokenizer(direct).eos_token == "<|end|>"


def test_a_config_beside_the_tokenizer_is_bounded_too(tmp_path: Path) -> None:
    directory = write(tmp_path)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_labels": 10**9}))
    refusal(lambda: load_tokenizer(directory), "HP305", "num_labels")


def test_a_whole_tokenizer_is_read_and_paths_in_its_config_are_not(tmp_path: Path) -> None:
    directory = write(tmp_path, normalize({"type": "NFKC"}, replace(" ", "\u2581")))
    path = directory / "tokenizer_config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"tokenizer_file": "/etc/passwd", "vocab_file": "/etc/passwd"}))
    with within_bounds():
        tokenizer = load_tokenizer(directory)
        ids = next(encode([Document("rows:1", "a b")], tokenizer, "pt"))[0]
    assert tokenizer.get_vocab() == small().get_vocab()
    assert len(ids) == 6
