"""Hints that processes and ranks print are checked as those of errors in the test process."""

import subprocess
import sys

import pytest

from hyper_parallel.config import load_recipe
from hyper_parallel.errors import BadValue, UnknownKey
from tests.conftest import PASTING, SEEN_HINTS
from tests.hints import corrected_recipe, pasted, problems_of
from tests.pasting import Pasting
from tests.printed_hints import hints_of_ranks, printed_errors


def test_a_printed_error_is_read_back():
    error = BadValue(
        "a value\nof two lines is wrong",
        where="r.yaml: data.seq_len",
        got="a: b",
        allowed="1..9",
        hint="data.seq_len=8",
        others=["one more"],
    )
    ((read, head),) = printed_errors(f"INFO a line\n{error.render()}\nanother line\n")
    assert (read.code, read.what, read.where, read.got) == (
        "HP102",
        error.what,
        error.where,
        "a: b",
    )
    assert (read.hint, head) == (error.hint, error.render().partition("\n\nhint")[0])
    assert not [*printed_errors(BadValue("no hint").render())]


def test_the_hint_that_a_process_prints_is_pasted_into_its_command(tmp_path):
    (tmp_path / "r.yaml").write_text("model: {path: llama-3-8b}\ndata: {source: words.jsonl}\n")
    words = ["-m", "hyper_parallel", "config", "show", "r.yaml", "training.stepz=3"]
    before = PASTING.num_pasted
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
    ((error, _),) = printed_errors(done.stderr)
    assert error.hint in SEEN_HINTS
    assert PASTING.num_pasted == before + 1
    assert not PASTING.problems


def test_a_wrong_key_in_a_hint_of_a_process_or_a_rank_is_found(tmp_path):
    text = BadValue("it is wrong", hint="training.stepz=3").render()
    subprocess.run([sys.executable, "-c", f"print({text!r})"], capture_output=True, check=True)
    assert "training.stepz=3" in SEEN_HINTS
    SEEN_HINTS.clear()
    log = tmp_path / "run" / "logs" / "rank_1.log"
    log.parent.mkdir(parents=True)
    log.write_text(text)
    (hint,) = hints_of_ranks(tmp_path)
    assert [*problems_of(hint)]
    log.unlink()


def test_a_line_of_a_hint_is_written_into_the_recipe_that_its_error_names(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: {path: llama-3-8b}\ndata: {source: words.jsonl, tokeniser: a}\n")
    pasting = Pasting()
    with pytest.raises(UnknownKey) as caught:
        load_recipe(recipe)
    error = caught.value
    pasting.paste(["config", "show", str(recipe)], error)
    assert (pasting.num_pasted, pasting.problems) == (1, [])
    error.hint = "write `data.tokeniser: b`"
    wrong = Pasting()
    wrong.paste(["config", "show", str(recipe)], error)
    assert ["same error" in problem for problem in wrong.problems] == [True]
    SEEN_HINTS.clear()


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        ("remove the key: recipes have no such setting", '{"data": {"source": "a"}}'),
        ("the key is `data.holdout`: a number", '{"data": {"source": "a", "holdout": 3}}'),
        ("write `training.steps: 5`", '{"data": {"source": "a"}, "training": {"steps": 5}}'),
    ],
)
def test_a_hint_on_a_key_is_followed_in_a_recipe_and_in_a_command(tmp_path, hint, text):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("data: {source: a, eval_share: 3}\n")
    error = UnknownKey("unknown", where=f"{recipe}: data.eval_share", hint=hint)
    assert corrected_recipe(error) == (recipe, text)
    error.where = f"{recipe}: data.eval_part (set by command line)"
    assert corrected_recipe(error) is None, "the key is not in the file"
    if not hint.startswith("write"):
        words = ["train", str(recipe), "data.eval_part=3"]
        assert pasted(words, error) == [*words[:2], *["data.holdout=3"] * ("holdout" in hint)]
