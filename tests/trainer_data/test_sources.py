"""What is read, in which order, and what is refused with its place."""

import json

import pytest

from hyper_parallel.config import Data
from hyper_parallel.errors import Contradiction, NoData
from hyper_parallel.trainer.data.sources import resolve

pytestmark = pytest.mark.unit


def documents(path, stage="pt", **values):
    return list(resolve(Data(source=str(path), **values), stage).documents())


def write(path, *records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


@pytest.mark.slow
def test_standard_library_is_several_megabytes_of_python_in_a_fixed_order():
    source = resolve(Data(), "pt")
    assert source.num_bytes > 5e6
    assert source.files == resolve(Data(), "pt").files
    assert {f.suffix for f in source.files} == {".py"}
    assert not any({"test", "tests", "site-packages"} & set(f.parts) for f in source.files)


def test_a_directory_is_read_in_the_order_of_its_relative_paths_without_hidden_files(tmp_path):
    for name in ("b/1.txt", "a/2.txt", "a/.hidden.txt", ".git/x.txt", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [d.text for d in documents(tmp_path)] == ["a/2.txt", "b/1.txt", "c.txt"]


@pytest.mark.parametrize("as_array", [False, True])
def test_records_are_read_from_lines_and_from_an_array(tmp_path, as_array):
    records = [{"body": "one"}, {"body": "2020-01-01", "other": 3}]
    path = write(tmp_path / "a.json", *records)
    if as_array:
        path.write_text("\n " + json.dumps(records))
    assert [d.text for d in documents(path, text_key="body")] == ["one", "2020-01-01"]


@pytest.mark.torch
def test_parquet_is_read_without_a_network(tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, texts in (("b", ["three"]), ("a", ["one", "two"])):
        pandas.DataFrame({"text": texts}).to_parquet(tmp_path / f"{name}.parquet")
    assert [d.text for d in documents(tmp_path)] == ["one", "two", "three"]


@pytest.mark.torch
def test_a_truncated_parquet_file_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(NoData, match="parquet") as caught:
        documents(path)
    assert caught.value.where == str(path)


def test_alpaca_records_become_turns(tmp_path):
    record = {
        "instruction": "Add.",
        "input": "1 2",
        "output": "3",
        "system": "Be brief.",
        "history": [["Hi", "Hello"]],
    }
    (document,) = documents(write(tmp_path / "a.jsonl", record), stage="sft")
    assert [(m["role"], m["content"]) for m in document.conversation.messages] == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Add.\n1 2"),
        ("assistant", "3"),
    ]


def test_sharegpt_and_openai_records_become_the_same_turns(tmp_path):
    old = {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}
    new = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}
    first, second = documents(write(tmp_path / "a.jsonl", old, new), stage="sft")
    assert first.conversation.messages == second.conversation.messages
    assert [m["role"] for m in first.conversation.messages] == ["user", "assistant"]


def test_max_bytes_cuts_the_last_text_and_never_a_character(tmp_path):
    (tmp_path / "a.txt").write_text("abc", encoding="utf-8")
    (tmp_path / "b.txt").write_text("\u00e9\u00e9\u00e9", encoding="utf-8")
    (tmp_path / "c.txt").write_text("never read", encoding="utf-8")
    assert [d.text for d in documents(tmp_path, max_bytes=6)] == ["abc", "\u00e9"]
    assert [d.text for d in documents(tmp_path, max_bytes=3)] == ["abc"]


def test_max_bytes_never_cuts_a_conversation(tmp_path):
    turns = [{"from": "human", "value": "12345"}, {"from": "gpt", "value": "67890"}]
    path = write(tmp_path / "a.jsonl", *[{"conversations": turns}] * 3)
    assert len(documents(path, max_bytes=25)) == 2


@pytest.mark.parametrize("text", ['{"text": "good"}\n{"text": "bad\n', '[{"text": "good"},\n {]'])
def test_bad_json_names_the_file_and_the_line(tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(NoData) as caught:
        documents(path)
    assert caught.value.where == f"{path}:2"


def test_a_missing_source_names_the_nearest_one(tmp_path):
    (tmp_path / "corpus.jsonl").write_text("{}")
    with pytest.raises(NoData, match="HP602") as caught:
        documents(tmp_path / "corpus.json")
    assert caught.value.hint == f"data.source={tmp_path / 'corpus.jsonl'}"


def test_records_without_text_say_which_keys_were_found(tmp_path):
    path = write(tmp_path / "a.jsonl", {"id": 3, "content": "long text"})
    with pytest.raises(NoData) as caught:
        documents(path)
    assert caught.value.got == ["content", "id"]
    assert caught.value.hint == "data.text_key=content"


def test_a_later_record_without_text_is_refused_with_its_line(tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "good"}, {"txt": "bad"})
    with pytest.raises(NoData) as caught:
        documents(path)
    assert caught.value.where == f"{path}:2"


@pytest.mark.parametrize(
    ("turns", "spot"),
    [
        ([{"from": "robot", "value": "x"}], "turn 1"),
        ([{"from": "human", "value": "x"}, {"from": "gpt"}], "turn 2"),
        (["x"], "turn 1"),
    ],
)
def test_a_turn_that_cannot_be_read_is_named(tmp_path, turns, spot):
    path = write(tmp_path / "a.jsonl", {"conversations": turns})
    with pytest.raises(NoData) as caught:
        documents(path, stage="sft")
    assert caught.value.where == f"{path}:1, {spot}"


def test_the_wrong_conversation_format_hints_at_the_right_one(tmp_path):
    path = write(tmp_path / "a.jsonl", {"instruction": "a", "output": "b"})
    with pytest.raises(NoData) as caught:
        documents(path, stage="sft", format="sharegpt")
    assert caught.value.hint == "data.format=alpaca"


def test_sft_on_plain_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(Contradiction, match="stage: sft"):
        documents(tmp_path, stage="sft")


def test_a_mixed_directory_is_refused_unless_the_format_is_given(tmp_path):
    (tmp_path / "notes.txt").write_text("about")
    write(tmp_path / "a.jsonl", {"text": "one"})
    with pytest.raises(NoData, match="several file types") as caught:
        documents(tmp_path)
    assert caught.value.hint == "data.format=jsonl"
    assert [d.text for d in documents(tmp_path, format="jsonl")] == ["one"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("a.txt", b"", "empty"), ("a.bin", b"\0\1", "binary"), ("a.jsonl", b"\n\n", "no record")],
)
def test_files_without_text_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(NoData, match=message):
        documents(tmp_path / name)


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(NoData, match="no files"):
        documents(tmp_path)


