"""Facts of a checkpoint against those of the run that continues: absent keys, nulls and sections are values."""

from pathlib import Path

import pytest

from hyper_parallel.errors import CheckpointMismatch
from hyper_parallel.trainer.loop.run_facts import changes_line, check_resume

pytestmark = pytest.mark.unit

FACTS = {
    "stage": "pt",
    "training.lr": 0.1,
    "training.optimizer_args": {},
    "training.neftune_noise_alpha": None,
    "training.profile": None,
    "lora": None,
    "moe.capacity_factor": None,
    "model.config.hidden_size": 32,
    "environment.transformers": "5.0",
    "environment.torch": "2.0",
    "content.tokenizer": "abc",
    "code.mine.Own": "abc",
}
RUN = Path("run")


def compare(saved, mine):
    return check_resume(saved, mine, RUN)


def without(*keys):
    return {k: v for k, v in FACTS.items() if k not in keys}


def test_equal_facts_have_no_change():
    assert compare(FACTS, dict(FACTS)) == {}
    assert compare(None, FACTS) == {}


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("training.optimizer_args", {}, {"maximize": True}),
        ("training.optimizer_args", {"maximize": True}, {}),
        ("training.neftune_noise_alpha", None, 5.0),
        ("environment.torch", "2.0", "2.1"),
    ],
)
def test_a_value_that_was_empty_or_null_is_a_change_both_ways(key, old, new):
    assert compare(FACTS | {key: old}, FACTS | {key: new}) == {key: (old, new)}


def test_a_section_that_was_null_is_one_change():
    section = {"training.profile.start": 3, "training.profile.steps": 2}
    mine = without("training.profile") | section
    assert compare(FACTS, mine) == {"training.profile": (None, {"start": 3, "steps": 2})}
    assert compare(mine, FACTS) == {"training.profile": ({"start": 3, "steps": 2}, None)}
    adapters = without("lora") | {"lora.r": 8, "lora.lora_alpha": 16}
    for pair in ((FACTS, adapters), (adapters, FACTS)):
        with pytest.raises(CheckpointMismatch, match="`lora` differs"):
            compare(*pair)


@pytest.mark.parametrize(
    ("key", "old", "new", "hint"),
    [
        ("training.seed", 1, 2, "training.seed=1"),
        ("data.mask_documents", True, False, "data.packing=true data.mask_documents=true"),
        ("model.config.hidden_size", 64, 32, "model.path=run/model model.init=random"),
    ],
)
def test_the_hint_restores_a_value_that_must_not_change(key, old, new, hint):
    with pytest.raises(CheckpointMismatch) as caught:
        compare(FACTS | {key: old}, FACTS | {key: new})
    assert caught.value.hint == hint


def test_a_key_that_the_checkpoint_does_not_have_counts_as_its_default():
    old = without("training.neftune_noise_alpha", "moe.capacity_factor")
    assert compare(old, FACTS) == {}
    mine = FACTS | {"training.neftune_noise_alpha": 5.0}
    assert compare(old, mine) == {"training.neftune_noise_alpha": (None, 5.0)}
    with pytest.raises(CheckpointMismatch, match=r"`moe\.capacity_factor` differs"):
        compare(old, FACTS | {"moe.capacity_factor": 1.5})
    removed = FACTS | {"training.former_key": 3}
    assert compare(removed, FACTS) == {"training.former_key": (3, None)}


def test_keys_of_a_config_come_and_go_with_versions_of_its_library_only():
    mine = FACTS | {"model.config.attention_dropout": 0.2}
    for pair in ((FACTS, mine), (mine, FACTS)):
        with pytest.raises(CheckpointMismatch, match=r"`model\.config\.attention_dropout` differs"):
            compare(*pair)
    newer = mine | {"environment.transformers": "5.1"}
    assert compare(FACTS, newer) == {
        "environment.transformers": ("5.0", "5.1"),
        "model.config.attention_dropout": (None, 0.2),
    }
    with pytest.raises(CheckpointMismatch, match="hidden_size"):
        compare(FACTS, newer | {"model.config.hidden_size": 64})


def test_files_and_code_are_named_in_words():
    mine = FACTS | {"content.tokenizer": "def", "code.mine.Own": "def"}
    line = changes_line(compare(FACTS, mine))
    assert line == "the tokenizer files have changed, the source file of mine.Own has changed"


def test_facts_of_an_imported_adapter_are_its_own_alone():
    mine = without("lora") | {"lora.r": 8, "lora.lora_alpha": 16, "training.dtype": "float64"}
    assert compare({"lora.r": 8, "lora.lora_alpha": 16}, mine) == {}
    with pytest.raises(CheckpointMismatch, match=r"`lora\.r` differs"):
        compare({"lora.r": 4, "lora.lora_alpha": 16}, mine)
