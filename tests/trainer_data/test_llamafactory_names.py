"""Columns and tags of LlamaFactory's `dataset_info.json` are those of the recipe."""

import json

import pytest

from hyper_parallel.config import Data
from hyper_parallel.errors import Contradiction
from hyper_parallel.integration.llamafactory.data import source_of
from hyper_parallel.trainer.data.sources import resolve

pytestmark = pytest.mark.unit

TAGS = {
    "role_tag": "speaker",
    "content_tag": "said",
    "user_tag": "customer",
    "assistant_tag": "agent",
    "observation_tag": "result",
    "function_tag": "action",
}
CALL = {"name": "f", "arguments": {"x": 1}}
TURNS = [("customer", "q"), ("action", json.dumps(CALL)), ("result", "2"), ("agent", "r")]
ASKED = {
    "frage": "q",
    "antwort": "r",
    "mehr": "i",
    "vorher": [["h", "g"]],
    "rolle": "s",
    "notiz": 7,
}
ASKED_COLUMNS = {
    "prompt": "frage", "query": "mehr", "response": "antwort", "history": "vorher", "system": "rolle",
}  # fmt: skip


def conversation(tmp_path, record, info, stage="sft"):
    (tmp_path / "a.json").write_text(json.dumps([record]))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"own": {"file_name": "a.json", **info}}))
    values, count = source_of("own", str(tmp_path), stage)
    assert count == 1
    (document,) = resolve(Data(**values), stage).documents()
    return document.conversation, values


def test_columns_of_alpaca_records(tmp_path):
    one, values = conversation(tmp_path, ASKED, {"columns": ASKED_COLUMNS})
    assert [m["content"] for m in one.messages] == ["s", "h", "g", "q\ni", "r"]
    assert values["ignore_keys"] == ["notiz"]
    with pytest.raises(Contradiction, match=r"columns\.prompt"):
        conversation(tmp_path, {"frage": "q"}, {"columns": {"prompt": "fragen"}})


def test_columns_and_tags_of_sharegpt_records(tmp_path):
    record = {
        "dialog": [{"speaker": s, "said": said} for s, said in TURNS],
        "api": '[{"name": "f"}]',
    }
    columns = {"messages": "dialog", "tools": "api"}
    info = {"formatting": "sharegpt", "columns": columns, "tags": TAGS}
    one, values = conversation(tmp_path, record, info)
    assert [m["role"] for m in one.messages] == ["user", "assistant", "tool", "assistant"]
    assert one.messages[1]["tool_calls"] == [{"type": "function", "function": CALL}]
    assert one.tools == ({"type": "function", "function": {"name": "f"}},)
    assert "ignore_keys" not in values
    with pytest.raises(Contradiction, match="no column for it"):
        conversation(tmp_path, {**record, "system": "s"}, info)


def test_columns_of_images_and_audio_keep_their_meaning(tmp_path):
    record = {
        "messages": [{"role": "user", "content": "<image><audio>q"}],
        "bild": ["a.png"],
        "ton": ["a.wav"],
    }
    (tmp_path / "a.json").write_text(json.dumps([record]))
    info = {
        "file_name": "a.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "bild", "audios": "ton"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user"},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps({"own": info}))
    values, _ = source_of("own", str(tmp_path), "sft")
    assert {k: v for k, v in values["columns"].items() if k in ("images", "audio")} == {
        "images": "bild",
        "audio": "ton",
    }
    assert "ignore_keys" not in values
    Data(**values)
