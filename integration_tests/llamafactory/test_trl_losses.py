"""Our losses and TRL's own functions on the same batch: log-probabilities, DPO and its kin, ORPO, KTO, reward models.

make test-llamafactory
"""

import json
from collections import defaultdict
from copy import deepcopy
from types import SimpleNamespace

import llamafactory.extras.packages  # noqa: F401  TRL 0.24 reads availability of packages as transformers 4 says it
import numpy as np
import pytest
import torch
from trl import CPOTrainer, DPOTrainer, KTOTrainer, ORPOTrainer, RewardTrainer
from trl.trainer.dpo_config import FDivergenceType

import hyper_parallel as hp
from hyper_parallel.backends.torch.token_scores import score_every_token
from hyper_parallel.config import Data, Dpo, Kto, Rm
from hyper_parallel.trainer.data import Batches, Order, StepRows, load_tokenizer, prepare
from hyper_parallel.trainer.stages.dpo import WITHOUT_REFERENCE, DpoStage
from hyper_parallel.trainer.stages.kto import KtoStage
from hyper_parallel.trainer.stages.reference import Reference
from hyper_parallel.trainer.stages.reward_model import RewardModelStage

BETA, SMOOTH, GAMMA, GOOD, BAD = 0.3, 0.1, 0.7, 1.2, 0.6
SEQ_LEN = 64
ROWS = 16
SIZES = {
    "vocab_size": 280, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
WORK = hp.Workload(
    SEQ_LEN, tokens_per_step=ROWS * SEQ_LEN, microbatch=4, accumulation_steps=4,
    compute_dtype="float32", param_dtype="float32", reduce_dtype="float32",
)  # fmt: skip
TEXTS = [(f"What is {i}+{i % 7}?", f"It is {i + i % 7}" + "!" * (i % 5), f"{i}?") for i in range(8)]


class Accelerator:
    """What TRL asks of the ranks, where there is one."""

    device = torch.device("cpu")

    @staticmethod
    def gather_for_metrics(value):
        return value

    gather = gather_for_metrics


def moved(model):
    """Another model that is near to one."""
    generator = torch.Generator().manual_seed(1)
    other = deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p += 0.03 * torch.randn(p.shape, generator=generator)
    return other


def make_rows(name, place):
    """The data of a stage, as it is prepared."""
    if name in ("dpo", "rm"):
        records = [{"prompt": q, "chosen": a, "rejected": b} for q, a, b in TEXTS]
    else:
        records = [
            {"prompt": q, "completion": a if i % 3 else b, "label": bool(i % 3)} for i, (q, a, b) in enumerate(TEXTS)
        ]
    (place / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    data = Data(source=str(place / "rows.jsonl"), seq_len=SEQ_LEN, packing=False, holdout=0.0,
                vocab_size=280, cache_dir=str(place / "cache"))  # fmt: skip
    packed = prepare(data, stage=name, model_path=None, seed=0, progress=False)
    assert len(packed.train) == ROWS
    return packed


def make_step(name, place):
    """A step of a stage: the rows, and log-probabilities of both models by TRL's function from plain transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    packed = make_rows(name, place)
    set_seed(0)
    before = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    after = moved(before)
    at = np.arange(ROWS)
    ids, targets = (torch.from_numpy(a) for a in packed.train.read(at))
    # TRL moves labels itself.
    whole = torch.cat([ids, torch.zeros_like(ids[:, :1])], 1)
    labels = torch.cat([torch.full_like(ids[:, :1], -100), targets], 1)

    def logps(model, average=False):
        with torch.no_grad():
            logits = model(input_ids=whole).logits
        return KTOTrainer.get_batch_logps(logits, labels, average_log_prob=average)

    model = deepcopy(before)
    plan = hp.plan_of(model, "", WORK)
    hp.parallelize(model, plan)
    batches = Batches(packed.train, sequences_per_step=ROWS, order=Order(shuffle=False), rows=StepRows(group_size=2))
    reference = Reference(model, plan, True, place, None)
    reference.begin(packed.train)
    reference.source = place  # the run goes on: its model is another one now
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), after.parameters(), strict=True):
            mine.copy_(theirs)
    return SimpleNamespace(
        plan=plan, model=model, batches=batches, reference=reference, rows=at,
        ids=ids, targets=targets, now=logps(after), then=logps(before), mean=logps(after, True),
        mean_then=logps(before, True),
    )  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return make_step("dpo", tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return make_step("kto", tmp_path_factory.mktemp("answers"))


def ours(step, stage):
    """Loss and record of a step by our stage."""
    stage.begin(step.batches)
    parts = [{"input_ids": i, "shift_labels": t} for i, t in zip(step.ids.split(4), step.targets.split(4), strict=True)]
    parts, _ = stage.inputs(parts, step.rows, step.batches, 1)
    loss = hp.forward_backward(step.model, parts, objective=stage.objective)
    step.model.zero_grad()
    return float(loss), stage.record()["preference"]


@pytest.mark.parametrize("name", ["pairs", "answers"])
def test_the_reference_is_trls(request, name):
    step = request.getfixturevalue(name)
    assert step.reference.reference_logprobs(step.rows).numpy() == pytest.approx(step.then.numpy(), rel=1e-5)
    mine = hp.token_logprobs(step.model, input_ids=step.ids, shift_labels=step.targets).sum(-1)
    assert mine.detach().numpy() == pytest.approx(step.now.numpy(), rel=1e-5)


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo", "simpo", "orpo"])
def test_losses_of_pairs_are_trls(pairs, kind):
    smooth = SMOOTH if kind == "sigmoid" else 0.0
    settings = Dpo(loss_type=kind, beta=BETA, label_smoothing=smooth, simpo_gamma=GAMMA)
    step = pairs
    reference = None if kind in WITHOUT_REFERENCE else step.reference
    stage = DpoStage(step.plan, torch.device("cpu"), settings, reference)
    trl = SimpleNamespace(
        accelerator=Accelerator, beta=BETA, label_smoothing=smooth, reference_free=False, alpha=0.0,
        f_divergence_type=FDivergenceType.REVERSE_KL, f_divergence_params=None, simpo_gamma=GAMMA, loss_type=kind,
    )  # fmt: skip
    of_sums = kind in ("sigmoid", "hinge")
    now, then = (step.now, step.then) if of_sums else (step.mean, step.mean_then)
    good, bad = now[0::2], now[1::2]
    if kind == "orpo":
        ratios, *_ = ORPOTrainer.odds_ratio_loss(trl, good, bad)
        wanted = -good.mean() - ratios.mean()
    elif kind == "simpo":
        losses, *_ = CPOTrainer.cpo_loss(trl, good, bad)
        wanted = losses.mean()
    else:
        losses, *_ = DPOTrainer.dpo_loss(trl, good, bad, then[0::2], then[1::2], kind)
        wanted = losses.mean()
    loss, _ = ours(step, stage)
    assert loss == pytest.approx(float(wanted), rel=1e-5)


def test_the_loss_of_good_and_bad_answers_is_trls(answers):
    step = answers
    settings = Kto(beta=BETA, desirable_weight=GOOD, undesirable_weight=BAD)
    loss, record = ours(step, KtoStage(step.plan, torch.device("cpu"), settings, step.reference))
    good = torch.from_numpy(step.batches.sequences.desirable(step.rows[0::2]))
    assert 0 < good.sum() < len(good)
    trl = SimpleNamespace(
        accelerator=Accelerator, beta=BETA, desirable_weight=GOOD, undesirable_weight=BAD, calculate_KL=True,
        loss_type="kto",
    )  # fmt: skip
    now, then = step.now[0::2], step.then[0::2]
    losses, chosen, rejected, kl = KTOTrainer.kto_loss(
        trl, now[good], now[~good], step.now[1::2], then[good], then[~good], step.then[1::2]
    )
    assert kl > 0.01
    assert record["kl"] == pytest.approx(float(kl), rel=1e-5)
    assert loss == pytest.approx(float(losses.nanmean()), rel=1e-5)
    assert record["chosen"] == pytest.approx(float(chosen.mean()), rel=1e-4)
    assert record["rejected"] == pytest.approx(float(rejected.mean()), rel=1e-4)


@pytest.mark.parametrize("coefficient", [None, 0.01])
def test_the_loss_of_a_reward_model_is_trls(tmp_path, coefficient):
    from transformers import LlamaConfig, LlamaForSequenceClassification, set_seed

    packed, at = make_rows("rm", tmp_path), np.arange(ROWS)
    ids, targets = (torch.from_numpy(a) for a in packed.train.read(at))
    set_seed(0)
    padding = load_tokenizer(packed.tokenizer_dir).pad_token_id
    config = LlamaConfig(**SIZES, num_labels=1, pad_token_id=padding)
    theirs = LlamaForSequenceClassification(config)
    with torch.no_grad():
        theirs.score.weight *= 20  # scores that are not all near 0
    # TRL's collator puts the chosen answers first.
    order = [*at[0::2], *at[1::2]]
    ends = (targets != -100).int().argmax(1)
    mask = (torch.arange(SEQ_LEN) <= ends[:, None]).long()
    given = {"input_ids": ids[order], "attention_mask": mask[order]}
    trl = SimpleNamespace(
        args=SimpleNamespace(center_rewards_coefficient=coefficient), accelerator=Accelerator,
        model=theirs.train(), _metrics={"train": defaultdict(list)}, _total_train_tokens=0,
    )  # fmt: skip
    wanted = RewardTrainer.compute_loss(trl, theirs, given)
    mine = deepcopy(theirs)
    score_every_token(mine)
    plan = hp.plan_of(mine, "", WORK)
    hp.parallelize(mine, plan)
    rm = Rm(center_rewards_coefficient=coefficient)
    stage = RewardModelStage(plan, torch.device("cpu"), rm)
    batches = Batches(packed.train, sequences_per_step=ROWS, order=Order(shuffle=False), rows=StepRows(group_size=2))
    step = SimpleNamespace(model=mine, batches=batches, ids=ids, targets=targets, rows=at)
    loss, record = ours(step, stage)
    metrics = trl._metrics["train"]
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    assert 0 < record["accuracy"] < 1
    assert record["accuracy"] == pytest.approx(metrics["accuracy"][0])
    assert record["margin"] == pytest.approx(metrics["margin"][0], rel=1e-5)
    assert (record["chosen"] + record["rejected"]) / 2 == pytest.approx(metrics["mean_reward"][0], rel=1e-5)
