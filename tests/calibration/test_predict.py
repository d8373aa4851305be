"""Predictions of a CSV of runs: columns, gaps, bad rows; and fitting that finds constants again."""

from __future__ import annotations

import csv
import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hyper_parallel.calibration import (
    Cards,
    Constant,
    RowError,
    fit_runs,
    predict,
    predict_file,
    read_cards,
    read_run,
    write_card,
)
from hyper_parallel.calibration.card_fit import coverage, half_width, read_runs
from hyper_parallel.cli import application
from hyper_parallel.cost import card_names, load_card, read_card
from hyper_parallel.errors import CardUnreadable, RunsUnreadable
from hyper_parallel.model import load_model

pytestmark = pytest.mark.unit

SOURCES = Path(__file__).resolve().parents[2] / "src"
COLUMNS = (
    "id", "model", "arch", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "gated", "vocab", "seq",
    "experts", "topk", "moe_ffn", "shared_experts", "dense_layers", "device", "peak_tflops", "n_dev", "tp", "cp", "pp",
    "vpp", "ep", "etp", "dp", "zero", "mbs", "gbs", "precision", "recompute", "step_s", "tok_s_dev", "mem_gib",
    "stack", "source", "notes", "group",
)  # fmt: skip
LLAMA_8B = {
    "model": "Llama3-8B", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14336,
    "gated": 1, "vocab": 128256, "seq": 8192, "device": "H100", "peak_tflops": 989, "n_dev": 16, "tp": 2, "zero": 1,
    "mbs": 1, "gbs": 128, "precision": "bf16", "stack": "NeMo", "group": "8b",
}  # fmt: skip


def row(**changes):
    return {k: str(v) for k, v in (LLAMA_8B | changes).items()}


