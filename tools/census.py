"""Try every causal and every image-text language model of transformers on every axis, through the command line.

    python tools/census.py                        all model types, into docs/census.json (hours on 2 cores)
    python tools/census.py --missing --shard 0/2  half of the rows and cells that the file lacks; 1/2: the others
    python tools/census.py starcoder2 mamba       these only, printed; with --record into the file too
    python tools/census.py --axes tp,pp cohere    these axes only

Each type is shrunk by one table of sizes (`tiny`), and must train in plain transformers. A cell is a run of
`hyper-parallel train` of two steps in float64, from weights that plain transformers made and saved. On one rank the
first loss and gradient norm must equal those of plain transformers on the same tokens to 1e-10; on an axis both steps
must equal those of one rank. A cell is `ok`, a coded refusal, `differs` or `fails`. Rows are kept as they come.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

PAGE = ROOT / "docs" / "census.json"

AXES = {
    "one rank": ["parallel.dp_shard=1"],
    "dp_replicate": ["parallel.dp_replicate=2"],
    "dp_shard": ["parallel.dp_shard=2"],
    "recompute": ["training.recompute=full"],
    "pp": ["parallel.pp=2"],
    "tp": ["parallel.tp=2"],
    "cp": ["parallel.cp=2"],
    "ep": ["parallel.dp_shard=2", "parallel.ep=2"],
}
LIMIT = 1e-10
SECONDS = 90
SEQ_LEN = 32
MOST_PARAMETERS = 4_000_000

HIDDEN, LAYERS, HEADS, VOCAB = 32, 4, 4, 320
SIZES: dict[str, Any] = {
    key: value
    for keys, value in (
        ("hidden_size n_embd d_model dim emb_dim embed_dim model_dim embedding_size", HIDDEN),
        ("embedding_dim out_hidden_size vision_output_dim projector_input_dim", HIDDEN),
        ("projector_output_dim hidden_size_global backbone_hidden_size hidden_dim", HIDDEN),
        ("num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers", LAYERS),
        ("num_attention_heads n_head n_heads num_heads decoder_attention_heads", HEADS),
        ("encoder_attention_heads swa_num_attention_heads linear_num_heads index_n_heads", HEADS),
        ("num_key_value_heads num_kv_heads swa_num_key_value_heads depth", 2),
        ("intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner d_ff dff", 48),
        ("ffn_hidden_size d_inner dim_ff intermediate_size_mlp mlp_dim lru_width", 48),
        ("max_position_embeddings n_positions n_ctx max_seq_len model_max_length", 128),
        ("num_experts num_local_experts n_routed_experts", 4),
        ("moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size", 24),
        ("shared_experts_intermediate_size shared_intermediate_size", 24),
        ("qk_rope_head_dim qk_nope_head_dim v_head_dim kv_lora_rank head_dim dim_head", 8),
        ("swa_head_dim linear_head_dim index_head_dim laurel_rank d_rel", 8),
        ("hidden_size_per_layer_input mamba_d_state mamba_d_ssm ssm_state_size", 8),
        ("n_group topk_group first_k_dense_replace n_shared_experts num_expert_group", 1),
        ("num_experts_per_tok num_experts_per_token moe_topk moe_top_k zero_expert_num", 2),
        ("q_lora_rank image_size rel_extent mamba_chunk_size chunk_size", 16),
        ("mamba_dt_rank patch_size index_topk rotary_dim", 4),
        ("vocab_size vocab_size_per_layer_input encoder_hash_byte_group_vocab", VOCAB),
        ("embd_pdrop resid_pdrop attn_pdrop emb_pdrop dropout attention_dropout", 0.0),
        ("hidden_dropout activation_dropout summary_first_dropout layerdrop drop_rate", 0.0),
        ("hidden_dropout_prob attention_probs_dropout_prob hidden_dropout_rate", 0.0),
        ("attention_dropout_prob ffn_dropout emb_dropout dropout_rate dropout_p", 0.0),
        ("residual_dropout resid_dropout embed_dropout drop_path_rate", 0.0),
        ("router_jitter_noise input_jitter_noise decoder_layerdrop encoder_layerdrop", 0.0),
        ("pad_token_id num_kv_shared_layers", 0),
        ("bos_token_id", 1),
        ("eos_token_id", 2),
    )
    for key in keys.split()
}
"""Sizes of a tiny model, for the keys that a configuration class has, in its parts too."""

PAIRS = ["linear_attention", "hybrid"] * 2
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
DOTS3 = {
    "head_dim": 16,
    "layer_types": ["indexed_attention", "sliding_attention"] * 2,
    "mlp_layer_types": ["dense", "sparse"] * 2,
    "per_layer_config": {i: {"num_attention_heads": 2, "num_key_value_heads": 2} for i in (1, 3)},
}
QWEN4 = {
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16},
    **{"indexer_compress_ratio": 4, "hc_lowrank": 8, "ple_embed_dim": 32},
    **{"ngram_vocab_size_base": 64, "make_ngram_vocab_size_divisible_by": 8},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
MROPE = {
    "text_config": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 1, 1],
        }
    }
}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "glm4v", "glm46v", "glm_ocr", "glmga"), MROPE),
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_top_k": 2},
    },
    "dots3_note_text": DOTS3,
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "n_groups": 2, "state_size": 8},
    "phi4_multimodal": {
        "vision_config": {"crop_size": 16},
        "audio_config": {
            **{"num_blocks": 2, "ext_pw_out_channel": 32, "nemo_conv_channels": 32},
            **{"depthwise_separable_out_channel": 32, "bias_max_distance": 16, "input_size": 16},
            "nemo_final_size": 2,
        },
    },
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "reformer": {
        **{"is_decoder": True, "attn_layers": ["local"] * LAYERS, "axial_pos_shape": [4, 8]},
        **{"axial_pos_embds_dim": [16, 16], "attention_head_size": 8, "feed_forward_size": 48},
        **{
            "local_attn_chunk_length": 8,
            "max_position_embeddings": SEQ_LEN,
            "local_attention_probs_dropout_prob": 0.0,
        },
    },
    "roc_bert": {
        **{"pronunciation_embed_dim": 16, "pronunciation_vocab_size": 32},
        **{"shape_embed_dim": 16, "shape_vocab_size": 32},
    },
    "xlstm": {"num_blocks": LAYERS},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": PAIRS, "attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {
        **{"layers_block_type": PAIRS, "hybrid_layer_ids": [1, 3], "attention_hidden_size": 64},
        **{"attention_head_dim": 16, "mamba_headdim": 8, "adapter_rank": 8},
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
"""What a model type needs besides: sizes that must fit each other, patterns as long as the layers."""


def tiny(name: str) -> dict[str, Any]:
    """The config of a model type, shrunk."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = shrunk(CONFIG_MAPPING[name], OWN.get(name, {}), itertools.count(302)).to_dict()
    return {"model_type": name, **{k: v for k, v in config.items() if k != "transformers_version"}}


