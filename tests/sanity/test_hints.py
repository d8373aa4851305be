"""Every hint that the source writes is pasted; `tests/conftest.py` pastes those whose values a run computes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hints import problems_of

pytestmark = pytest.mark.sanity

SOURCE = Path(__file__).parents[2] / "src" / "hyper_parallel"


def texts(node: ast.expr) -> list[str]:
    """Return the texts that an expression may have; VALUE stands for a computed part."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.Dict):  # changes of a recipe
        return [
            f"{key.value}={(texts(value) or ['VALUE'])[0]}"
            for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant)
        ]
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "VALUE" for part in node.values]
        return ["".join(map(str, parts))]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):  # changes of two dictionaries
        return [*texts(node.left), *texts(node.right)]
    if isinstance(node, ast.BinOp):
        return [a + b for a in texts(node.left) for b in texts(node.right) or ["VALUE"]]
    if isinstance(node, ast.IfExp):
        return [*texts(node.body), *texts(node.orelse)]
    if isinstance(node, ast.BoolOp):
        return [text for value in node.values for text in texts(value)]
    return []


def written_hints() -> Iterator[tuple[str, str]]:
    """Yield place and text of every hint: of keywords, of variables, and of functions named so."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            values: list[ast.expr | None] = []
            if isinstance(node, ast.Call):
                values = [k.value for k in node.keywords if k.arg in ("hint", "advice", "changes")]
            elif isinstance(node, ast.Assign) and "hint" in ast.unparse(node.targets[0]).lower():
                values = [node.value]
            elif isinstance(node, ast.FunctionDef) and "hint" in node.name:
                values = [part.value for part in ast.walk(node) if isinstance(part, ast.Return)]
            for value in values:
                for text in [] if value is None else texts(value):
                    yield f"{path.relative_to(SOURCE)}:{value.lineno}", text


def test_every_written_hint_can_be_pasted():
    hints = list(written_hints())
    assert len(hints) > 400
    wrong = [f"{place}: {text}: {p}" for place, text in hints for p in problems_of(text)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "hint",
    [
        "parallel.recompute=none", "set `training.dtype=bfloat1`", "data.seq_len=-1", "training.lrr=VALUE",
        "hyper-parallel training RECIPE.yaml", "hyper-parallel checkpoint exprt RUN_DIR", "--device-memry 4GiB",
        "hyper-parallel plan MODEL --topologie dgx-h100", "'lora.modules=[a, b]'", "leave out --no-cod",
    ],
)  # fmt: skip
def test_a_hint_that_cannot_be_pasted_is_found(hint):
    assert [*problems_of(hint)]


@pytest.mark.parametrize(
    "hint",
    [
        "training.recompute=none", "data.tokenizer=<the directory of the model's tokenizer>",
        "hyper-parallel train RECIPE.yaml checkpoint.every=10", "set `lora=null` or `checkpoint.export=false`",
        'hp.offload(step, ..., topology="nowhere")', "data.source=a.jsonl, if you mean to read it",
    ],
)  # fmt: skip
def test_a_hint_that_can_be_pasted_has_no_problem(hint):
    assert [*problems_of(hint)] == []