def write(path, *rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_becomes_the_model_it_names():
    run = read_run(row())
    model = load_model("llama-3-8b")
    assert run.model.num_matmul_params == model.num_matmul_params
    assert run.degrees == {"tp": 2, "cp": 1, "pp": 1, "vpp": 1, "ep": 1, "etp": 2, "dp": 8}
    assert run.accumulation == 16
    assert any(a.startswith("dp=8: derived") for a in run.assumptions)
    qwen = {"layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4, "ffn": 6144, "vocab": 151936, "experts": 128,
            "topk": 8, "moe_ffn": 768, "tp": 1, "ep": 8, "model": "Qwen3-30B-A3B"}  # fmt: skip
    assert read_run(row(**qwen)).model.num_matmul_params == load_model("qwen3-30b-a3b").num_matmul_params
    deepseek = {"layers": 61, "hidden": 7168, "heads": 128, "kv_heads": 128, "ffn": 18432, "vocab": 129280, "tp": 1,
                "experts": 256, "topk": 8, "moe_ffn": 2048, "shared_experts": 1, "dense_layers": 3, "ep": 8,
                "model": "DeepSeek-V3"}  # fmt: skip
    run = read_run(row(**deepseek))
    assert run.model.num_matmul_params == load_model("deepseek-v3").num_matmul_params
    assert any("MLA" in a for a in run.assumptions)
    assert read_run(row(model="gpt-oss-20b")).kind == "dense"


def test_rows_with_more_cells_than_columns_are_neither_predicted_nor_fitted(tmp_path):
    source, output = tmp_path / "runs.csv", tmp_path / "out.csv"
    write(source, row(id=1, step_s=3.5), row(id=2, step_s=3.5))
    lines = source.read_text().splitlines()
    source.write_text("\n".join([*lines[:2], lines[2].replace("Llama3-8B", "Llama3,8B")]) + "\n")
    assert [run.row.id for run in read_runs(source)] == ["1"]
    assert predict_file(source, output) == (1, 2)
    assert "more cells" in read(output)[1]["assumptions"]


def test_file_with_gaps_bad_rows_and_measured_values(tmp_path):
    source, output = tmp_path / "runs.csv", tmp_path / "out.csv"
    write(
        source,
        row(id=1),
        row(id=2, step_s=3.5),
        row(id=3, n_dev=15),
        row(id=4, layers="many"),
        row(id=5, device="XPU-9", peak_tflops=1000, recompute="full", tok_s_dev=9000),
        {"id": "6"},
    )
    result = CliRunner().invoke(application(), ["predict", str(source), "-o", str(output)])
    assert result.exit_code == 0, result.output
    rows = read(output)
    assert [r["id"] for r in rows] == list("123456")
    one, two, three, four, five, six = rows
    assert float(one["step_s"]) == float(one["predicted_step_s"]) > 0
    assert float(one["tok_s_dev"]) == float(one["predicted_tok_s_dev"])
    tokens = 128 * 8192 / float(one["step_s"]) / 16
    assert float(one["tok_s_dev"]) == pytest.approx(tokens, rel=1e-4)
    assert float(one["interval_low_s"]) < float(one["step_s"]) < float(one["interval_high_s"])
    terms = [float(v) for k, v in one.items() if k.startswith("term: ")]
    assert sum(terms) == pytest.approx(float(one["predicted_step_s"]), rel=1e-4)
    assert "recompute=none: not stated" in one["assumptions"]
    # A measured value stays, the prediction stands beside it.
    assert two["step_s"] == "3.5"
    assert two["predicted_step_s"] == one["predicted_step_s"]
    assert "does not divide n_dev = 15" in three["assumptions"]
    assert three["step_s"] == ""
    assert "`layers` is not a whole number" in four["assumptions"]
    assert "device `XPU-9` is not known" in five["assumptions"]
    assert five["tok_s_dev"] == "9000"
    assert float(five["step_s"]) > float(one["step_s"])
    assert "missing: " in six["assumptions"]


def test_a_plain_feed_forward_part_is_half_of_a_gated_ones_input_whatever_the_attention():
    moe = {"model": "DeepSeek-V3", "hidden": 7168, "experts": 8, "topk": 2, "moe_ffn": 512, "tp": 1}
    gated, plain = (read_run(row(**moe, gated=g)).model for g in (1, 0))
    assert gated.num_params - plain.num_params == 32 * 8 * 512 * 7168


def predicted(changes):
    return predict(read_run(row(**changes)))


def test_cells_as_people_write_them():
    """The same run told in other words has the same price, and every assumption is told."""
    plain = predicted({"zero": 3, "gbs": 128, "precision": "bf16"})
    for words in (
        {"zero": "ZeRO-3", "precision": "BFloat16", "layers": "32.0", "dp": "n/a", "step_s": "NaN"},
        {"zero": "FSDP", "precision": "bf16-mixed", "gbs": "1,048,576", "mem_gib": "OOM", "gated": "yes"},
    ):  # fmt: skip
        assert predicted({"zero": 3} | words).step_s == plain.step_s
    told = predicted({"gbs": "1,048,576", "mem_gib": "OOM", "ep": 8, "vpp": 4, "recompute": "block"})
    text = "; ".join(told.assumptions)
    for part in ("gbs=128: 1048576 are taken to be tokens", "`OOM` is no positive number", "ep=1", "vpp=1",
                 "recompute: `block` is not known"):  # fmt: skip
        assert part in text
    assert predicted({"precision": "fp8-mx"}).run.matmul_dtype == "mxfp8"
    assert predicted({"recompute": "selective?"}).run.recompute == "selective"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layers": "nan"}, "missing: `layers`"), ({"seq": "8k"}, "`seq` is not a whole number: 8k"),
        ({"mbs": "3,5"}, "`mbs` is not a whole number: 3,5"), ({"tp": "-2"}, "`tp` is not a whole number"),
        ({"layers": "1e30"}, "more than the maximum"), ({"zero": "4"}, "not a ZeRO stage"),
        ({"pp": 64, "n_dev": 128}, "pp = 64 is more"),
        ({"device": "XPU-9", "peak_tflops": ""}, "`peak_tflops` is blank"),
        ({"peak_tflops": "989e12"}, "not 1 to 100000 TFLOP/s"),
        ({"experts": 8, "topk": 9}, "topk = 9"), ({"experts": 8, "tp": 1, "ep": 16}, "ep = 16"),
        ({"hidden": 16, "head_dim": ""}, "hidden = 16 is below"),
        ({"experts": 8, "ffn": 0}, "missing: `moe_ffn`"),
    ],
)  # fmt: skip
def test_rows_that_ask_for_the_impossible_say_so(changes, why):
    with pytest.raises(RowError, match=why):
        predicted(changes)