def shrunk(cls: type[Any], own: dict[str, Any], unused: Iterator[int], base: Any = None) -> Any:
    """A config of a class with small sizes, its parts (text, vision, audio) shrunk likewise.

    Args:
        cls: The configuration class.
        own: Values that it needs besides `SIZES`; for a part: a dict of them.
        unused: Tokens that no text has, for images and the like.
        base: The class with its own values.
    """
    if base is None:
        try:
            base = cls()
        except Exception:  # a class whose own values are none that it takes
            base = cls(**own)
    sizes = dict(own)
    for key, value in base.to_dict().items():
        if key in SIZES and key not in own:
            whole = isinstance(value, int)  # strict classes take no float there
            sizes[key] = int(SIZES[key]) if whole else SIZES[key]
            if isinstance(value, list) and key in ("patch_size", "moe_intermediate_size"):
                sizes[key] = [SIZES[key]] * len(value)
        elif re.search(r"_token(_id|_index)?$", key) and isinstance(value, int) and value > 2:
            sizes[key] = next(unused)
    if sizes.get("kv_lora_rank"):
        # Latent attention expands its own key and value for every head.
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    rope = base.to_dict().get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        # Sections of the positions of time, height and width add up to half of what is rotated.
        half = (
            int((sizes.get("head_dim") or HIDDEN // HEADS) * rope.get("partial_rotary_factor", 1))
            // 2
        )
        sizes["rope_parameters"] = {
            **rope,
            "mrope_section": [half - 2 * (half // 3)] + 2 * [half // 3],
        }
    for key in cls.sub_configs:
        if (part := getattr(base, key, None)) is not None:
            sizes[key] = shrunk(type(part), own.get(key, {}), unused, part).to_dict()
    return cls(**sizes)


def auto_class(name: str) -> Any:
    """The class of transformers that makes a model of this type."""
    import transformers

    causal = name in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return transformers.AutoModelForCausalLM if causal else transformers.AutoModelForImageTextToText


def trains_plainly(config: dict[str, Any]) -> str | None:
    """Why plain transformers does not train it on a CPU; None: it does."""
    import torch
    from transformers import AutoConfig

    try:
        made, auto = AutoConfig.for_model(**config), auto_class(config["model_type"])
        with torch.device("meta"):
            size = sum(p.numel() for p in auto.from_config(made).parameters())
        if size > MOST_PARAMETERS:
            return f"not shrunk: {size} parameters"
        model = auto.from_config(made)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped products want rows of 16 bytes
        ids = torch.arange(3, 3 + SEQ_LEN)[None]
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    except Exception as error:
        return one_line(error)
    return None


def one_line(error: BaseException) -> str:
    """Class and first line of an error."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or [''])[-1 if 'StrictData' in type(error).__name__ else 0].strip()[:120]}"


def recipe(weights: Path, folder: Path) -> dict[str, Any]:
    """The run of a cell."""
    return {
        "model": {"path": str(weights), "init": "pretrained"},
        "data": {
            "source": str(folder / "text"),
            "seq_len": SEQ_LEN,
            "tokenizer": str(folder / "tokenizer"),
            "holdout": 0.0,
        },
        "training": {"steps": 2, "dtype": "float64", "tokens_per_step": 4 * SEQ_LEN, "seed": 3},
        "checkpoint": {"export": False, "resume": "never"},
    }


def save_plain(config: dict[str, Any], weights: Path) -> Any:
    """A model of plain transformers in float64, saved with its random weights."""
    import torch
    from transformers import AutoConfig

    torch.manual_seed(3)
    made = AutoConfig.for_model(**config)
    model = auto_class(config["model_type"]).from_config(made, dtype=torch.float64).train()
    model.save_pretrained(weights)
    return model


def plain_step(model: Any, file: Path) -> dict[str, float]:
    """Loss and gradient norm of the first step, by transformers alone, on the tokens that the run reads.

    The loss is the mean cross entropy of the next token, and the balance loss where the model's own forward adds it.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from hyper_parallel.backends.torch._forward import keep_float64
    from hyper_parallel.config import load_recipe
    from hyper_parallel.trainer._job import prepare_job

    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products have no float64
    keep_float64(model)
    job = prepare_job(load_recipe(file, AXES["one rank"]), progress=False)
    batches = job.train_batches()
    size = job.plan.workload.microbatch or 1
    rounds = batches.sequences_per_step // size
    valid, total = batches.num_valid(0), 0.0
    for part in batches.microbatches(0, 0, 1, size, rounds):
        ids, targets = torch.from_numpy(part.input_ids), torch.from_numpy(part.shift_labels)
        out = model(input_ids=ids, use_cache=False)
        loss = cross_entropy(out.logits.flatten(0, 1), targets.flatten(), reduction="sum") / valid
        if getattr(out, "aux_loss", None) is not None:
            text = model.config.get_text_config()
            loss = (
                loss
                + balance_coefficient(text) * out.aux_loss * int((targets != -100).sum()) / valid
            )
        loss.backward()
        total += float(loss.detach())
    grads = [p.grad.double() for p in model.parameters() if p.grad is not None]
    return {"loss": total, "grad_norm": float(sum(g.square().sum() for g in grads)) ** 0.5}


def balance_coefficient(config: Any) -> float:
    """Weight of the balance loss, by the names that configs have for it."""
    names = ("router_aux_loss_coef", "aux_loss_coef")
    return next((getattr(config, n) for n in names if hasattr(config, n)), 0.0)


def run_cell(file: Path, folder: Path, changes: list[str]) -> tuple[str, list[dict[str, float]]]:
    """One run of the command: its outcome, and its metrics."""
    from hyper_parallel.cli import main

    out = folder / "run"
    log = folder / "log"
    (out / "metrics.jsonl").unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        sys.argv = [
            "hyper-parallel",
            "train",
            str(file),
            *changes,
            f"output_dir={out}",
            "--no-calibrate",
        ]
        status = 70
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    status = wait(pid)
    text = log.read_text(errors="replace")
    if status == 0:
        lines = (out / "metrics.jsonl").read_text().splitlines()
        return "ok", [json.loads(line) for line in lines]
    code = re.search(r"error\[(HP\d+)\]: (.*)", text)
    if status is None:
        return f"fails: no end after {SECONDS} s", []
    if code and code[1] not in ("HP601", "HP206"):
        return f"{code[1]}: {code[2]}", []
    last = [
        line for line in text.splitlines() if re.match(r"^\S*(Error|Exception)\b", line.strip())
    ]
    return f"fails: {(last or text.splitlines() or ['?'])[-1].strip()[:200]}", []


def wait(pid: int) -> int | None:
    """Exit status of a child; None when it was ended for taking too long."""
    begin = time.monotonic()
    while time.monotonic() - begin < SECONDS:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def worst(a: dict[str, float], b: dict[str, float]) -> float:
    """Largest relative difference of loss and gradient norm."""
    return max(abs(a[k] - b[k]) / max(abs(a[k]), 1e-300) for k in ("loss", "grad_norm"))


def row(name: str, axes: list[str], folder: Path) -> dict[str, str]:
    """All cells of a model type."""
    try:
        config = tiny(name)
    except Exception as error:
        return {"plain": one_line(error)}
    if (why := trains_plainly(config)) is not None:
        return {"plain": why}
    weights, file = folder / "weights", folder / "recipe.json"
    shutil.rmtree(weights, ignore_errors=True)
    model = save_plain(config, weights)
    file.write_text(json.dumps(recipe(weights, folder)))
    cells = {"plain": "ok"}
    want: list[dict[str, float]] = []
    for axis in dict.fromkeys(["one rank", *axes]):
        outcome, got = run_cell(file, folder, AXES[axis])
        if outcome == "ok":
            if axis == "one rank":
                pairs = [(plain_step(model, file), got[0])]
                want = got
            else:
                pairs = list(zip(want, got, strict=True))
            off = max(worst(a, b) for a, b in pairs)
            outcome = "ok" if off <= LIMIT else f"differs: {off:.1e}"
        cells[axis] = outcome
        if not want:
            break
    return cells


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of fewer tokens than the models have, as transformers loads it."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([(ROOT / "LICENSE").read_text()], 300, special_tokens=["<|end|>"])
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|end|>").save_pretrained(
        folder
    )


def census(names: list[str], axes: list[str], keep: Callable[[str, dict[str, str]], None]) -> None:
    """Rows of model types, each in a process of its own, given to `keep` as they come."""
    with tempfile.TemporaryDirectory(prefix="census_") as scratch:
        text = Path(scratch, "text")
        text.mkdir()
        (text / "a.txt").write_text((ROOT / "LICENSE").read_text())
        write_tokenizer(Path(scratch, "tokenizer"))
        for name in names:
            result = Path(scratch, "row.json")
            result.write_text(json.dumps({"plain": "ok", "one rank": "fails: killed, or no end"}))
            pid = os.fork()
            if pid == 0:
                signal.alarm(60 + SECONDS * len(AXES))
                warnings.simplefilter("ignore")
                try:
                    cells = row(name, axes, Path(scratch))
                except BaseException as error:
                    traceback.print_exc()
                    cells = {"plain": "ok", "one rank": f"fails: {one_line(error)}"}
                result.write_text(json.dumps(cells))
                os._exit(0)
            os.waitpid(pid, 0)
            cells = json.loads(result.read_text())
            print(name, json.dumps(cells), flush=True)
            keep(name, cells)


def record(name: str, cells: dict[str, str]) -> None:
    """Put the cells of a row into the page's file, beside those that other processes put there."""
    with PAGE.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        page = json.loads(file.read() or '{"types": {}}')
        page.update({package: version(package) for package in ("torch", "transformers")})
        page["image_text"] = sorted(all_types(images=True))
        old = page["types"].get(name, {})
        page["types"][name] = {**old, **cells} if cells.get("one rank") == "ok" else cells
        page["types"] = dict(sorted(page["types"].items()))
        file.truncate(0)
        file.write(json.dumps(page, indent=1) + "\n")


def has_row(name: str, axes: list[str]) -> bool:
    """Whether the page's file has all that can be said of a type."""
    rows = json.loads(PAGE.read_text())["types"] if PAGE.exists() else {}
    cells = rows.get(name)
    if cells is None:
        return False
    return cells.get("one rank") != "ok" or all(axis in cells for axis in axes)


def all_types(images: bool = False) -> set[str]:
    """Model types of transformers that are language models; `images`: those that are no causal language models."""
    from transformers.models.auto import modeling_auto as auto

    causal = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    both = causal.union(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return both - causal if images else both


def main() -> None:
    """Run the census and print what each axis does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--axes", default=",".join(AXES))
    parser.add_argument("--missing", action="store_true", help="only rows that the file lacks")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th type, from the i-th on")
    parser.add_argument("--record", action="store_true", help="keep rows of named types too")
    given = parser.parse_args()
    import transformers

    import hyper_parallel.trainer  # noqa: F401
    from hyper_parallel.runtime import launch

    launch(lambda rank: None, 1)  # imports what every run of a cell would import anew
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    axes = given.axes.split(",")
    part, parts = map(int, given.shard.split("/"))
    names = (given.types or sorted(all_types()))[part::parts]
    if given.missing:
        names = [name for name in names if not has_row(name, axes)]
    keep = record if given.record or not given.types else (lambda name, cells: None)
    table: dict[str, dict[str, str]] = {}
    census(names, axes, lambda name, cells: (table.__setitem__(name, cells), keep(name, cells))[1])
    plain = [r for r in table.values() if r["plain"] == "ok"]
    print(
        f"{len(plain)} of {len(table)} types train in plain transformers {version('transformers')}"
    )
    for axis in AXES:
        cells = Counter(r[axis].partition(":")[0] for r in plain if axis in r)
        print(f"{axis:14}", dict(cells.most_common()))


if __name__ == "__main__":
    main()