def test_what_no_record_can_be_is_named_by_file_and_line(tmp_path):
    path, good = tmp_path / "a.jsonl", '{"text": "good"}\n'
    for bad, says in (
        ("[" * 100_000 + "]" * 100_000, "nested too deep"),
        ('{"text": "half \\ud83d"}', "surrogate"),
        ('{"text": "cut', "a line ends within a JSON record"),
    ):
        path.write_text(good + bad + "\n")
        with pytest.raises(NoData, match=says) as caught:
            documents(path)
        assert caught.value.where == f"{path}:2"
    path.write_bytes(good.encode() + b'{"text": "\xff"}\n')
    with pytest.raises(NoData, match="not UTF-8") as caught:
        documents(path)
    assert caught.value.where == f"{path}:2"
    path.with_suffix(".json").write_text('[{"text": "good"},\n{"text": "good"}')
    with pytest.raises(NoData, match="delimiter") as caught:
        documents(path.with_suffix(".json"))
    assert caught.value.where == f"{path.with_suffix('.json')}:2"
    for n in range(900, 1000, 3):  # near the depth where the reader itself gives up
        path.write_text('{"messages": [{"role": "user", "content": %s}]}\n' % ("[" * n + "]" * n))
        with pytest.raises(NoData, match=r"a\.jsonl:1"):
            documents(path)


def test_a_dangling_link_is_refused_as_missing(tmp_path):
    (tmp_path / "words.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(NoData, match="does not exist"):
        resolve(Data(source=str(tmp_path / "words.txt"), seq_len=8), "pt")


@pytest.mark.parametrize("target", ["chapter.txt", "rows.jsonl", "rows.jsonl.gz"])
def test_a_link_to_a_file_of_another_format_is_refused(tmp_path, target):
    (tmp_path / target).write_text("a password\n")
    (tmp_path / "table.csv").symlink_to(tmp_path / target)
    with pytest.raises(NoData, match="a different format") as caught:
        resolve(Data(source=str(tmp_path / "table.csv"), seq_len=8), "sft")
    assert caught.value.hint == f"data.source={tmp_path / target}"
    assert "password" not in caught.value.render()


def test_a_link_to_a_file_of_the_same_or_no_format_is_read(tmp_path):
    """Tools that keep data by checksum link to names without a suffix."""
    for target in ("0f3a", "rows.csv"):
        (tmp_path / target).write_text("text\nsome words\n")
        (tmp_path / "table.csv").unlink(missing_ok=True)
        (tmp_path / "table.csv").symlink_to(tmp_path / target)
        assert [d.text for d in documents(tmp_path / "table.csv")] == ["some words"]


def test_errors_show_no_line_of_a_linked_file(tmp_path):
    (tmp_path / "private").write_text("a password\n")
    (tmp_path / "rows.jsonl").symlink_to(tmp_path / "private")
    with pytest.raises(NoData, match="not valid JSON") as caught:
        for _ in resolve(Data(source=str(tmp_path / "rows.jsonl"), seq_len=8), "sft").records():
            pass
    assert "password" not in caught.value.render()
