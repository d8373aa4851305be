"""A YAML file of LlamaFactory given to `hyper-parallel train`, in the form of its examples."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from hyper_parallel.config import load_recipe
from hyper_parallel.errors import Contradiction, HyperParallelError, NotServed
from hyper_parallel.integration.llamafactory import (
    HyperParallelArguments,
    clip_grad_norm_,
    fsdp2_prepare_model,
    load_llamafactory,
)
from hyper_parallel.integration.llamafactory.context_parallel import shard_inputs_for_cp
from hyper_parallel.integration.llamafactory.data import check_template
from hyper_parallel.integration.llamafactory.expert_parallel import ep_prepare_model
from hyper_parallel.integration.llamafactory.keys import REFUSED, SAME, TOGETHER, WITHOUT_EFFECT
from hyper_parallel.runtime import World, launch
from hyper_parallel.trainer.data.chat import CHATML
from tests.e2e.runs import CONFIG, assert_same_curve, command, curve

pytestmark = pytest.mark.e2e
EXAMPLE = """
### model
model_name_or_path: {root}/model
trust_remote_code: false
### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 4
lora_target: all
### dataset
dataset: chats
dataset_dir: {root}/data
template: qwen3_nothink
cutoff_len: 64
max_samples: 40
preprocessing_num_workers: 16
dataloader_num_workers: 4
### output
output_dir: {root}/out
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
### train
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-2
num_train_epochs: 1.5
lr_scheduler_type: cosine
warmup_ratio: 0.3
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
### eval
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 3
"""
OURS = """
model: {{path: {root}/model, init: pretrained}}
stage: sft
data: {{source: {root}/data/chats.json, format: alpaca, seq_len: 64, packing: false, max_records: 40, holdout: 0.1}}
training:
  {{epochs: 1.5, seed: 42, dtype: bfloat16, microbatch: 2, accumulation_steps: 4, lr: 0.01, lr_schedule: cosine,
   warmup_ratio: 0.3, min_lr_ratio: 0, weight_decay: 0, betas: [0.9, 0.999], recompute: full, eval_every: 3,
   eval_tokens: 1099511627776, log_every: 10, report_to: []}}
