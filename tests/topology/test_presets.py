"""Presets: every number has a source, units are converted once, and bad files are refused by key."""

from pathlib import Path

import pytest
import yaml

from hyper_parallel.errors import (
    BadValue,
    TopologyTooSmall,
    TopologyUnreadable,
    UnknownKey,
    UnknownPeak,
    UnknownTopology,
)
from hyper_parallel.serde import decode, encode
from hyper_parallel.topology import Quantity, Supernode, load_topology, preset_names, read_topology

pytestmark = pytest.mark.unit

PRESETS = Path(load_topology.__code__.co_filename).with_name("presets")


def _quantities(value: object) -> list[Quantity]:
    if isinstance(value, Quantity):
        return [value]
    if isinstance(value, dict):
        return [q for v in value.values() for q in _quantities(v)]
    if isinstance(value, tuple):
        return [q for v in value for q in _quantities(v)]
    if hasattr(value, "__dataclass_fields__"):
        return [q for f in value.__dataclass_fields__ for q in _quantities(getattr(value, f))]
    return []


def test_the_required_machines_ship():
    assert set(preset_names()) == {
        "atlas-900-a2", "atlas-950", "cloudmatrix384", "dgx-a100", "dgx-b200", "dgx-b300", "dgx-h100",
        "dgx-h200", "dgx-h800", "gb200-nvl72", "gb300-nvl72", "h100-96gb", "local-cpu", "tpu-v5p",
    }  # fmt: skip


@pytest.mark.parametrize("name", preset_names())
def test_preset_is_complete_and_round_trips(name):
    machine = load_topology(name)
    assert machine.name == name
    numbers = _quantities(machine)
    assert len(numbers) >= 5
    assert all(q.value > 0 and len(q.source) > 2 for q in numbers)
    assert decode(Supernode, encode(machine)) == machine
    assert machine.tier_of(machine.num_devices).name


def test_vendor_units_become_base_units():
    die = load_topology("cloudmatrix384")
    assert die.num_devices == 768
    assert die.peak_flops("bfloat16") == 376e12
    assert die.device.memory_bytes.value == 64 * 2**30
    assert [(t.name, t.size, t.bytes_s.value) for t in die.tiers] == [
        ("node", 16, 196e9),
        ("supernode", 768, 190e9),
        ("cluster", 0, 25e9),
    ]
    h200 = load_topology("h200-8")
    assert h200.name == "dgx-h200"
    assert h200.tiers[0].latency_s.value == pytest.approx(5e-6)
    assert h200.tiers[1].bytes_s.value == 50e9
    assert h200.device.memory_bytes_s.value == 4.8e12


def test_no_alias_is_used_twice_or_hides_a_preset():
    names = list(preset_names())
    for name in preset_names():
        names += yaml.safe_load((PRESETS / f"{name}.yaml").read_text()).get("aliases", [])
    assert len(set(names)) == len(names)
    assert all(load_topology(n).name in preset_names() for n in names)


def test_unknown_name_lists_the_nearest():
    with pytest.raises(UnknownTopology, match="HP303") as caught:
        load_topology("cloudmatrix-384")
    assert "`cloudmatrix384`" in caught.value.hint
    assert "dgx-h100" in caught.value.allowed


def test_unlisted_format_is_refused_not_guessed():
    with pytest.raises(UnknownPeak, match="float64") as caught:
        load_topology("cloudmatrix384").peak_flops("float64")
    assert caught.value.allowed == ["bfloat16", "float16"]


def test_more_devices_than_the_outermost_tier_are_refused():
    assert load_topology("atlas-950").tier_of(8192).name == "supernode"
    with pytest.raises(TopologyTooSmall, match="HP311"):
        load_topology("atlas-950").tier_of(8193)


def _edited(tmp_path, edit):
    data = yaml.safe_load((PRESETS / "dgx-h100.yaml").read_text())
    edit(data)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def test_a_copied_file_loads_by_path(tmp_path):
    path = _edited(tmp_path, lambda d: d.update(name="mine", num_devices=16))
    machine = load_topology(path)
    assert (machine.name, machine.num_devices) == ("mine", 16)
    assert machine.tiers == load_topology("dgx-h100").tiers


@pytest.mark.parametrize(
    ("edit", "error", "words"),
    [
        (lambda d: d["device"].update(memory_gbs=1), UnknownKey, ["device.memory_gbs", "memory_gb"]),
        (lambda d: d["tiers"][1].update(kind="mesh"), BadValue, ["tiers[1].kind", "full_mesh"]),
        (lambda d: d["tiers"][0].update(size="eight"), BadValue, ["tiers[0].size", "integer >= 0"]),
        (lambda d: d["tiers"][0]["gb_s"].pop("source"), BadValue, ["tiers[0].gb_s.source", "missing"]),
        (lambda d: d["tiers"][0].pop("gb_s"), BadValue, ["exactly one of gb_s, gbit_s"]),
        (lambda d: d["device"]["memory_gib"].update(value=0), BadValue, ["memory_gib.value", "> 0"]),
        (lambda d: d["device"]["memory_gib"].update(value=1e301), BadValue, ["memory_gib.value"]),
        (lambda d: d["tiers"][0]["gb_s"].update(value=1e-300), BadValue, ["tiers[0].gb_s.value"]),
        (lambda d: d.update(num_devices=10**108), BadValue, ["num_devices"]),
        (lambda d: d["tiers"][0].update(size=10**108), BadValue, ["tiers[0].size"]),
        (lambda d: d["tiers"].reverse(), BadValue, ["`cluster` is not the outermost"]),
        (lambda d: d["tiers"][1].update(size=12), BadValue, ["size 12", "multiple"]),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_its_name_and_key(tmp_path, edit, error, words):
    path = _edited(tmp_path, edit)
    with pytest.raises(error) as caught:
        read_topology(path)
    text = caught.value.render()
    assert str(path) in text
    for word in words:
        assert word in text


def test_unreadable_files(tmp_path):
    with pytest.raises(TopologyUnreadable, match="No such file"):
        load_topology(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(TopologyUnreadable, match="not a mapping"):
        load_topology(tmp_path / "list.yaml")
    (tmp_path / "twice.yaml").write_text("name: a\nname: b\n")
    with pytest.raises(TopologyUnreadable, match="line 2"):
        load_topology(tmp_path / "twice.yaml")
