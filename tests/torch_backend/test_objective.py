"""A user's own objective gives on every layout what it gives on one rank: value, gradients, log-probabilities."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM, XLNetConfig, XLNetLMHeadModel

import hyper_parallel as hp
from hyper_parallel.errors import BadObjective, BadValue, NoLoss, UnsupportedSharding
from tests.parity.planned import whole

PAIRS, SEQ_LEN, VOCAB, BETA = 4, 13, 48, 0.3
WORKLOAD = hp.Workload(
    SEQ_LEN, microbatch=1, accumulation_steps=2,
    compute_dtype="float64", param_dtype="float64", reduce_dtype="float64",
)  # fmt: skip


def build(seed: int = 0, vocab: int = VOCAB) -> nn.Module:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).double()


def pairs(vocab: int = VOCAB) -> dict[str, Tensor]:
    """Chosen and rejected sequences in turn, [2 PAIRS, S]; the prompt, and the end of some, is no target."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, vocab, (2 * PAIRS, SEQ_LEN), generator=generator)
    labels = ids.clone()
    labels[:, :4] = -100
    labels[1, 9:] = -100
    teacher = torch.randn(2 * PAIRS, SEQ_LEN, vocab, generator=generator, dtype=torch.float64)
    return {"input_ids": ids, "labels": labels, "teacher": teacher.softmax(-1)}


