import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from hyper_parallel.cli.checkpoint_command import app
from hyper_parallel.errors import CheckpointCorrupt, ModelUnreadable, RunUnreadable
from hyper_parallel.runtime import launch
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from tests.trainer_checkpoint.test_checkpoint import PRINT, build, flip, saved_run
from tests.trainer_checkpoint.test_export import logits, reload
from tests.weights.models import join


def run(*words):
    result = CliRunner().invoke(app, [str(w) for w in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def run_dir(tmp_path):
    saved_run(tmp_path / "run" / "checkpoints", (1, 2))
    return tmp_path / "run"


@pytest.mark.torch
def test_list_and_verify(run_dir):
    lines = run("list", run_dir).stdout.splitlines()
    assert len(lines) == 2
    assert "complete" in lines[1]
    assert run("verify", run_dir).exit_code == 0
    flip(run_dir / "checkpoints" / "step_00000002" / "rank_00000.safetensors")
    assert "DAMAGED" not in run("list", run_dir).stdout
    result = run("verify", run_dir)
    assert result.exit_code == 1
    assert "rank_00000.safetensors" in result.stdout.splitlines()[1]
    assert "verified" in result.stdout.splitlines()[0]
    with pytest.raises(RunUnreadable):
        run("list", run_dir / "nothing")


@pytest.mark.dist
def test_export_of_a_sharded_checkpoint(tmp_path):
    def rank_fn(rank):
        join()
        model, optimizer = build(3, fsdp=2, dtype=torch.float64)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        saver = Checkpointer(tmp_path / "run" / "checkpoints", keep=1, asynchronous=True, fingerprint=PRINT)
        saver.save(5, model, optimizer, {})
        saver.finish()

    launch(rank_fn, 2, timeout_s=180)
    model, optimizer = build(3, dtype=torch.float64)
    model.config.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    with pytest.raises(RunUnreadable, match="--model"):
        run("export", tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(f"model: {{path: {tmp_path / 'hf'}}}")
    assert "step 5" in run("export", tmp_path / "run").stdout
    Checkpointer(tmp_path / "run" / "checkpoints", keep=1, asynchronous=False, fingerprint=PRINT).load(model, optimizer)
    loaded = reload(tmp_path / "run" / "export")
    assert loaded.dtype == torch.float64
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert torch.equal(logits(loaded), logits(model.eval()))
    run("export", tmp_path / "run", "--dtype", "bfloat16", "--out", tmp_path / "half")
    assert reload(tmp_path / "half").dtype == torch.bfloat16
    assert (tmp_path / "half" / "tokenizer.json").is_file()
    (tmp_path / "hf" / "config.json").rename(tmp_path / "hf" / "small.json")
    run("export", tmp_path / "run", "--model", tmp_path / "hf" / "small.json")
    assert torch.equal(reload(tmp_path / "run" / "export").lm_head.weight, model.lm_head.weight)
    assert (tmp_path / "run" / "export" / "tokenizer.json").is_file()
    with pytest.raises(CheckpointCorrupt) as caught:
        run("export", tmp_path / "run", "--step", "4", "--model", tmp_path / "hf" / "small.json")
    assert caught.value.hint == "choose one of these steps"
    with pytest.raises(ModelUnreadable):
        run("export", tmp_path / "run", "--model", tmp_path / "nowhere")


@pytest.mark.sanity
def test_the_command_module_needs_no_framework():
    code = (
        "import sys; from hyper_parallel.cli import checkpoint_command;"
        " assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": "src"})
