"""Towers as models of their own: closed forms against traced encoders, and plans of multimodal configs without data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from hyper_parallel import planner
from hyper_parallel.backends.torch.model_layouts import read_model
from hyper_parallel.cli import application
from hyper_parallel.errors import DoesNotFit
from hyper_parallel.ir import Plan, Strategy, Workload
from hyper_parallel.model import ModelSpec, Tower, language_of, towers_of
from hyper_parallel.planner.request import resolve
from hyper_parallel.planner.submodels import price_tower
from hyper_parallel.topology import load_topology

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.torch
_TEXT = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False,
}  # fmt: skip


def _qwen3_vl() -> tuple[nn.Module, str, dict[str, Tensor]]:
    """Return a model, its encoder's path, and an image of 512 positions."""
    vision = {
        "depth": 3, "hidden_size": 128, "intermediate_size": 512, "num_heads": 4, "out_hidden_size": 128,
        "patch_size": 8, "spatial_merge_size": 2, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}
    config = transformers.Qwen3VLConfig(text_config={**_TEXT, "rope_parameters": rope}, vision_config=vision)
    model = transformers.Qwen3VLForConditionalGeneration(config).bfloat16()
    pixels = torch.randn(1024, 3 * 2 * 8 * 8, dtype=torch.bfloat16)
    return model, "model.visual", {"hidden_states": pixels, "grid_thw": torch.tensor([[1, 32, 32]])}


def _llava() -> tuple[nn.Module, str, dict[str, Tensor]]:
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 128, "intermediate_size": 512,
        "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 256, "patch_size": 8,
    }  # fmt: skip
    text = {"model_type": "llama", **_TEXT}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision)
    model = transformers.LlavaForConditionalGeneration(config).bfloat16()
    return (
        model,
        "model.vision_tower",
        {"pixel_values": torch.randn(1, 3, 256, 256, dtype=torch.bfloat16)},
    )


def _tower(model: Any) -> tuple[ModelSpec, Tower]:
    spec = read_model(model, "tiny")
    (tower,) = towers_of(spec, model.config.to_dict(), 256)
    return spec, tower


