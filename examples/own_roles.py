"""Write reinforcement learning as your own program: three roles, one controller, weights in versioned checkpoints."""

import argparse
import hashlib
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hyper_parallel as hp
from hyper_parallel.runtime.controller import ahead

CONFIG = LlamaConfig(
    vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=8,
)  # fmt: skip
DIGITS, PROMPTS = 10, 64


class Policy:
    """Model of a role. Version v of its weights is the result of v learned steps."""

    def __init__(self, folder: str, layout: str = "", keep: int = 2) -> None:
        torch.manual_seed(0)
        self.folder, self.keep, self.version = folder, keep, -1
        self.model = LlamaForCausalLM(CONFIG)
        hp.parallelize(self.model, hp.plan_of(self.model, layout))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def load_version(self, version: int, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Load a version of the weights, unless this object already has it."""
        if version != self.version:
            self.version = hp.load(self.model, optimizer, self.folder, step=version)["step"]


class Sampler(Policy):
    """Role that samples answers of the model; prompts and answers are digits."""

    def sample(self, step: int, version: int) -> list:
        """Return pairs [prompt digit, answer] for the prompts of a step."""
        self.load_version(version)
        draws = torch.Generator().manual_seed(step)
        asked = torch.randint(DIGITS, (PROMPTS, 1), generator=draws)
        with torch.no_grad():
            odds = self.model(asked).logits[:, -1].softmax(-1)
        return torch.cat([asked, torch.multinomial(odds, 1, generator=draws)], 1).tolist()


class Scorer:
    """Role that scores answers; the right answer is the next digit."""

    def score(self, made: list) -> list:
        """Return 1.0 for each right answer, and 0.0 for others."""
        return [float(answer == (asked + 1) % DIGITS) for asked, answer in made]


def policy_gradient(logprobs: torch.Tensor, batch: dict) -> torch.Tensor:
    return -(logprobs * batch["advantage"]).sum() / PROMPTS


class Learner(Policy):
    """Role that runs a policy-gradient step on any number of ranks, and saves the next version of the weights."""

    def begin(self) -> int:
        """Save the initial weights as version 0."""
        if not (Path(self.folder) / "step_00000000").exists():
            hp.save(self.model, None, self.folder, step=0)
        self.version = 0
        return self.version

    def learn(self, step: int, made: list, rewards: list) -> dict:
        """Run one step, save its version, and return the mean reward.

        A learner restarted after a rank loss loads version `step` - 1 and its optimizer state from the folder.
        """
        self.load_version(step - 1, self.optimizer)
        rank, size = hp.data_share(self.model)
        ids = torch.tensor(made).chunk(size)[rank]
        reward = torch.tensor(rewards)
        advantage = (reward - reward.mean()).chunk(size)[rank][:, None]
        batch = {"input_ids": ids, "labels": ids, "advantage": advantage}
        hp.forward_backward(self.model, [batch], objective=policy_gradient)
        self.optimizer.step()
        self.optimizer.zero_grad()
        hp.save(self.model, self.optimizer, self.folder, step=step, keep=self.keep)
        self.version = step
        return {"reward": reward.mean().item()}

    def checksum(self, version: int) -> str:
        """Return the SHA-256 of all weights of a version, gathered from all ranks."""
        self.load_version(version, self.optimizer)
        digest = hashlib.sha256()
        for name, value in sorted(self.model.state_dict().items()):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            digest.update(name.encode() + whole.numpy().tobytes())
        return digest.hexdigest()


def train(controller: hp.Controller, folder: str, steps: int, staleness: int, ranks: int) -> list:
    """Start the roles, call them for every step, and return the mean rewards."""
    # Sampling may use weights that are `staleness` versions old, and a restarted learner needs the previous version.
    learner = controller.start(Learner, folder, f"dp_shard={ranks}", staleness + 2, ranks=ranks)
    sampler = controller.start(Sampler, folder)
    scorer = controller.start(Scorer)
    learner.call("begin").result()
    samples, rewards = {}, []
    for what, step in ahead(steps, staleness):
        if what == "sample":
            samples[step] = sampler.call("sample", step, max(0, step - 1 - staleness))
        else:
            made = samples.pop(step).result()
            scores = scorer.call("score", made).result()
            rewards.append(learner.call("learn", step, made, scores).result()["reward"])
    print("sha256", learner.call("checksum", steps).result())
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=["inline", "processes", "ray"], default="processes")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--max-staleness", type=int, default=0)
    parser.add_argument("--learner-ranks", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="Go on here, where a program has ended early.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = given.folder or Path(name)
        weights, steps, staleness = str(folder / "weights"), given.steps, given.max_staleness
        with hp.Controller(given.engine, folder / "journal.jsonl") as controller:
            rewards = train(controller, weights, steps, staleness, given.learner_ranks)
    print("rewards", *(f"{reward:.2f}" for reward in rewards))
    print("answers are better than by chance:", sum(rewards[-5:]) / 5 > 0.5)