def dpo(logprobs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Rafailov et al. 2023, equation 7; the mean over all pairs of the step."""
    margins = (logprobs - batch["reference"]).sum(-1).view(-1, 2)
    return -F.logsigmoid(BETA * (margins[:, 0] - margins[:, 1])).sum() / PAIRS


def distill(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy with a teacher's distribution at every target."""
    counts = batch["shift_labels"] != -100
    assert logits.shape == (*counts.shape, logits.shape[-1])
    return -(batch["teacher"] * logits.log_softmax(-1)).sum(-1)[counts].sum() / 100


def gather(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities of the next tokens as one writes them for one device."""
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    picked = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return picked.masked_fill(targets == -100, 0)


class Oracle:
    """Expected results: one rank, whole logits and plain autograd."""

    def __init__(self, vocab: int = VOCAB) -> None:
        self.model, self.batch = build(vocab=vocab), pairs(vocab)
        one = hp.parallelize(copy.deepcopy(self.model), hp.plan_of(self.model, "", WORKLOAD))
        other = hp.parallelize(build(1, vocab), hp.plan_of(self.model, "", WORKLOAD))
        ids, labels = self.batch["input_ids"], self.batch["labels"]
        self.batch["reference"] = gather(other(input_ids=ids).logits.detach(), labels)
        logits = one(input_ids=ids).logits
        self.logprobs = gather(logits, labels)
        shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
        losses = {
            "logprobs": dpo(self.logprobs, self.batch),
            "logits": distill(logits, {**self.batch, "shift_labels": shifted}),
        }
        self.expected = {}
        for over, loss in losses.items():
            one.zero_grad()
            loss.backward(retain_graph=True)
            grads = {n: p.grad.clone() for n, p in one.named_parameters()}
            self.expected[over] = loss.item(), grads


def check(oracle: Oracle, words: str) -> None:
    """On this rank: both objectives in two microbatches, a plain loop, and the reference model's log-probabilities."""
    model = copy.deepcopy(oracle.model)
    hp.parallelize(model, hp.plan_of(model, words, WORKLOAD))
    rank, size = hp.data_share(model)
    mine = {k: v.chunk(size)[rank] for k, v in oracle.batch.items()}
    parts = [{k: v.chunk(2)[i] for k, v in mine.items()} for i in range(2)]
    for over, objective in (("logprobs", dpo), ("logits", distill)):
        loss = hp.forward_backward(model, parts, objective=objective, over=over)
        compare(model, oracle, over, loss)
        if over == "logprobs":
            norm = torch.stack([g.square().sum() for g in oracle.expected[over][1].values()])
            found = hp.clip_grad_norm_(model, None)
            torch.testing.assert_close(found, norm.sum().sqrt(), rtol=1e-10, atol=0)
            again = hp.forward_loss(model, parts, objective=objective)
            torch.testing.assert_close(again, loss, rtol=1e-12, atol=0)
        model.zero_grad()
    given = {k: mine[k] for k in ("input_ids", "labels")}
    with torch.no_grad():
        logprobs = hp.token_logprobs(model, **given)
    expected = oracle.logprobs.detach().chunk(size)[rank]
    torch.testing.assert_close(logprobs, expected, rtol=1e-10, atol=1e-12)
    if "pp=" in words:
        with pytest.raises(UnsupportedSharding, match="forward_backward"):
            hp.token_logprobs(model, **given)
        return
    loss = dpo(hp.token_logprobs(model, **given), mine)
    loss.backward()
    compare(model, oracle, "logprobs")


def compare(model: nn.Module, oracle: Oracle, over: str, loss: Tensor | None = None) -> None:
    value, grads = oracle.expected[over]
    if loss is not None:
        torch.testing.assert_close(loss.item(), value, rtol=1e-10, atol=0)
    for name, param in model.named_parameters():
        torch.testing.assert_close(
            whole(param.grad),
            grads[name],
            rtol=1e-10,
            atol=1e-12,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.slow
@pytest.mark.dist
def test_every_axis_alone() -> None:
    oracle, uneven = Oracle(), Oracle(47)

    def rank(_: int) -> None:
        for words in ("tp=2", "cp=2", "pp=2", "dp_shard=2", "dp_replicate=2"):
            check(oracle, words)
        check(uneven, "tp=2")  # the head works on pieces of the tokens

    hp.launch(rank, 2, timeout_s=240)


@pytest.mark.slow
@pytest.mark.dist
def test_three_axes_at_once() -> None:
    oracle = Oracle()
    hp.launch(lambda _: check(oracle, "tp=2 pp=2 cp=2"), 8, timeout_s=240)


@pytest.mark.dist
def test_logits_that_every_tensor_rank_has_in_full_count_once() -> None:
    """The forward of XLNet works on whole logits, so its head is replicated."""
    torch.manual_seed(0)
    config = XLNetConfig(vocab_size=VOCAB, d_model=32, n_layer=2, n_head=4, d_inner=64)
    model, batch = XLNetLMHeadModel(config).double().eval(), pairs()

    def step(words: str) -> float:
        parallel = copy.deepcopy(model)
        hp.parallelize(parallel, hp.plan_of(model, words, WORKLOAD))
        return hp.forward_backward(parallel, [batch], objective=distill, over="logits").item()

    expected = step("")
    for value in hp.launch(lambda _: step("tp=2"), 2, timeout_s=120):
        assert value == pytest.approx(expected, rel=1e-10)


@pytest.mark.torch
def test_what_an_objective_may_not_be() -> None:
    model = build()
    hp.parallelize(model, hp.plan_of(model, "", WORKLOAD))
    batch = {k: v[:2] for k, v in pairs().items()}
    step = partial(hp.forward_backward, model, [batch])
    with pytest.raises(BadObjective, match="shape \\(2, 13\\)"):
        step(objective=lambda logprobs, _: logprobs)
    with pytest.raises(BadObjective, match="float"):
        step(objective=lambda logprobs, _: logprobs.sum().item())
    with pytest.raises(BadValue, match="logprobs, logits, output"):
        step(objective=lambda logprobs, _: logprobs.sum(), over="hidden")
    with pytest.raises(BadValue, match="num_tokens"):
        step(num_tokens=3, objective=lambda logprobs, _: logprobs.sum())
    with pytest.raises(NoLoss, match="no targets"):
        hp.token_logprobs(model, inputs_embeds=torch.zeros(1, 4, 32))


@pytest.mark.torch
def test_the_cross_entropy_counts_its_own_tokens() -> None:
    model = build()
    hp.parallelize(model, hp.plan_of(model, "", WORKLOAD))
    batch = {k: v for k, v in pairs().items() if k != "teacher"}
    loss = hp.forward_backward(model, [batch])
    expected = F.cross_entropy(
        model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1),
        batch["labels"][:, 1:].flatten(),
    )
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


@pytest.mark.torch
@pytest.mark.parametrize("padding", [0, 4])
def test_input_ids_without_labels_are_their_own_labels(padding: int) -> None:
    model, ids = build(), pairs()["input_ids"]
    hp.parallelize(model, hp.plan_of(model, "", WORKLOAD))
    mask = torch.ones_like(ids)
    mask[:, SEQ_LEN - padding :] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    labels = ids.masked_fill(mask == 0, -100)
    expected = hp.forward_loss(model, [{**batch, "labels": labels}])
    torch.testing.assert_close(hp.forward_loss(model, [batch]), expected, rtol=1e-12, atol=0)