def test_a_model_without_a_shape_is_looked_up_by_its_name():
    shape = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
    named = read_run(row(**dict.fromkeys(shape, "")))
    assert named.model.num_matmul_params == load_model("llama-3-8b").num_matmul_params
    with pytest.raises(RowError, match="`layers`, `hidden`, `heads`"):
        read_run(row(model="Nobody-9B", **dict.fromkeys(shape, "")))


def test_files_of_other_programs(tmp_path):
    """Byte-order mark, CRLF, semicolons, columns in another case or unknown, and rows that are too long."""
    source, output = tmp_path / "runs.csv", tmp_path / "out.csv"
    columns = [*LLAMA_8B, "remark"]
    cells = ";".join([*row().values(), "hello"])
    text = "\r\n".join([";".join(c.capitalize() for c in columns), cells, cells + ";1;2", ""])
    source.write_text(text, encoding="utf-8-sig", newline="")
    assert predict_file(source, output) == (1, 2)
    one, two = read(output)
    assert float(one["predicted_step_s"]) == pytest.approx(predicted({}).step_s, rel=1e-4)
    assert one["Remark"] == "hello"
    assert "more cells than the header" in two["assumptions"]
    source.write_text("id,layers,hidden,heads,seq,device,n_dev,tp,tp\n")
    with pytest.raises(RunsUnreadable, match="`tp` twice"):
        predict_file(source, output)


def test_a_defect_stops_the_command_and_names_the_row(tmp_path):
    """Cards with an impossible number stand for a defect: nothing is answered in the row."""
    source = tmp_path / "runs.csv"
    write(source, row(id=7))
    h100 = dataclasses.replace(read_cards().device["h100"], saturation="fast")
    with pytest.raises(TypeError) as failure:
        predict_file(source, tmp_path / "out.csv", Cards({"h100": h100}, {}))
    assert "row 1 of" in failure.value.__notes__[0]
    assert "id 7" in failure.value.__notes__[0]
    assert not (tmp_path / "out.csv").exists()


def test_predicting_imports_no_framework(tmp_path):
    write(tmp_path / "runs.csv", row(id=1))
    code = (
        "import sys; from hyper_parallel.calibration import predict_file; "
        f"predict_file({str(tmp_path / 'runs.csv')!r}, {str(tmp_path / 'out.csv')!r}); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(SOURCES)})
    assert read(tmp_path / "out.csv")[0]["predicted_step_s"]


def test_nothing_to_predict_is_an_error(tmp_path):
    source = tmp_path / "runs.csv"
    write(source, row(n_dev=15))
    with pytest.raises(RunsUnreadable, match="HP314"):
        predict_file(source, tmp_path / "out.csv")
    assert "does not divide" in read(tmp_path / "out.csv")[0]["assumptions"]
    source.write_text("id,model\n1,a\n")
    with pytest.raises(RunsUnreadable, match="lacks the columns"):
        predict_file(source, tmp_path / "out.csv")


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"recompute": "full"}, True), ({"stack": "torchtitan", "notes": "eager"}, True), ({"precision": "fp8"}, False),
        ({"device": "GB200", "peak_tflops": 2450}, False), ({"gbs": 256}, True), ({"pp": 4, "gbs": 128, "tp": 1}, None),
    ],
)  # fmt: skip
def test_what_makes_a_step_longer(changes, more):
    base, other = predict(read_run(row())), predict(read_run(row(**changes)))
    assert other.step_s > 0
    if more is not None:
        assert (other.step_s > base.step_s) == more


def test_recomputation_that_is_not_stated_follows_the_memory():
    small = predict(read_run(row(mbs=1)))
    large = predict(read_run(row(mbs=8, tp=1, n_dev=8)))
    assert any(a.startswith("recompute=none") for a in small.assumptions)
    assert any(a.startswith("recompute=selective") for a in large.assumptions)