lora: {{r: 4, lora_alpha: 8}}
parallel: {{dp_shard: 1}}
checkpoint: {{every: 500, every_minutes: 0, keep: 1000000, resume: never}}
output_dir: {root}/ours
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    root = tmp_path_factory.mktemp("llamafactory")
    torch.manual_seed(0)
    numbers = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type")}
    Qwen3ForCausalLM(Qwen3Config(**numbers)).save_pretrained(root / "model")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["What is one? It is three."], 300, special_tokens=["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(root / "model")
    data = root / "data"
    data.mkdir()
    asked = [{"instruction": f"What is {i}?", "input": "", "output": f"It is {i}" + "!" * (i % 5)} for i in range(50)]
    (data / "chats.json").write_text(json.dumps(asked))
    (data / "texts.json").write_text(json.dumps([{"content": "one two three " * 9}] * 50))
    pairs = [{**row, "chosen": row["output"], "rejected": "No."} for row in asked]
    (data / "pairs.json").write_text(json.dumps(pairs))
    (data / "roles.json").write_text(json.dumps([{**asked[0], "system": "Be brief."}]))
    columns = {
        "prompt": "instruction",
        "query": "input",
        "chosen": "chosen",
        "rejected": "rejected",
    }
    listed = {
        "chats": {"file_name": "chats.json"},
        "texts": {"file_name": "texts.json", "columns": {"prompt": "content"}},
        "pairs": {"file_name": "pairs.json", "ranking": True, "columns": columns},
        "tagged": {"file_name": "chats.json", "columns": {"kto_tag": "label"}},
        "roles": {"file_name": "roles.json"},
        "other": {"file_name": "chats.json", "columns": {"prompt": "question"}},
        "remote": {"hf_hub_url": "a/b"},
    }
    (data / "dataset_info.json").write_text(json.dumps(listed))
    layout = {"tp_size": 2, "cp_size": 2, "activation_mode": "recompute"}
    (root / "layout.json").write_text(json.dumps(layout))
    (root / "swap.json").write_text(json.dumps({"activation_mode": "swap"}))
    (root / "lora.yaml").write_text(EXAMPLE.format(root=root))
    (root / "ours.yaml").write_text(OURS.format(root=root))
    return root


def test_the_file_trains_as_the_recipe_that_says_the_same(root):
    words = ("checkpoint.export=false", "--no-calibrate")
    command("train", str(root / "lora.yaml"), *words)
    command("train", str(root / "ours.yaml"), *words)
    assert curve(root / "out") == curve(root / "ours")
    assert len(curve(root / "out")) == 7  # 36 conversations, 1.5 times, in batches of 8
    kept = load_recipe(root / "out" / "config.yaml").recipe
    assert kept.training.warmup_steps == 3
    assert kept.lora is not None
    assert kept.lora.target_modules == "all-linear"
    assert not (root / "out" / "tensorboard").exists()


def said(root, *overrides):
    """The recipe of the file, flat."""
    recipe = load_llamafactory(root / "lora.yaml", overrides).recipe.model_dump()
    return {f"{s}.{k}": v for s, section in recipe.items() if isinstance(section, dict) for k, v in section.items()}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("stage=pt finetuning_type=full dataset=texts max_steps=7 fp16=true bf16=false max_grad_norm=0",
         {"data.source": "{root}/data/texts.json", "data.text_key": "content", "data.packing": True,
          "data.mask_documents": False, "training.steps": 7, "training.epochs": None, "training.dtype": "float16",
          "training.max_grad_norm": None}),
        ("stage=dpo dataset=pairs pref_loss=ipo pref_beta=0.3 val_size=0 eval_strategy=no",
         {"data.format": "preference", "training.microbatch": 4, "dpo.loss_type": "ipo", "dpo.beta": 0.3}),
        ("early_stopping_steps=3 metric_for_best_model=eval_loss eval_strategy=steps eval_steps=5 val_size=0.1",
         {"training.early_stopping_patience": 3, "training.eval_every": 5}),
        ("neftune_noise_alpha=5", {"training.neftune_noise_alpha": 5.0}),
        ("stage=rm dataset=pairs val_size=0 eval_strategy=no",
         {"data.format": "preference", "training.microbatch": 4, "dpo.beta": 0.1}),
        ("stage=kto dataset=tagged pref_beta=0.3 kto_rejected_weight=1.5 val_size=0 eval_strategy=no",
         {"data.format": "alpaca", "training.microbatch": 4, "kto.beta": 0.3, "kto.undesirable_weight": 1.5,
          "kto.desirable_weight": 1.0, "dpo.beta": 0.1}),
        ("finetuning_type=freeze freeze_trainable_layers=1 lr_scheduler_type=constant",
         {"training.freeze": ("model.embed_tokens.weight", "model.layers.0.*", "model.norm.weight"),
          "training.warmup_steps": 0}),
        ("neat_packing=true val_size=8 disable_gradient_checkpointing=true overwrite_output_dir=false",
         {"data.packing": True, "data.mask_documents": True, "data.holdout": 0.2, "training.recompute": "none",
          "checkpoint.resume": "auto"}),
        ("launch.nproc_per_node=4 report_to=[wandb,mlflow] train_from_scratch=true",
         {"parallel.dp_shard": 4, "training.report_to": ("wandb", "mlflow"), "model.init": "random"}),
        ("launch.nproc_per_node=4 hyper_parallel_ep_size=2 hyper_parallel_token_dispatcher=all_to_all",
         {"parallel.dp_shard": 4, "parallel.dp_replicate": 1, "parallel.ep": 2}),
        ("launch.nproc_per_node=8 hyper_parallel_ep_size=2 hyper_parallel_efsdp_size=2",
         {"parallel.dp_shard": 4, "parallel.dp_replicate": 2, "parallel.ep": 2}),
        ("launch.nproc_per_node=4 hyper_parallel_ep_size=2 hyper_parallel_efsdp_size=1",
         {"parallel.dp_shard": 2, "parallel.dp_replicate": 2, "parallel.ep": 2}),
        ("launch.nproc_per_node=8 hyper_parallel_cp_size=2 hyper_parallel_ep_size=4 hyper_parallel_efsdp_size=2",
         {"parallel.dp_shard": 4, "parallel.dp_replicate": 1, "parallel.cp": 2, "parallel.ep": 4}),
        ("launch.nproc_per_node=8 hyper_parallel_args={root}/layout.json disable_gradient_checkpointing=true",
         {"parallel.dp_shard": 2, "parallel.cp": 2, "parallel.tp_x": 2, "training.recompute": "full"}),
        ("launch.nproc_per_node=8 hyper_parallel_args={root}/layout.json hyper_parallel_cp_size=4",
         {"parallel.dp_shard": 1, "parallel.cp": 4, "parallel.tp_x": 2}),
        ("parallel.tp=2 training.lr=0.5", {"parallel.tp_x": 2, "parallel.dp_shard": 1, "training.lr": 0.5}),
    ],
)  # fmt: skip
def test_keys_mean_what_they_mean_there(root, words, wanted):
    found = said(root, *words.format(root=root).split())
    wanted = {k: v.format(root=root) if isinstance(v, str) else v for k, v in wanted.items()}
    assert {key: found[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("words", "recompute", "noted"),
    [
        ("backend=torch", "full", False),
        ("backend=mindspore", "none", True),
        ("backend=mindspore disable_gradient_checkpointing=true", "none", False),
        ("backend=mindspore gradient_checkpointing=true", "full", False),
        ("backend=mindspore hyper_parallel_args={root}/layout.json", "full", False),
        ("backend=mindspore training.recompute=full", "full", False),
    ],
)
def test_checkpointing_by_default_does_not_apply_to_mindspore(root, caplog, words, recompute, noted):
    caplog.set_level("INFO", "hyper_parallel")
    words = words.format(root=root).split()
    assert said(root, *words)["training.recompute"] == recompute
    assert ("keeps activations instead of recomputing them" in caplog.text) == noted


@pytest.mark.parametrize(
    ("override", "code", "says"),
    [
        ("lora_rnk=8", "HP101", "lora_rank"),
        (
            "quantization_bit=4",
            "HP104",
            "the LlamaFactory setting `quantization_bit` is not supported",
        ),
        ("stage=ppo", "HP102", "pt, sft, dpo, kto, rm"),
        ("do_train=false", "HP102", "do_train"),
        ("template=qwen", "HP104", "template=null"),
        ("template=llama3", "HP104", "start_header_id"),
        ("dataset=nothing", "HP101", "chats, other, pairs, remote, roles, tagged, texts"),
        ("dataset=other", "HP104", "columns.prompt"),
        ("dataset=roles", "HP104", "`system`, and no column for it"),
        ("dataset=remote", "HP104", "hf_hub_url"),
        ("learning_rate=-1", "HP102", "training.lr (from learning_rate)"),
        ("report_to=all", "HP102", "tensorboard, wandb, mlflow"),
        (
            "hyper_parallel_token_dispatcher=deredundency",
            "HP102",
            "hint: hyper_parallel_token_dispatcher=all_to_all",
        ),
        ("hyper_parallel_ep_size=0", "HP102", "ep_size"),
        ("bf16=[1", "HP102", "the value of `bf16` is not YAML"),
        ("stage=[sft]", "HP102", "pt, sft, dpo, kto, rm"),
        ("max_steps=null", "HP102", "hint: max_steps=-1"),
        ("eval_dataset=chats,texts", "HP102", "hint: eval_dataset=chats"),
        ("launch.nproc_per_node=auto", "HP102", "launch.nproc_per_node"),
        (
            "hyper_parallel_args={root}/swap.json",
            "HP104",
            'hint: {{"activation_mode": "recompute"}}',
        ),
    ],
)
def test_what_is_not_done_is_refused_by_name(root, override, code, says):
    file = root / "wrong.yaml"
    file.write_text((root / "lora.yaml").read_text() + "\nlora_rnk: 8" * override.startswith("lora_rnk"))
    with pytest.raises(HyperParallelError) as caught:
        load_llamafactory(file, [override.format(root=root)] if "rnk" not in override else [])
    assert caught.value.code == code
    assert says.format(root=root) in caught.value.render()


@pytest.mark.slow
def test_a_file_with_expert_parallel_keys_trains_as_without_them(root):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type")}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))
    model.save_pretrained(root / "experts")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (root / "model" / file).exists():
            shutil.copy(root / "model" / file, root / "experts")
    text = (root / "lora.yaml").read_text().replace("finetuning_type: lora", "finetuning_type: full")
    text = text.replace(f"{root}/model", f"{root}/experts").replace("bf16: true", "bf16: false")
    keys = {"ep_size": 2, "efsdp_size": 1, "token_dispatcher": "all_to_all"}
    given = "".join(f"hyper_parallel_{key}: {value}\n" for key, value in keys.items())
    (root / "experts.yaml").write_text(text)
    (root / "expert_parallel.yaml").write_text(text + "use_hyper_parallel: true\n" + given)
    words = ("max_steps=3", "eval_strategy=no", "checkpoint.export=false", "training.dtype=float64")
    sizes = ("per_device_train_batch_size=4", "gradient_accumulation_steps=2")
    one, two = (f"output_dir={root}/{name}" for name in ("one_rank", "two_ranks"))
    command(
        "train",
        str(root / "experts.yaml"),
        *words,
        *sizes,
        one,
        "launch.nproc_per_node=1",
        "--no-calibrate",
    )
    two = (
        two,
        "per_device_train_batch_size=2",
        "gradient_accumulation_steps=2",
        "launch.nproc_per_node=2",
    )
    command("train", str(root / "expert_parallel.yaml"), *words, *two, "--no-calibrate")
    kept = yaml.safe_load((root / "two_ranks" / "config.yaml").read_text())["parallel"]
    assert (kept["ep"], kept["dp_shard"]) == (2, 2)
    assert_same_curve(curve(root / "two_ranks"), curve(root / "one_rank"))


@pytest.mark.parametrize(
    ("finetuning", "wanted"),
    [
        ({"hyper_parallel_ep_size": 2, "hyper_parallel_efsdp_size": 1}, {"ep_size": 2, "efsdp_size": None}),
        ({"hyper_parallel_ep_size": 2, "hyper_parallel_efsdp_size": 2}, {"ep_size": 2, "efsdp_size": 2}),
        ({"hyper_parallel_args": {"cp_size": 2, "ep_size": 4}, "hyper_parallel_cp_size": 1,
          "hyper_parallel_ep_size": 2}, {"cp_size": 2, "ep_size": 2}),
        ({"hyper_parallel_token_dispatcher": "all_to_all"}, {"token_dispatcher": "all_to_all"}),
    ],
)  # fmt: skip
def test_arguments_of_llamafactory_are_read_from_its_keys_and_its_file(finetuning, wanted):
    given = HyperParallelArguments.from_finetuning_args(SimpleNamespace(**finetuning))
    assert {name: getattr(given, name) for name in wanted} == wanted


def test_a_recipe_of_its_own_is_not_taken_for_one(root):
    assert load_recipe(root / "ours.yaml").recipe.lora.r == 4


SECOND = """from hyper_parallel.integration.llamafactory import (
    HyperParallelArguments, HSDPModule, export_to_hf_format, fsdp2_prepare_model, hsdp_sync_stream, load_hsdp_model,
    load_hsdp_optimizer_and_scheduler, save_hsdp_checkpoint, wrap_optimizer_with_skip_dtensor_dispatch, clip_grad_norm_)
"""
THIRD = """from hyper_parallel.integration.llamafactory.context_parallel import (
    cp_prepare_model, get_cp_group, get_cp_group_ranks, get_cp_rank, get_dp_rank, shard_inputs_for_cp)
from hyper_parallel.platform import get_platform
from types import SimpleNamespace
cp = SimpleNamespace(cp_size=2)
assert (get_platform().get_rank(), get_platform().get_world_size()) == (5, 8)
assert (get_cp_rank(cp), get_dp_rank(cp), get_cp_group_ranks(cp)) == (1, 2, (4, 5))
"""
FOURTH = "from hyper_parallel.integration.llamafactory.expert_parallel import ep_prepare_model"


@pytest.mark.slow
def test_names_of_later_versions_need_neither_llamafactory_nor_transformers_nor_accelerate():
    absent = "import sys\nfor name in ('llamafactory', 'transformers', 'accelerate'): sys.modules[name] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", absent + SECOND + THIRD + FOURTH],
        env={**os.environ, "RANK": "5", "WORLD_SIZE": "8"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_version_that_is_newer_still_is_told_what_works():
    with pytest.raises(NotServed) as caught:
        exec("from hyper_parallel.integration.llamafactory import parallelize_model", {})
    assert "hyper-parallel train FILE.yaml" in caught.value.hint


@pytest.mark.parametrize(
    ("keys", "code", "says"),
    [
        ({"cp_sise": 2}, "HP101", "cp_size"), ({"token_dispatcher": "deredundency"}, "HP102", "all_to_all"),
        ({"ep_size": 2, "efsdp_size": 4}, "HP301", '"efsdp_size": 2'),
        ({"ep_size": 2, "efsdp_size": 1, "fsdp_size": 4}, "HP301", '"efsdp_size": 2'),
    ],
)  # fmt: skip
def test_arguments_that_are_wrong_are_refused(keys, code, says):
    with pytest.raises(HyperParallelError, match=code) as caught:
        HyperParallelArguments.from_dict(keys).strategy(4)
    assert says in str(caught.value)


def test_a_batch_that_ranks_cannot_share_is_refused():
    ids = torch.ones(2, 5, dtype=torch.long)
    padded = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    packed = torch.tensor([[1, 1, 2, 2, 2], [1, 1, 1, 2, 0]])
    labels = torch.tensor([[-100, 4, 4, 4, 4], [-100, -100, 4, -100, -100]])
    given = shard_inputs_for_cp({"input_ids": ids, "attention_mask": padded, "labels": labels}, 0, 2)
    assert given["input_ids"] is ids
    assert given["labels"] is labels
    assert "attention_mask" not in given
    assert given["num_items_in_batch"] == 5
    for wrong, words in (
        ({"pixel_values": ids}, "HP102"),
        ({"input_ids": ids, "attention_mask": padded.flip(1)}, r"HP205[\s\S]*padding_side"),
        ({"input_ids": ids, "attention_mask": packed}, r"HP205[\s\S]*neat_packing: false"),
    ):
        with pytest.raises(HyperParallelError, match=words):
            shard_inputs_for_cp(wrong, 0, 2)


def test_what_the_trainer_of_the_main_branch_may_not_ask_is_refused():
    def accelerate(version):
        plugin = SimpleNamespace(fsdp_version=version, cpu_offload=None)
        return SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), num_processes=2)

    model = torch.nn.Linear(4, 4)
    for refused, code in (
        (lambda: fsdp2_prepare_model(accelerate(1), model, HyperParallelArguments()), "HP104"),
        (lambda: fsdp2_prepare_model(accelerate(2), model, HyperParallelArguments(tp_size=2)), "HP104"),
        (lambda: ep_prepare_model(model, accelerate(2), HyperParallelArguments(ep_size=2)), "HP2"),
        (lambda: clip_grad_norm_(model.parameters(), 1.0), "HP102"),
        (lambda: clip_grad_norm_(model.parameters(), 1.0, norm_type=1), "HP102"),
    ):  # fmt: skip
        with pytest.raises(HyperParallelError, match=code):
            refused()


