"""The tokens of training are those of every later load: of an export with its config.json, and of a folder without."""

import json
import re
import shutil

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import (
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    TOKENIZER_MAPPING_NAMES,
)

from hyper_parallel.config import Data
from hyper_parallel.errors import BadValue, HyperParallelError
from hyper_parallel.trainer.data import copy_tokenizer, load_tokenizer, prepare
from tests.slow import slow_cells

pytestmark = pytest.mark.torch

TEXTS = [
    "Hello world", "  two  spaces", "\n\n a\n", "in 2024: 1,234.50", "don't stop it's WE'LL", "ol\u00e9 ole\u0301",
    "\u4f60\u597d\u4e16\u754c", "\U0001f600 ok", " lead", "a<|end|>b <s> c", "x" * 40, "snake_case camelCase", "\t\t",
]  # fmt: skip
"""Texts that are other ones than the probes of the package."""
CORPUS = "In 2024 the quick brown fox, aged 12, didn't jump over 345 lazy dogs. \u00fcber ol\u00e9\n" * 60
KINDS = ("bytes", "spaces", "first token")
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|end|>", "<|endoftext|>", "<mask>", "[UNK]", "[PAD]"]


@pytest.fixture(scope="module")
def backends():
    """A tokenizer on bytes, one on words with a mark before each, and one that adds a first token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = {}
    for kind in KINDS:
        backend = Tokenizer(models.BPE(unk_token="<unk>" if kind == "spaces" else None))
        if kind == "spaces":
            backend.pre_tokenizer = pre_tokenizers.Metaspace()
            backend.decoder = decoders.Metaspace()
        else:
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
        backend.train_from_iterator([CORPUS], trainer)
        if kind == "first token":
            backend.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", SPECIAL.index("<s>"))]
            )
        found[kind] = backend
    return found


@pytest.fixture
def folder(tmp_path, backends):
    """Write a tokenizer with a class of that name, and a config.json of a model type."""

    def write(kind="bytes", name="PreTrainedTokenizerFast", model_type=None, **values):
        hf = PreTrainedTokenizerFast(tokenizer_object=backends[kind], eos_token="<|end|>", pad_token="<pad>")
        target = tmp_path / "tokenizer"
        shutil.rmtree(target, ignore_errors=True)
        hf.save_pretrained(target)
        config = target / "tokenizer_config.json"
        stored = json.loads(config.read_text()) | {"tokenizer_class": name} | values
        stored = {key: value for key, value in stored.items() if value is not None}
        config.write_text(json.dumps(stored))
        if model_type is not None:
            (target / "config.json").write_text(json.dumps({"model_type": model_type}))
        return target

    return write


@pytest.fixture
def run(run_data):
    """Prepare data for a model of a type, and return the directory of the tokenizer of the run."""
    return lambda model_type, tokenizer=None: run_data(model_type, tokenizer).tokenizer_dir


@pytest.fixture
def run_data(tmp_path):
    """Prepare data for a model of a type."""
    source = tmp_path / "text.txt"
    source.write_text(CORPUS)

    def prepared(model_type, tokenizer=None):
        given = None if tokenizer is None else str(tokenizer)
        values = {
            "seq_len": 16,
            "vocab_size": 400,
            "cache_dir": str(tmp_path / "cache"),
            "holdout": 0,
        }
        data = Data(source=str(source), tokenizer=given, **values)
        config = {"model_type": model_type}
        options = {"stage": "pt", "model_path": None, "seed": 0, "progress": False}
        return prepare(data, **options, model_config=config)

    return prepared


def ids(hf):
    """Tokens of all texts with and without added tokens, and of special ones; of a text that fails its error."""
    found = [hf.eos_token_id, hf.pad_token_id, hf.bos_token_id]
    for text in TEXTS:
        for added in (False, True):
            try:
                found.append(hf(text, add_special_tokens=added)["input_ids"])
            except BaseException as error:  # tokenizers raise panics too
                if isinstance(error, KeyboardInterrupt):
                    raise
                found.append("fails")
    return found


def written(directory, target, model_type=None):
    """Tokens of a copy as transformers reads it: beside a config.json as of an export, or without as of adapters."""
    target.mkdir()
    if model_type is not None:
        (target / "config.json").write_text(json.dumps({"model_type": model_type}))
    copy_tokenizer(directory, target)
    return ids(AutoTokenizer.from_pretrained(str(target), local_files_only=True))


def assert_same_everywhere(directory, model_type, tmp_path):
    trained = ids(load_tokenizer(directory))
    for name, beside in (("export", model_type), ("adapter", None)):
        target = tmp_path / name
        shutil.rmtree(target, ignore_errors=True)
        assert written(directory, target, beside) == trained, name
        # A second stage reads the export in turn.
        again = tmp_path / f"second {name}"
        shutil.rmtree(again, ignore_errors=True)
        assert written(target, again, beside) == trained


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", "gemma", "gpt2", "stablelm", "qwen3_5", "mistral"])
def test_a_tokenizer_that_is_trained_here_is_read_alike(run, tmp_path, model_type):
    assert_same_everywhere(run(model_type), model_type, tmp_path)


def test_the_class_that_a_config_chooses_is_named_for_readers_without_one(folder, run, tmp_path):
    base = folder(model_type="qwen2")
    read = load_tokenizer(base)
    assert type(read).__name__ == "Qwen2Tokenizer", "transformers reads it as the class of the model type"
    directory = run("qwen2", base)
    assert ids(load_tokenizer(directory)) == ids(read)
    stored = json.loads((tmp_path / directory / "tokenizer_config.json").read_text())
    assert stored["tokenizer_class"] == "Qwen2Tokenizer"
    assert_same_everywhere(directory, "qwen2", tmp_path)
    # A copy from the folder itself, as `export` makes it.
    assert written(base, tmp_path / "copy") == ids(read)


def test_a_tokenizer_that_an_export_would_read_otherwise_is_refused_with_what_to_set(folder, run):
    other = folder()
    with pytest.raises(BadValue, match="HP102") as caught:
        run("qwen2", other)
    assert "TokenizersBackend reads the tokenizer of training, Qwen2Tokenizer" in caught.value.got
    key, name, path = '"tokenizer_class"', '"Qwen2Tokenizer"', other / "tokenizer_config.json"
    assert caught.value.hint == f"set {key}: {name} in {path}"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}))
    assert type(load_tokenizer(run("qwen2", other))).__name__ == "Qwen2Tokenizer"
    assert run("qwen3", folder()) == str(other), "files that are read alike stay where they are"


def test_a_copy_that_its_config_reads_otherwise_is_refused(folder, tmp_path):
    target = tmp_path / "export"
    target.mkdir()
    (target / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(BadValue, match="different tokens than in training"):
        copy_tokenizer(folder(), target)


def test_code_of_a_tokenizer_is_not_named_by_its_copies(folder, run, tmp_path):
    own = folder(name="GPT2Tokenizer", auto_map={"AutoTokenizer": ["own.Tokenizer", None]})
    directory = run("llama", own)
    assert "auto_map" not in json.loads((tmp_path / directory / "tokenizer_config.json").read_text())
    assert_same_everywhere(directory, "llama", tmp_path)


def test_parts_of_a_file_that_a_class_ignores_are_named(folder, run_data, tmp_path):
    """The same files, read by the generic class and by one that has a pre-tokenizer and a normalizer of its own."""
    assert run_data("llama", folder()).tokenizer_notes == ()
    other = folder(name="Qwen2Tokenizer")
    load_tokenizer(other).save_pretrained(tmp_path / "own")
    assert run_data("qwen2", tmp_path / "own").tokenizer_notes == (), "all parts are those of the class"
    (note,) = run_data("qwen2", other).tokenizer_notes
    assert re.search("in '.*[0-9].*', token", note), "the class splits digits"
    path = other / "tokenizer.json"
    values = json.loads(path.read_text())
    values["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(values))
    for _ in ("prepared", "from the cache"):
        (note,) = run_data("qwen2", other).tokenizer_notes
        assert note.startswith(f"the class Qwen2Tokenizer ignores parts of {path}: in 'Hello world', token 1 is ")
        assert note.endswith('and "he" in programs that read this file without transformers')


def test_further_chat_templates_are_copied(folder, tmp_path):
    own = folder()
    (own / "chat_template.jinja").write_text("{{ messages }}")
    (own / "additional_chat_templates").mkdir()
    (own / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    written(own, tmp_path / "copy")
    read = AutoTokenizer.from_pretrained(str(tmp_path / "copy"), local_files_only=True)
    assert read.chat_template == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}


def test_further_chat_templates_are_in_the_tokenizer_of_a_run(folder, run):
    own = folder(model_type="qwen2")
    (own / "additional_chat_templates").mkdir()
    (own / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    for _ in ("prepared", "from the cache"):
        assert load_tokenizer(run("qwen2", own)).chat_template["tool_use"] == "{{ tools }}"


def _types():
    """A model type for each class of tokenizers, and all types that overrule the class in the files."""
    first = {}
    for model_type, name in sorted(TOKENIZER_MAPPING_NAMES.items()):
        overrules = model_type in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        first.setdefault((name, overrules and (name or model_type)), model_type)
    return sorted(first.values())


QUICK = ("qwen2", "gpt_neox")


@slow_cells(*({*_types()} - {*QUICK}))
@slow_cells(*KINDS[1:])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", _types())
def test_no_class_of_any_model_type_changes_tokens_silently(folder, run, tmp_path, model_type, kind):
    registered = TOKENIZER_MAPPING_NAMES[model_type]
    accepted = 0
    for name in (None, "PreTrainedTokenizerFast", "LlamaTokenizer", registered):
        for beside in (None, model_type):
            tokenizer = folder(kind, name, beside)
            try:
                directory = run(model_type, tokenizer)
            except HyperParallelError:
                continue
            accepted += 1
            assert_same_everywhere(directory, model_type, tmp_path)
            assert ids(load_tokenizer(directory)) == ids(load_tokenizer(tokenizer))
    assert accepted