def test_shipped_cards_have_a_source_on_every_number(tmp_path):
    for name in card_names():
        for card in load_card(name):
            if card is None:
                continue
            assert all(len(source) > 3 for source in card.sources.values())
            assert set(card.priors) <= set(card.sources)
        device, stack = load_card(name)
        write_card(tmp_path / f"{name}.yaml", device, stack, name)
        again = read_card(tmp_path / f"{name}.yaml")
        for old, new in zip((device, stack), again, strict=True):
            if old is not None:
                told = {f.name: getattr(new, f.name) for f in dataclasses.fields(new)}
                for f in dataclasses.fields(old):
                    value = getattr(old, f.name)
                    assert told[f.name] == (
                        pytest.approx(value, rel=1e-3) if isinstance(value, float) else value
                    ) or f.name in ("matmul", "attention", "quantize_bytes", "interval", "priors")


def test_unknown_numbers_of_a_card_are_refused(tmp_path):
    path = tmp_path / "card.yaml"
    path.write_text("name: x\nstack:\n  speed: {value: 2, source: guess}\n")
    with pytest.raises(CardUnreadable, match="HP313"):
        read_card(path)
    path.write_text("name: x\ndevice:\n  saturation: {value: 2, source: guess}\n")
    with pytest.raises(CardUnreadable, match="lacks the keys"):
        read_card(path)
    with pytest.raises(CardUnreadable, match="the folder has no card"):
        read_cards(tmp_path / "absent")


def test_a_fit_without_measured_runs_is_refused():
    with pytest.raises(RunsUnreadable, match="measured step time"):
        fit_runs([read_run(row(step_s="", tok_s_dev=""))], read_cards())


def test_fitting_finds_known_constants_again():
    """Runs made with changed constants; shape and layout tell them apart."""
    shipped = read_cards()
    true = {"matmul.bfloat16": 0.9, "attention": 0.85, "link": 1.15}
    h100 = shipped.device["h100"]
    changed = dataclasses.replace(
        h100,
        matmul={**h100.matmul, "bfloat16": h100.matmul["bfloat16"] * 0.9},
        attention={k: v * 0.85 for k, v in h100.attention.items()},
        link=h100.link * 1.15,
        priors={},
    )
    base = dataclasses.replace(h100, priors={})
    made = Cards({**shipped.device, "h100": changed}, shipped.stack)
    start = Cards({**shipped.device, "h100": base}, shipped.stack)
    runs = []
    for i, layout in enumerate(
        [{"tp": 1}, {"tp": 2}, {"tp": 8}, {"tp": 4, "seq": 32768}, {"tp": 1, "cp": 4, "seq": 65536},
         {"tp": 8, "seq": 2048}, {"tp": 8, "hidden": 8192, "heads": 64, "ffn": 28672}]
    ):  # fmt: skip
        blank = row(stack="Megatron-LM 0.9", recompute="none", group=f"g{i}", **layout)
        seconds = predict(read_run(blank), made).step_s
        runs.append(read_run({**blank, "step_s": repr(seconds)}))
    constants = tuple(Constant(name, 1.0, ("h100",), (name,)) for name in true)
    believed = Cards({**start.device}, {k: dataclasses.replace(v, priors={}) for k, v in start.stack.items()})
    made_again = fit_runs(runs, believed, constants=constants)
    for name, factor in true.items():
        assert math.exp(made_again.factors[name]) == pytest.approx(factor, rel=0.02), name
    assert np.abs(made_again.after).max() < 2e-3
    assert np.abs(made_again.before).max() > 0.03


def test_intervals_hold_the_share_they_promise():
    """Residuals of 40 models with 3 runs each: the width made without a model holds 80 % of it, not all."""
    rng = np.random.default_rng(0)
    folds = np.repeat([f"model {i}" for i in range(40)], 3)
    residual, weights = rng.normal(0.0, 0.1, 120), np.full(120, 1.0 / 3.0)
    assert half_width(residual, weights, folds) == pytest.approx(0.1 * 1.29, rel=0.2)
    assert 0.72 < coverage(residual, weights, folds) < 0.9
    # One fold far off is outside the interval of the others; of a single fold nothing may be left out.
    residual[:3] = 5.0
    assert coverage(residual, weights, folds) < 1.0 - 1.0 / 40.0 + 1e-9
    assert half_width(residual[:6], weights[:6], folds[:1].repeat(6)) == 5.0


