"""Unmodified LlamaFactory with `use_hyper_parallel`: the losses, files and evaluations of its own run.

make test-llamafactory      (an environment of its own: LlamaFactory caps versions)
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "llamafactory"))
from demo import SHAPE, prepare, train

EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "output_router_logits": False, "head_dim": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """What the demo makes, and a model with experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, set_seed

    root = tmp_path_factory.mktemp("llamafactory")
    prepare(root)
    set_seed(0)
    shutil.copytree(root / "model", root / "experts")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS)).save_pretrained(root / "experts")
    return root


def run(place: Path, name: str, ranks: int, hyper: dict | None, **changes):
    """Losses and evaluations of `llamafactory-cli train`, by step; every number of ranks divides the data."""
    if hyper is not None:
        (place / f"{name}.json").write_text(json.dumps(hyper))
        changes |= {"use_hyper_parallel": True, "hyper_parallel_args": str(place / f"{name}.json")}
    return train(place, name, ranks, **changes)


@pytest.fixture(scope="module")
def plain(place):
    """Curves of LlamaFactory alone, by its number of ranks: of unequal batches it weighs evaluations by tokens."""
    return {ranks: run(place, f"plain{ranks}", ranks, None) for ranks in (1, 2)}


@pytest.mark.parametrize(
    ("ranks", "hyper", "shares"),
    [
        (1, {}, 1), (2, {"activation_mode": "recompute"}, 2), (2, {"activation_mode": "swap"}, 2),
        (2, {"tp_size": 2}, 1), (2, {"cp_size": 2}, 1),
        (4, {"fsdp_size": 2, "tp_size": 2}, 2),
    ],
)  # fmt: skip
def test_losses_are_those_of_llamafactory_alone(place, plain, ranks, hyper, shares):
    curves = run(
        place,
        f"hyper{ranks}" + "".join(hyper) + hyper.get("activation_mode", ""),
        ranks,
        hyper,
        per_device_train_batch_size=8 // shares,
    )
    assert len(plain[shares]["loss"]) == 5
    for kind, wanted in plain[shares].items():
        assert [step for step, _ in curves[kind]] == [step for step, _ in wanted]
        assert [v for _, v in curves[kind]] == pytest.approx([v for _, v in wanted], rel=1e-5), kind


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({}, 1), ({}, 2), ({"gradient_checkpointing": True, "use_reentrant_gc": False}, 1),
        ({"finetuning_type": "freeze", "freeze_trainable_layers": 1}, 1),
        ({"finetuning_type": "lora", "lora_rank": 4, "lora_target": "all"}, 2),
    ],
    ids=["full", "two ranks", "not reentrant", "freeze", "lora"],
)  # fmt: skip
def test_a_file_with_one_more_key_trains_as_before(place, request, changes, ranks):
    """LlamaFactory checkpoints activations unless it is told otherwise, and the file says nothing of that."""
    name = request.node.callspec.id.replace(" ", "_")
    given = {"disable_gradient_checkpointing": False, "max_steps": 10, **changes}
    wanted = run(place, f"as_is_{name}", 1, None, **given)["loss"]
    given |= {"use_hyper_parallel": True, "per_device_train_batch_size": 8 // ranks}
    curve = run(place, f"one_key_{name}", ranks, None, **given)["loss"]
    assert len(curve) == 10
    assert [v for _, v in curve] == pytest.approx([v for _, v in wanted], rel=1e-6)


def test_experts_on_ranks_of_their_own_repeat_llamafactory_alone(place):
    changes = {"model_name_or_path": str(place / "experts")}
    wanted = run(place, "plain_experts", 1, None, **changes)
    for name, hyper in {
        "ep": {"ep_size": 2},
        "ep_swap": {"ep_size": 2, "activation_mode": "swap"},
    }.items():
        curves = run(place, name, 2, hyper, **changes)
        for kind in ("loss", "grad_norm"):
            assert [v for _, v in curves[kind]] == pytest.approx([v for _, v in wanted[kind]], rel=1e-5), kind


def test_the_demo_shows_equal_losses(tmp_path):
    demo = Path(__file__).parents[2] / "examples" / "llamafactory" / "demo.py"
    done = subprocess.run([sys.executable, str(demo), str(tmp_path)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line[:4].strip().isdigit()]
    assert [int(step) for step, *_ in rows] == [1, 2, 3, 4, 5]
    for _, alone, laid_out in rows:
        assert float(laid_out) == pytest.approx(float(alone), rel=1e-5)


def test_a_run_goes_on_from_its_checkpoint_on_another_number_of_ranks(place, plain):
    # Four ranks wrote the checkpoint of step 3.
    source = place / "hyper4fsdp_sizetp_size" / "checkpoint-3"
    changes = {"per_device_train_batch_size": 8, "resume_from_checkpoint": str(source)}
    curves = run(place, "resumed", 2, {"cp_size": 2}, **changes)
    wanted = [v for _, v in plain[1]["loss"]]
    assert [v for _, v in curves["loss"]] == pytest.approx(wanted, rel=1e-5)


def test_the_export_is_read_by_transformers(place):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(place / "hyper2tp_size", output_loading_info=True)
    assert not info["missing_keys"]
    assert len(AutoTokenizer.from_pretrained(place / "hyper2tp_size")) <= model.config.vocab_size


LORA = {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "all", "learning_rate": 5e-2}


def test_adapters_are_those_of_llamafactory_alone_and_are_read_by_peft(place):
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    alone = run(place, "plain_lora", 1, None, **LORA)
    mine = run(place, "lora", 4, {"tp_size": 2}, per_device_train_batch_size=4, **LORA)
    source = str(place / "lora" / "checkpoint-3")
    on = run(
        place,
        "lora_on",
        2,
        {"cp_size": 2},
        per_device_train_batch_size=8,
        resume_from_checkpoint=source,
        **LORA,
    )
    for curves in (mine, on):
        for kind in ("loss", "grad_norm"):
            assert [v for _, v in curves[kind]] == pytest.approx([v for _, v in alone[kind]], rel=1e-5), kind
    losses = [v for _, v in alone["loss"]]
    assert losses[-1] < losses[0]  # it learns
    theirs, ours = (load_file(place / d / "adapter_model.safetensors") for d in ("plain_lora", "lora"))
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert (tensor - ours[name]).abs().max() < 1e-4, name
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    assert PeftModel.from_pretrained(model, place / "lora").peft_config["default"].r == 4


@pytest.mark.parametrize(
    ("hyper", "changes", "code"),
    [
        ({"tp_sise": 2}, {}, "HP101"), ({"tp_size": 0}, {}, "HP102"), ({}, {"finetuning_type": "oft"}, "HP104"),
        ({}, {"finetuning_type": "lora", "use_dora": True}, "HP205"),
        ({"tp_size": 3}, {}, "HP301"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(place, hyper, changes, code):
    with pytest.raises(RuntimeError, match=code):
        run(place, "refused", 1, hyper, **changes)
