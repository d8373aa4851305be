"""Try every causal language model of transformers on every axis, through the command line, and say what happened.

    python tools/census.py                        all model types, into docs/census.json (an hour on 2 cores)
    python tools/census.py starcoder2 mamba       these only, printed
    python tools/census.py --axes tp,pp cohere    these axes only

Each type is shrunk by one table of sizes (`tiny`), and must train in plain transformers. A cell is a run of
`hyper-parallel train` of two steps in float64: the loss and the gradient norm of both must equal those of one rank to
1e-10. A cell is `ok`, a coded refusal, `differs` or `fails`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

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

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "model_dim"), 32),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("n_inner", "d_ff", "ffn_hidden_size", "dff", "d_inner"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(
        ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "head_dim"), 8
    ),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(
        ("embd_pdrop", "resid_pdrop", "attn_pdrop", "dropout", "attention_dropout"), 0.0
    ),
    **dict.fromkeys(
        ("hidden_dropout", "activation_dropout", "summary_first_dropout", "layerdrop"), 0.0
    ),
    **dict.fromkeys(
        ("hidden_dropout_prob", "attention_probs_dropout_prob", "hidden_dropout_rate"), 0.0
    ),
    **dict.fromkeys(
        ("attention_dropout_prob", "ffn_dropout", "emb_dropout", "drop_rate", "dropout_rate"), 0.0
    ),
    **dict.fromkeys(("residual_dropout", "router_jitter_noise", "input_jitter_noise"), 0.0),
    "encoder_layers": 2,
    "vocab_size": 320,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
    "q_lora_rank": 16,
}
"""Sizes of a tiny model, for the keys that a configuration class has."""


def tiny(name: str) -> dict[str, Any]:
    """The config of a model type, shrunk."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[name]
    keys = cls().to_dict()
    sizes = {key: value for key, value in SIZES.items() if key in keys}
    if sizes.get("kv_lora_rank"):
        # Latent attention expands its own key and value for every head.
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    config = cls(**sizes).to_dict()
    return {"model_type": name, **{k: v for k, v in config.items() if k != "transformers_version"}}


def trains_plainly(config: dict[str, Any]) -> str | None:
    """Why plain transformers does not train it on a CPU; None: it does."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), dtype=torch.float64
        )
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped products have no float64
        if sum(p.numel() for p in model.parameters()) > 4_000_000:
            return "not shrunk"
        ids = torch.arange(3, 3 + SEQ_LEN)[None]
        model(input_ids=ids, labels=ids).loss.backward()
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
    return None


def recipe(config: Path, folder: Path) -> dict[str, Any]:
    """The run of a cell."""
    return {
        "model": {"path": str(config), "init": "random"},
        "data": {
            "source": str(folder / "text"),
            "seq_len": SEQ_LEN,
            "vocab_size": 300,
            "holdout": 0.0,
        },
        "training": {"steps": 2, "dtype": "float64", "tokens_per_step": 4 * SEQ_LEN, "seed": 3},
        "checkpoint": {"export": False, "resume": "never"},
    }


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


def row(name: str, axes: list[str], folder: Path) -> dict[str, str]:
    """All cells of a model type."""
    try:
        config = tiny(name)
    except Exception as error:
        return {"plain": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"}
    if (why := trains_plainly(config)) is not None:
        return {"plain": why}
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    file = folder / "recipe.json"
    file.write_text(json.dumps(recipe(path, folder)))
    cells = {"plain": "ok"}
    want: list[dict[str, float]] = []
    for axis in dict.fromkeys(["one rank", *axes]):
        outcome, got = run_cell(file, folder, AXES[axis])
        if axis == "one rank":
            want = got
        elif outcome == "ok":
            pairs = [
                (a[k], b[k]) for a, b in zip(want, got, strict=True) for k in ("loss", "grad_norm")
            ]
            worst = max(abs(a - b) / abs(a) for a, b in pairs)
            outcome = "ok" if worst <= LIMIT else f"differs: {worst:.1e}"
        cells[axis] = outcome
        if axis == "one rank" and outcome != "ok":
            break
    return cells


def census(names: list[str], axes: list[str]) -> dict[str, dict[str, str]]:
    """Rows of model types; each in a process of its own."""
    table = {}
    with tempfile.TemporaryDirectory(prefix="census_") as scratch:
        text = Path(scratch, "text")
        text.mkdir()
        (text / "a.txt").write_text((ROOT / "LICENSE").read_text())
        for name in names:
            result = Path(scratch, "row.json")
            result.write_text(json.dumps({"plain": "fails: killed, or no end"}))
            pid = os.fork()
            if pid == 0:
                signal.alarm(60 + SECONDS * len(AXES))
                warnings.simplefilter("ignore")
                try:
                    result.write_text(json.dumps(row(name, axes, Path(scratch))))
                except BaseException:
                    traceback.print_exc()
                os._exit(0)
            os.waitpid(pid, 0)
            table[name] = json.loads(result.read_text())
            print(name, json.dumps(table[name]), flush=True)
    return table


def main() -> None:
    """Run the census and print what each axis does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--axes", default=",".join(AXES))
    given = parser.parse_args()
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    import hyper_parallel.trainer  # noqa: F401
    from hyper_parallel.runtime import launch

    launch(lambda rank: None, 1)  # imports what every run of a cell would import anew
    transformers.logging.set_verbosity_error()
    names = given.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    table = census(names, given.axes.split(","))
    plain = [r for r in table.values() if r["plain"] == "ok"]
    print(
        f"{len(plain)} of {len(table)} types train in plain transformers {version('transformers')}"
    )
    for axis in AXES:
        cells = Counter(r[axis].partition(":")[0] for r in plain if axis in r)
        print(f"{axis:14}", dict(cells.most_common()))
    if not given.types:
        page = ROOT / "docs" / "census.json"
        page.write_text(
            json.dumps({"transformers": version("transformers"), "types": table}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