def _kept_bytes(encoder: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Return the bytes that autograd saves in a forward, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in encoder.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = encoder(**inputs)
    assert output is not None
    return sum(kept.values())


@pytest.mark.parametrize("build", [_qwen3_vl, _llava])
def test_closed_forms_of_a_tower_agree_with_its_forward(build: Any) -> None:
    """Parameters are equal, FLOPs within 1 %, and the kept activations within 5 % of a traced forward."""
    model, path, inputs = build()
    spec, tower = _tower(model)
    calls = [(model.get_submodule(path), inputs)]
    if build is _llava:
        features = torch.randn(1, 1024, 128, dtype=torch.bfloat16, requires_grad=True)
        calls.append((model.model.multi_modal_projector, {"image_features": features}))
    own = sum(p.numel() for n, p in model.named_parameters() if "visual" in n or "vision" in n)
    projector = sum(p.numel() for n, p in model.named_parameters() if "projector" in n)
    assert tower.spec.num_params == own + projector
    assert language_of(spec).num_params == spec.num_params - own - projector
    assert tower.positions == 1024
    model.set_attn_implementation("eager")  # fused attention is not counted on a CPU
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for module, arguments in calls:
            module(**arguments)
    model.set_attn_implementation("sdpa")
    assert counter.get_total_flops() == pytest.approx(tower.forward_flops, rel=0.01)
    request = resolve(spec, "dgx-h100", Workload(512, microbatch=1), 1)
    price = price_tower(request, tower, Strategy(), 1.0)
    (activations,) = (t.bytes for t in price.memory if t.name == "activations")
    kept = sum(_kept_bytes(module, arguments) for module, arguments in calls)
    assert kept == pytest.approx(activations, rel=0.05)


def test_plans_leave_room_for_the_tower_or_are_refused() -> None:
    """The parts' memory adds up; on smaller devices the language part gets less, and at last no plan fits."""
    with torch.device("meta"):
        model, _, _ = _llava()
    spec, tower = _tower(model)
    supernode = load_topology("dgx-h100")
    work = Workload(512, tokens_per_step=8 * 512)
    options: dict[str, Any] = {"num_devices": 4, "towers": [tower], "memory_headroom": 0.0}
    plan = planner.plan(spec, supernode, work, **options)
    assert plan.submodels is not None
    language, vision = plan.submodels.parts
    assert (language.name, vision.name) == ("language", "vision")
    assert {t.name for t in vision.memory} >= {
        "parameters",
        "optimizer states",
        "activations",
    }
    assert plan.whole_step_s > plan.step_s
    proof = plan.submodels.certificate
    assert proof is not None
    assert 0 < proof.bound <= proof.value == plan.whole_step_s
    assert proof.priced > 3
    assert any("vision" in lane for lane in plan.submodels.lanes)
    assert plan == Plan.from_json(plan.to_json())
    assert "vision" in plan.summary()
    need = sum(t.bytes for part in plan.submodels.parts for t in part.memory)
    device = replace(supernode.device, memory_bytes=replace(supernode.device.memory_bytes, value=need // 64))
    with pytest.raises(DoesNotFit, match="does not fit"):
        planner.plan(spec, replace(supernode, device=device), work, **options)


def _written(folder: Path, build: Any, **vision: Any) -> str:
    """Write the config of a tiny model, with other values of its encoder; None removes a key."""
    with torch.device("meta"):
        model, _, _ = build()
    values = model.config.to_dict() | {"architectures": [type(model).__name__]}
    section = values["vision_config"] | vision
    values["vision_config"] = {k: v for k, v in section.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder / "config.json")


_PLAN = ["--topology", "dgx-h100", "--devices", "1", "--seq-len", "512", "--tokens-per-step", "512"]


def test_a_note_names_a_tower_without_a_price(tmp_path: Path) -> None:
    """The parameters of such a tower stay in the memory of the plan."""
    notes, parameters = [], []
    for patch, options in ((None, []), (8, ["--media", "0"])):
        config = _written(tmp_path, _llava, patch_size=patch)
        words = ["plan", config, *_PLAN, *options, "--output", str(tmp_path / f"{patch}.json")]
        done = CliRunner().invoke(application(), words)
        assert done.exit_code == 0, done.output
        plan = Plan.load(tmp_path / f"{patch}.json")
        assert plan.submodels is None
        notes.append([note for note in plan.notes if note.startswith("vision: left out")])
        parameters.append(plan.model.num_params)
    assert [len(one) for one in notes] == [1, 1]
    assert "no number of heads or size of patches" in notes[0][0]
    assert "--media 0" in notes[1][0]
    assert min(parameters) > language_of(_tower(_llava()[0])[0]).num_params


def test_the_language_part_keeps_towers_without_a_price() -> None:
    with torch.device("meta"):
        spec, _ = _tower(_llava()[0])
    assert language_of(spec, ["vision"]) == language_of(spec)
    assert language_of(spec, ["audio"]) == spec


@pytest.mark.parametrize(
    ("build", "vision", "options", "match"),
    [
        (_llava, {}, "--image-size 448", "reads images of 256 pixels"),
        (_llava, {"patch_size": None}, "--media 2", "no encoder whose config"),
        (_llava, {"patch_size": None}, "--image-size 256", "no image encoder whose"),
        (_qwen3_vl, {}, "--media 0 --image-size 448", "a plan with `--media 0` has no images"),
    ],
)
def test_options_of_media_without_an_effect_are_refused(
    build: Any, vision: dict[str, Any], options: str, match: str, tmp_path: Path
) -> None:
    words = ["plan", _written(tmp_path, build, **vision), *_PLAN, *options.split()]
    error = CliRunner().invoke(application(), words).exception
    assert match in str(error)


def _qwen3_vl_235b() -> Any:
    text = {
        "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128, "head_dim": 128,
    }  # fmt: skip
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config={"depth": 27, "out_hidden_size": 4096})
    config.architectures = ["Qwen3VLMoeForConditionalGeneration"]
    return config


def _qwen3_omni_30b() -> Any:
    text = {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "moe_intermediate_size": 768, "num_experts": 128, "head_dim": 128, "vocab_size": 152064,
    }  # fmt: skip
    config = transformers.Qwen3OmniMoeThinkerConfig(
        text_config=text, vision_config={"out_hidden_size": 2048}, audio_config={"output_dim": 2048}
    )
    config.architectures = ["Qwen3OmniMoeThinkerForConditionalGeneration"]
    return config


def _llama4_scout() -> Any:
    vision = {"hidden_size": 1408, "image_size": 336, "vision_output_dim": 4096}
    config = transformers.Llama4Config(vision_config=vision, text_config={"num_local_experts": 16})
    config.architectures = ["Llama4ForConditionalGeneration"]
    return config


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("build", "devices", "towers", "billions"),
    [
        (_qwen3_vl_235b, 128, ["vision"], 235),
        (_qwen3_omni_30b, 16, ["vision", "audio"], 31.7),
        (_llama4_scout, 64, ["vision"], 109),
    ],
)
def test_plan_prints_the_parts_of_a_multimodal_config_without_data(
    build: Any, devices: int, towers: list[str], billions: float, tmp_path: Path
) -> None:
    build().to_json_file(tmp_path / "config.json", use_diff=False)
    words = ["plan", str(tmp_path / "config.json"), "--topology", "dgx-h100"]
    words += ["--devices", str(devices), "--output", str(tmp_path / "plan.json")]
    words += ["--pin", "pp=1", "--pin", "cp=1", "--pin", "tp=1"]  # a quicker search
    done = CliRunner().invoke(application(), words)
    assert done.exit_code == 0, done.output
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.model.num_params == pytest.approx(billions * 1e9, rel=0.02)
    parts = plan.submodels
    assert parts is not None
    assert [part.name for part in parts.parts] == ["language", *towers]
    assert len(parts.parts[0].ranks) == devices
    used = sum(t.bytes for part in parts.parts for t in part.memory)
    assert used <= 0.95 * plan.memory_capacity_bytes
    assert 0 < parts.bubble < 1
    assert parts.certificate is not None
    assert parts.certificate.bound <= parts.certificate.value
    text = " ".join(done.output.split())
    for word in (*towers, "language", "bubble", "per rank", "lane 0", "gap"):
        assert word in text
    assert json.loads((tmp_path / "plan.json").read_text())["submodels"]["lanes"]
