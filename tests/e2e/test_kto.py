"""Good and bad answers through the command: the loss of the paper, its KL term, and the same on every layout."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hyper_parallel.backends.torch.forward_variants import keep_float64
from hyper_parallel.config import load_recipe
from hyper_parallel.errors import Contradiction, NoData
from hyper_parallel.trainer.data import load_tokenizer
from hyper_parallel.trainer.job import prepare_job
from tests.e2e.runs import ANSWERS, assert_same_curve, curve, make_stage_place, rows, train

pytestmark = pytest.mark.e2e

KTO = ("kto.beta=0.5", "kto.desirable_weight=1.25", "kto.undesirable_weight=0.75")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("kto")
    return make_stage_place(root, "kto", ANSWERS, seq_len=32, sequences=16, microbatch=4)


@pytest.fixture(scope="module")
def one(place):
    """Three steps on one rank."""
    train(place, place / "one", *KTO)
    return rows(place / "one" / "metrics.jsonl")


@pytest.mark.slow
def test_every_layout_learns_what_one_rank_does_and_goes_on_bit_for_bit(place, one):
    assert one[0]["preference"]["kl"] == 0, "the model is its reference"
    assert one[1]["preference"]["kl"] > 0.01
    assert one[-1]["preference"]["margin"] > 0
    again = ("checkpoint.every=2", "training.steps=2")
    axes = ("parallel.pp=2", "parallel.cp=2")
    train(place, place / "ranks", *KTO, *again, *axes)
    train(place, place / "ranks", *KTO, "parallel.dp_shard=2", "parallel.tp=2")
    assert_same_curve(curve(place / "ranks"), curve(place / "one"))
    for mine, theirs in zip(rows(place / "ranks" / "metrics.jsonl"), one, strict=True):
        assert mine["valid_tokens"] == theirs["valid_tokens"]
        assert mine["preference"] == pytest.approx(theirs["preference"], rel=1e-8, abs=1e-10)
    train(place, place / "resumed", *KTO, *again)
    train(place, place / "resumed", *KTO)
    assert curve(place / "resumed") == curve(place / "one")


@pytest.mark.slow
def test_the_second_step_is_that_of_plain_transformers(place, one):
    def exported(name, *changes):
        train(place, place / name, *KTO, "checkpoint.export=true", "training.steps=1", *changes)
        model = AutoModelForCausalLM.from_pretrained(place / name / "export", dtype=torch.float64)
        keep_float64(model)
        return model

    before, after = exported("before", "training.lr=1e-30"), exported("after")
    kept = load_recipe(place / "one" / "config.yaml", ["checkpoint.resume=never"])
    job = prepare_job(kept, progress=False)
    batches = job.train_batches()
    at = batches.step_batch(1)
    ids, labels = (torch.from_numpy(a) for a in job.packed.train.read(at))

    def logp(model):
        logits = model(input_ids=ids).logits.log_softmax(-1)
        picked = logits.gather(2, labels.clamp(min=0)[..., None])[..., 0]
        return (picked * (labels != -100)).sum(-1)

    with torch.no_grad():
        ratio = logp(after) - logp(before)
    kl = max(ratio[1::2].mean().item(), 0.0)
    good = job.packed.train.desirable(at)[0::2]
    losses = [
        1.25 / (1 + math.exp(0.5 * (r - kl))) if g else 0.75 / (1 + math.exp(0.5 * (kl - r)))
        for r, g in zip(ratio[0::2].tolist(), good, strict=True)
    ]
    second = one[1]
    assert second["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-10)
    assert second["preference"]["kl"] == pytest.approx(kl, rel=1e-10)
    assert second["valid_tokens"] == int((labels[0::2] != -100).sum())
    scores = 0.5 * ratio[0::2].numpy()
    assert second["preference"]["chosen"] == pytest.approx(scores[good].mean(), rel=1e-9)
    assert second["preference"]["rejected"] == pytest.approx(scores[~good].mean(), rel=1e-9)


@pytest.mark.slow
def test_adapters_learn_on_a_layout_what_they_do_on_one_rank(place):
    adapters = ("lora.r=2", "training.lr=0.1", "training.steps=2")
    train(place, place / "lora", *adapters)
    train(place, place / "lora2", *adapters, "parallel.pp=2")
    assert_same_curve(curve(place / "lora2"), curve(place / "lora"))


def test_a_prompt_is_followed_by_the_answer_of_the_record_before(tmp_path, place):
    answers = [
        {"prompt": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Z"},
                    {"role": "user", "content": q}], "completion": a, "label": good}
        for q, a, good in (("q0", "A", True), ("q1", "B", False), ("q2", "C", True))
    ]  # fmt: skip
    chats = [
        {"conversations": [*({"from": "human" if t["role"] == "user" else "gpt", "value": t["content"]}
                             for t in a["prompt"]), {"from": "gpt", "value": a["completion"]}], "kto_tag": a["label"]}
        for a in answers
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers))
    (tmp_path / "b.json").write_text(json.dumps(chats))
    seen = []
    for source in ("a.jsonl", "b.json"):
        words = [f"data.source={tmp_path / source}", f"output_dir={tmp_path / 'out'}"]
        job = prepare_job(load_recipe(place / "recipe.yaml", [*words, "data.seq_len=128"]), progress=False)
        tokenizer = load_tokenizer(job.packed.tokenizer_dir)
        every = np.arange(len(job.packed.train))
        ids, labels = job.packed.train.read(every)
        texts = [(tokenizer.decode(i), tokenizer.decode(t[t >= 0])) for i, t in zip(ids, labels, strict=True)]
        seen.append([(t.count("q0") + 2 * t.count("q1") + 3 * t.count("q2"), a) for t, a in texts])
        assert job.packed.train.desirable(every).tolist() == [True, True, False, False, True, True]
    end = "<|im_end|>"
    # Each prompt with its answer, then with the one before; the first with the last. Only the last answer is learned.
    wanted = [(1, "A"), (1, "C"), (2, "B"), (2, "A"), (3, "C"), (3, "B")]
    assert seen[0] == [(prompt, answer + end) for prompt, answer in wanted]
    assert seen[1] == seen[0]


def test_what_does_not_go_together_is_refused_by_name(place, tmp_path):
    (tmp_path / "plain.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 9)
    (tmp_path / "alone.jsonl").write_text('{"prompt": "a", "completion": "b", "label": true}\n')
    (tmp_path / "word.jsonl").write_text('{"prompt": "a", "completion": "b", "label": "good"}\n' * 2)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 2)
    for error, change, match in (
        (
            NoData,
            f"data.source={tmp_path / 'plain.jsonl'}",
            "has no label that says whether its answer",
        ),
        (
            NoData,
            f"data.source={tmp_path / 'word.jsonl'}",
            "the label of a record is neither true nor false",
        ),
        (NoData, f"data.source={tmp_path / 'alone.jsonl'}", "there is only one record"),
        (Contradiction, f"data.source={tmp_path / 'pairs.jsonl'}", "answers with labels, but the"),
        (Contradiction, "training.microbatch=1", "in the same microbatch"),
        (Contradiction, "dpo.beta=0.2", "applies to `stage: dpo` only"),
    ):
        with pytest.raises(error, match=match):
            train(place, place / "refused", change)