def test_expert_layers_of_a_young_generation_get_faster_by_release():
    qwen = {"layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4, "ffn": 6144, "vocab": 151936, "experts": 128,
            "topk": 8, "moe_ffn": 768, "tp": 1, "ep": 8, "seq": 4096, "n_dev": 8, "precision": "fp8"}  # fmt: skip

    def growth(device, peak):
        old, new = (
            predicted(
                {
                    **qwen,
                    "device": device,
                    "peak_tflops": peak,
                    "stack": f"Megatron-Bridge {release}",
                }
            ).step_s
            for release in ("25.09", "26.06")
        )
        return old / new - 1.0

    assert growth("B200", 2250) > 2.0 * growth("H100", 989) > 0.0


def test_an_unknown_stack_widens_the_interval():
    known, unknown = predicted({"stack": "NeMo 25.01"}), predicted({"stack": "Homegrown 1.0"})
    assert unknown.half_width > known.half_width
    assert any("`Homegrown 1.0` is not known" in a for a in unknown.assumptions)
    low, high = (float(unknown.columns()[f"interval_{end}_s"]) for end in ("low", "high"))
    assert math.log(high / low) == pytest.approx(2.0 * unknown.half_width, rel=1e-4)


GPT_OSS = {"model": "GPT-OSS-120B", "layers": 36, "hidden": 2880, "heads": 64, "kv_heads": 8, "head_dim": 64,
           "ffn": 2880, "vocab": 201088, "seq": 4096, "experts": 128, "topk": 4, "moe_ffn": 2880, "tp": 1, "ep": 8,
           "n_dev": 64, "gbs": 1280, "mbs": 4, "stack": "Megatron-Bridge 26.06"}  # fmt: skip


@pytest.mark.parametrize(
    ("number", "dense", "other_experts"),
    [("bias_passes", False, False), ("expert_rows", False, True)],
)
def test_biases_and_ragged_experts_take_time_where_a_model_has_them(number, dense, other_experts):
    stack = read_cards().stack["megatron-bridge"]
    none = Cards({}, {stack.name: dataclasses.replace(stack, **{number: 0.0})})
    qwen = GPT_OSS | {"model": "Qwen3-120B"}
    llama = {"stack": "Megatron-Bridge 26.06"}
    for changes, grows in ((GPT_OSS, True), (qwen, other_experts), (llama, dense)):
        run = read_run(row(**changes))
        assert (predict(run).step_s > predict(run, none).step_s) == grows


def test_only_older_releases_pay_for_every_copy_of_a_token():
    stack = read_cards().stack["megatron-bridge"]
    none = Cards({}, {stack.name: dataclasses.replace(stack, moe_copy_s=0.0)})
    for release, grows in (("26.06", False), ("26.02", True)):
        run = read_run(row(**GPT_OSS | {"stack": f"Megatron-Bridge {release}"}))
        assert (predict(run).step_s > predict(run, none).step_s) == grows


@pytest.mark.slow
def test_a_fit_leaves_out_models_with_experts_and_predicts_no_memory_too_low():
    """A dense run of a stack that publishes memory and two models with experts, one of them twice as slow."""
    cards = read_cards()
    dense = read_run(row(stack="torchtitan", zero=3, recompute="selective", tp=1, step_s=9.0, group="a"))
    needed = predict(dense, cards).memory_gib * 1.02
    slow, fast = (
        read_run(row(**GPT_OSS | {"model": name, "step_s": seconds, "group": name}))
        for name, seconds in (("GPT-OSS-120B", 6.0), ("Qwen3-120B", 3.0))
    )
    dense = read_run({**row(stack="torchtitan", zero=3, recompute="selective", tp=1, step_s=9.0, group="a"),
                      "mem_gib": f"{needed}"})  # fmt: skip
    fit = fit_runs([dense, slow, fast], cards, leave_out="moe_model")
    assert fit.left_out[0] == fit.after[0]
    assert np.all(np.abs(fit.left_out[1:]) > np.abs(fit.after[1:]))
    assert needed <= predict(dense, fit.cards).memory_gib < 1.02 * needed
    assert fit.cards.stack["torchtitan"].priors["reserve_bytes"] == 0.0
