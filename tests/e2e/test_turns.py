"""Completions of several turns, and of several versions of the weights."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.backends.torch.forward_variants import keep_float64
from hyper_parallel.config import load_recipe
from hyper_parallel.errors import BadValue, Contradiction, NotImportable
from hyper_parallel.trainer.data import load_tokenizer, render, stop_ids
from hyper_parallel.trainer.job import prepare_job
from hyper_parallel.trainer.stages import rollouts
from hyper_parallel.trainer.stages.sampling import NOT_SAMPLED, Weights, sample
from tests.e2e.runs import CONFIG, QUESTIONS, make_stage_place, rows, train

pytestmark = pytest.mark.e2e

OWN = '''
class Again:
    """Asks once more, and rewards digits and short turns."""

    def __init__(self, prompt, answer, seed):
        assert "+" in prompt and int(answer) >= 0
        self.turns, self.seed = 0, seed

    def step(self, completion):
        self.turns += 1
        reward = sum(c.isdigit() for c in completion) + self.turns / (2 + len(completion))
        return (f"no {self.seed % 10}" if self.turns < 3 else None), reward

class Silent(Again):
    def step(self, completion):
        return None

class Raising(Again):
    def step(self, completion):
        return 1 / 0
'''
SEQ_LEN = 90


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("turns")
    (place / "own_environments.py").write_text(OWN)
    grpo = {
        "num_generations": 4,
        "max_completion_length": 64,
        "reward_funcs": ["environment"],
        "environment": "own_environments.Again",
    }
    shape = {"seq_len": SEQ_LEN, "sequences": 16, "microbatch": 4}
    return make_stage_place(place, "grpo", QUESTIONS, **shape, grpo=grpo)


@pytest.fixture(autouse=True)
def _here(place, monkeypatch):
    monkeypatch.chdir(place)

    # A model that knows nothing hardly ever ends a turn: here a third of its tokens do.
    own = stop_ids
    monkeypatch.setattr(rollouts, "stop_ids", lambda *given: {*own(*given), *range(90)})


def read_export(run):
    model = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float64)
    keep_float64(model)
    return model


@pytest.mark.slow
def test_a_completion_goes_on_behind_what_an_environment_says(place):
    """The step of one rank in plain transformers, from the completions of a rank that only samples."""
    common = ("training.steps=1", "training.lr=1e-30", "checkpoint.export=true")
    train(place, place / "apart", *common, "grpo.rollout_ranks=1")
    (row,) = rows(place / "apart" / "metrics.jsonl")
    made = load_file(place / "apart" / "rollouts" / "step_00000001.0.safetensors")
    model = read_export(place / "apart")
    tokenizer = load_tokenizer(place / "apart" / "export")
    sampled = made["versions"] != NOT_SAMPLED
    logp = model(made["tokens"][:, :-1]).logits.log_softmax(-1)
    logp = logp.gather(-1, made["tokens"][:, 1:, None])[..., 0]
    counted = sampled[:, 1:]
    torch.testing.assert_close(logp[counted], made["logprobs"][:, 1:][counted], rtol=0, atol=1e-12)
    assert (made["logprobs"][~sampled] == 0).all()
    groups = made["rewards"].view(4, 4)
    spread = groups.std(1, keepdim=True) + 1e-4
    advantages = ((groups - groups.mean(1, keepdim=True)) / spread).view(-1, 1)
    (-(advantages * logp * counted).sum() / counted.sum()).backward()
    grads = [p.grad.square().sum() for p in model.parameters()]
    assert row["valid_tokens"] == int(counted.sum())
    assert row["grad_norm"] == pytest.approx(float(torch.stack(grads).sum().sqrt()), rel=1e-10)
    assert row["rollout"]["reward"] == pytest.approx(float(groups.mean()), rel=1e-12)
    assert row["rollout"]["reward_environment"] == row["rollout"]["reward"]
    # The words between two turns are those of the chat template.
    several = 0
    for tokens, chosen in zip(made["tokens"], sampled, strict=True):
        edges = torch.diff(chosen.int(), prepend=torch.zeros(1)).nonzero()[:, 0].tolist()
        starts, ends = edges[::2], edges[1::2]
        for end, start in zip(ends, starts[1:], strict=False):
            several += 1
            words = tokenizer.decode(tokens[end:start])
            assert words.startswith("<|im_end|>\n<|im_start|>user\nno ")
            assert words.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert len(starts) <= 3
    assert several > 8
    # The same on the ranks that train, whatever their layout.
    for name, words in (
        ("one", ()),
        ("tensor", ("parallel.tp=2",)),
        ("shard", ("parallel.dp_shard=2",)),
    ):
        train(place, place / name, *common, *words)
        (other,) = rows(place / name / "metrics.jsonl")
        assert other["valid_tokens"] == row["valid_tokens"]
        assert other["rollout"]["reward"] == pytest.approx(row["rollout"]["reward"], rel=1e-12)
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-10)


class Taken:
    """Weights that change every few passes, in place."""

    def __init__(self, model, every):
        self.model, self.every, self.passes, self.versions = model, every, 0, [copied(model)]
        self.weights = Weights(0, self.due, self.renew)

    def due(self):
        self.passes += 1
        return self.passes % self.every == 0

    def renew(self):
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(torch.randn_like(p), alpha=0.1)
        self.versions.append(copied(self.model))
        return len(self.versions) - 1


def copied(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("slots", [2, 6])
def test_tokens_of_newer_weights_are_drawn_from_these(slots):
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**CONFIG, "vocab_size": 264})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    keep_float64(model)
    taken = Taken(model, every=4)
    prompts, starts = torch.randint(0, 264, (6, 40)), torch.tensor([3, 5, 8, 11, 2, 9])
    draws = torch.rand(6, 12, dtype=torch.float64)
    made = sample(
        model,
        prompts,
        starts,
        stops=[1],
        max_completion_length=12,
        draws=draws,
        microbatch=slots,
        weights=taken.weights,
    )
    assert taken.weights.version == len(taken.versions) - 1 >= 3
    seen = set()
    for row, (tokens, start, end) in enumerate(zip(made.tokens, starts, made.ends, strict=True)):
        versions = made.versions[row, start:end]
        assert (torch.diff(versions) >= 0).all()
        seen |= {*versions.tolist()}
        assert (made.versions[row, :start] == NOT_SAMPLED).all()
        assert (made.versions[row, end:] == NOT_SAMPLED).all()
        for at, version in enumerate(versions.tolist()):
            model.load_state_dict(taken.versions[version])
            with torch.no_grad():
                logp = model(tokens[None, : start + at]).logits[0, -1].log_softmax(-1)
            token = tokens[start + at]
            assert logp[token] == pytest.approx(float(made.logprobs[row, start + at]), abs=1e-12)
            below = logp.exp().cumsum(-1)
            assert below[token] - logp[token].exp() <= draws[row, at] * below[-1] < below[token]
    assert len(seen) >= 3


@pytest.mark.slow
def test_rollouts_go_on_under_newer_weights_within_the_bound(place):
    words = (
        "grpo.rollout_ranks=1",
        "grpo.max_staleness=2",
        "grpo.partial_rollout=true",
        "training.steps=6",
    )
    train(place, place / "partial", *words)
    records = [r["rollout"] for r in rows(place / "partial" / "metrics.jsonl")]
    assert len(records) == 6
    assert all(0 <= r["age_mean"] <= r["age"] <= 2 for r in records)
    assert all(0 < r["effective_samples"] <= 1 + 1e-12 for r in records)


def test_between_turns_of_a_template_that_reasons(place):
    """Qwen3's writes an empty reasoning block before the last turn of the assistant, and before no other."""
    from hyper_parallel.trainer.stages.environments import _between_turns

    job = prepare_job(load_recipe(place / "recipe.yaml"), progress=False)
    tokenizer = load_tokenizer(job.packed.tokenizer_dir)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert "<think>" in render(tokenizer, [{"role": "assistant", "content": "a"}])
    wanted = "<|im_end|>\n<|im_start|>user\nUVW<|im_end|>\n<|im_start|>assistant\n"
    assert _between_turns(tokenizer) == wanted


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (["grpo.environment=null"], Contradiction, "needs an environment"),
        (
            ["grpo.environment=own_environments.None_"],
            NotImportable,
            "`own_environments.None_` cannot be imported",
        ),
        (["grpo.environment=own_environments.Silent"], BadValue, "a finite reward"),
        (["grpo.environment=own_environments.Raising"], BadValue, "an environment raised an exception"),
        (["grpo.partial_rollout=true"], Contradiction, "partial rollouts need"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_does_not_go_together_is_refused_by_name(place, change, error, match):
    with pytest.raises(error, match=match):
        train(place, place / "refused", *change)
    assert not (place / "refused" / "checkpoints").exists()
