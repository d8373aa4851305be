"""Data folders that lead outside: what a recipe does not name is not read, and nothing is fetched."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.config import Data
from hyper_parallel.received import foreign_target, names_outside, outside_target
from hyper_parallel.trainer.data.sources import resolve
from tests.received.bounds import refusal

pytestmark = pytest.mark.unit


def texts(path: Path, **data: Any) -> list[str]:
    return [document.text for document in resolve(Data(source=str(path), **data), "pt").documents()]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.jsonl"
    path.write_text('{"text": "secret"}\n')
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "folder"
    path.mkdir()
    (path / "a.jsonl").write_text('{"text": "own"}\n')
    return path


def test_a_link_to_outside_is_refused_by_name(folder: Path, secret: Path) -> None:
    (folder / "b.jsonl").symlink_to(secret)
    refusal(lambda: texts(folder), "HP602", "b.jsonl", "secret.jsonl")


def test_a_relative_link_to_outside_is_refused(folder: Path, secret: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "b.jsonl").symlink_to("../../secret.jsonl")
    refusal(lambda: texts(folder), "HP602", "b.jsonl")


def test_links_inside_and_a_source_that_is_a_link_are_read(folder: Path, secret: Path, tmp_path: Path) -> None:
    (folder / "b.jsonl").symlink_to("a.jsonl")
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "link.jsonl").symlink_to(secret)
    assert texts(tmp_path / "link") == ["own", "own"]
    assert texts(tmp_path / "link.jsonl") == ["secret"]


def test_a_snapshot_in_the_cache_of_the_hub_is_read(tmp_path: Path, secret: Path) -> None:
    repository = tmp_path / "datasets--user--name"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "sha").write_text('{"text": "blob"}\n')
    (snapshot / "a.jsonl").symlink_to("../../blobs/sha")
    assert texts(snapshot) == ["blob"]
    (snapshot / "b.jsonl").symlink_to(secret)
    refusal(lambda: texts(snapshot), "HP602", "b.jsonl")


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "README.md", "b.jsonl"])
def test_a_loop_of_links_is_refused(folder: Path, name: str) -> None:
    (folder / name).symlink_to("other")
    (folder / "other").symlink_to(name)
    if name not in ("state.json", "b.jsonl"):
        (folder / "state.json").touch()
    refusal(lambda: texts(folder), "HP602")


def test_a_broken_link_is_not_passed_over(folder: Path) -> None:
    (folder / "b.jsonl").symlink_to("absent.jsonl")
    refusal(lambda: texts(folder), "HP602", "broken link", "b.jsonl")


def test_pipes_and_devices_are_not_read(folder: Path) -> None:
    os.mkfifo(folder / "b.jsonl")
    refusal(lambda: texts(folder / "b.jsonl"), "HP602")
    refusal(lambda: texts(folder), "HP602", "pipe", "b.jsonl")
    (folder / "b.jsonl").unlink()
    (folder / "c.jsonl").symlink_to("/dev/zero")
    refusal(lambda: texts(folder), "HP602", "c.jsonl")


OUTSIDE = [
    "../secret.jsonl", "sub/../../secret.jsonl", "/etc/passwd", "~/secret.jsonl", "https://example.com/a.jsonl",
    "http://localhost:9/a", "s3://bucket/a", "hf://datasets/a/b/c.jsonl", "file:///etc/passwd",
    "zip://a.jsonl::https://example.com/a.zip", "..", "..\\secret.jsonl",
]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_card_that_names_files_outside_is_refused(folder: Path, secret: Path, name: str) -> None:
    pytest.importorskip("datasets")
    files = {"configs": [{"config_name": "default", "data_files": [{"split": "train", "path": name}]}]}
    (folder / "README.md").write_text(f"---\n{json.dumps(files)}\n---\n# Card\n")
    refusal(lambda: texts(folder), "HP602", "README.md")
    (folder / "README.md").unlink()
    (folder / ".huggingface.yaml").write_text(json.dumps(files))
    refusal(lambda: texts(folder, split="train"), "HP602", ".huggingface.yaml")


def test_a_card_with_its_own_files_or_none_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("datasets")
    for more in ("license: mit", 'configs: [{config_name: default, data_files: "*.jsonl"}]'):
        (folder / "README.md").write_text(f"---\n{more}\n---\n# Card\n")
        assert texts(folder) == ["own"]


def test_a_linked_folder_below_a_card_is_refused(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "elsewhere").mkdir()
    (folder / "sub").symlink_to(tmp_path / "elsewhere")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    refusal(lambda: texts(folder), "HP602", "sub", "elsewhere")


def test_a_card_of_aliases_costs_little(folder: Path) -> None:
    pytest.importorskip("datasets")
    uses = ", ".join(["*{0}"] * 9)
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{n}: &a{n} [{uses.format(f'a{n - 1}')}]\n" for n in range(1, 12))
    (folder / "README.md").write_text(f"---\n{bomb}---\n")
    refusal(lambda: texts(folder), "HP602", "README.md", "elements")


@pytest.mark.torch
@pytest.mark.parametrize(
    "values",
    [
        {"_data_files": [{"filename": "../secret/data.arrow"}]},
        {"_data_files": [{"filename": "/etc/passwd"}]},
        {"_data_files": 5},
        [1],
        "[" * 100_000,
    ],
)
def test_a_saved_table_that_names_files_outside_is_refused(tmp_path: Path, values: Any) -> None:
    datasets = pytest.importorskip("datasets")
    for name in ("secret", "saved"):
        datasets.Dataset.from_dict({"text": [name]}).save_to_disk(tmp_path / name)
    assert texts(tmp_path / "saved") == ["saved"]
    state = tmp_path / "saved" / "state.json"
    old = json.loads(state.read_text())
    new = values if isinstance(values, str) else json.dumps(old | values if isinstance(values, dict) else values)
    state.write_text(new)
    refusal(lambda: texts(tmp_path / "saved"), "HP602")


@pytest.mark.torch
def test_a_list_of_splits_stays_in_its_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["secret"]}).save_to_disk(tmp_path / "secret")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(tmp_path / "d")
    assert texts(tmp_path / "d") == ["a"]
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["../secret"]}')
    refusal(lambda: texts(tmp_path / "d"), "HP602", "../secret")


@pytest.mark.torch
def test_columns_that_would_open_files_are_left_out(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    rows = {"text": ["own"], "image": [{"bytes": b"no image", "path": "/etc/passwd"}]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    assert texts(tmp_path / "saved") == ["own"]


@pytest.mark.parametrize("source", ["https://example.com/a.jsonl", "s3://bucket/a", "hf://datasets/a/b"])
def test_an_address_is_no_source(source: str) -> None:
    refusal(lambda: texts(Path(source)), "HP602", "does not exist")


@pytest.mark.parametrize(
    "name", ["../secret.jsonl", "/etc/passwd", "https://example.com/a.jsonl", "link.jsonl", 5, None]
)
def test_a_list_of_llamafactory_stays_in_its_folder(folder: Path, secret: Path, name: Any) -> None:
    pytest.importorskip("transformers")
    from hyper_parallel.integration.llamafactory.data import source_of

    (folder / "link.jsonl").symlink_to(secret)
    listed = {
        "own": {"file_name": "a.jsonl", "columns": {"prompt": "text"}},
        "bad": {"file_name": name, "columns": {"prompt": "text"}},
    }
    (folder / "dataset_info.json").write_text(json.dumps(listed | {"odd": [1]}))
    assert source_of("own", str(folder), "pt")[1] == 1
    refusal(lambda: source_of("bad", str(folder), "pt"), "HP104", "dataset_info.json")
    refusal(lambda: source_of("odd", str(folder), "pt"), "HP104", "dataset_info.json")


def test_names_and_targets(tmp_path: Path) -> None:
    assert all(map(names_outside, OUTSIDE))
    assert not any(
        map(
            names_outside,
            ["a.jsonl", "sub/a.jsonl", "**/*.parquet", "a..b", "data-00000-of-00001.arrow"],
        )
    )
    (tmp_path / "a").touch()
    assert outside_target(tmp_path / "a", tmp_path) is None
    assert outside_target(tmp_path / ".." / "b", tmp_path) == tmp_path.parent / "b"


def test_a_link_of_the_same_name_below_a_linked_folder_is_foreign(folder: Path, secret: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / secret.name).symlink_to(secret)
    (folder / "sub").symlink_to(tmp_path / "elsewhere")
    assert foreign_target(folder / "sub" / secret.name, folder) == secret


def test_a_pipe_in_a_dataset_folder_is_refused(folder: Path) -> None:
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (folder / "dataset_info.json").write_text("{}")
    os.mkfifo(folder / "data.arrow")
    refusal(lambda: texts(folder), "HP602", "data.arrow")