def test_a_buffer_on_the_meta_device_of_one_rank_is_refused_by_all_ranks():
    def rank(number):
        with World.join("cpu"):
            model = torch.nn.BatchNorm1d(2)
            if number:
                model.running_mean = model.running_mean.to("meta")
            plugin = SimpleNamespace(fsdp_version=2, cpu_offload=None, cpu_ram_efficient_loading=True)
            plugin.set_auto_wrap_policy = lambda _: None
            state = SimpleNamespace(fsdp_plugin=plugin)
            accelerator = SimpleNamespace(
                state=state, num_processes=2, device=torch.device("cpu"), mixed_precision="no"
            )
            with pytest.raises(HyperParallelError, match="meta device"):
                fsdp2_prepare_model(accelerator, model, HyperParallelArguments())

    launch(rank, 2, timeout_s=60)


def test_the_page_has_every_key():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "llamafactory.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", page, re.MULTILINE))
    for key, (target, _) in {**SAME, **TOGETHER}.items():
        assert all(f"`{name}`" in rows[key] for name in target.split(", ") if name), key
    for keys in (WITHOUT_EFFECT, REFUSED):
        assert ", ".join(f"`{key}`" for key in sorted(keys)) in " ".join(page.split())


def test_a_template_that_adds_a_system_text_is_not_that_of_llamafactory(root, tmp_path):
    shutil.copytree(root / "model", tmp_path / "model")
    check_template("chatml", str(tmp_path / "model"), "template")
    own = "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}" + CHATML
    (tmp_path / "model" / "chat_template.jinja").write_text(own)
    with pytest.raises(Contradiction, match="formats texts unlike the template `chatml`"):
        check_template("chatml", str(tmp_path / "model"), "template")
