"""Rewards from a reward model that a run with `stage: rm` exported; `grpo.reward_funcs` names its directory.

Every training rank loads the full model and scores the completions of its rows without gradient. If a completion ended
with a stop token, the chat template's text after an answer is appended, as in the training data of the reward model.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.backends.torch.weights.checksums import state_checksum
from hyper_parallel.errors import Contradiction, ModelUnreadable
from hyper_parallel.model import read_config
from hyper_parallel.trainer.data import load_tokenizer
from hyper_parallel.trainer.data.chat import encode_conversation
from hyper_parallel.trainer.data.document import Conversation
from hyper_parallel.trainer.input_checksums import RunInputs


@dataclass
class ModelReward:
    """Reward function that scores completions with a reward model, which each rank loads at its first call.

    Attributes:
        directory: Directory with config.json, weights and tokenizer.
        inputs: Checksums of the run's input models, with which the loaded parameters are compared; None: no run.
    """

    directory: Path
    inputs: RunInputs | None = None
    _model: Any = None

    def check(self, tokenizer_dir: str | Path, where: str) -> None:
        """Check that the directory is a reward model with the tokenizer in `tokenizer_dir`; weights are not read.

        `where` is the origin of `grpo.reward_funcs`, for errors.

        Raises:
            ModelUnreadable: HP305 for a directory without a sequence classifier.
            Contradiction: HP104 for a different vocabulary or chat template.
            HyperParallelError: Errors of `load_tokenizer`.
        """
        try:
            config = read_config(self.directory).values
            kind = str((config.get("architectures") or [""])[0])[:80]
        except (LookupError, TypeError) as error:
            kind = str(error)
        if not kind.endswith("ForSequenceClassification"):
            raise ModelUnreadable(
                "a directory in `grpo.reward_funcs` must contain a reward model, as `stage: rm` exports it",
                where=f"{where}: {self.directory}",
                got=kind,
                allowed="architectures: a *ForSequenceClassification model with one label",
                hint="hyper-parallel train RECIPE.yaml stage=rm",
            )
        fetch = "fetch the tokenizer files of the reward model again, or remove it from `grpo.reward_funcs`"
        reward_tokenizer, run_tokenizer = load_tokenizer(self.directory, other=fetch), load_tokenizer(tokenizer_dir)
        differences = {
            "vocabulary": reward_tokenizer.get_vocab() != run_tokenizer.get_vocab(),
            "chat template": reward_tokenizer.chat_template != run_tokenizer.chat_template,
        }
        if any(differences.values()):
            names = " and ".join(name for name, differs in differences.items() if differs)
            raise Contradiction(
                "the reward model has a different tokenizer or chat template than the trained model",
                where=f"{where}: {self.directory}",
                got=f"a different {names}",
                allowed=f"vocabulary and chat template of {tokenizer_dir}",
                hint=self._tokenizer_hint(reward_tokenizer, vocabulary=differences["vocabulary"]),
            )

    def _tokenizer_hint(self, tokenizer: Any, *, vocabulary: bool) -> str:
        """Return a hint for a reward model with another vocabulary or, if `vocabulary` is False, chat template."""
        if vocabulary:
            return "use a reward model that was trained from the same base model"
        if tokenizer.chat_template is None:
            return "use a reward model that was trained with the chat template of this run"
        return shlex.join([f"data.tokenizer={self.directory}", "data.chat_template=auto"])

    @torch.no_grad()
    def __call__(
        self,
        rows: Sequence[list[int]],
        stopped: Sequence[bool],
        microbatch: int,
        device: Any,
        **_: Any,
    ) -> list[float]:
        """Return the score of each conversation.

        Args:
            rows: Token ids of each conversation, up to the end of the last answer.
            stopped: Whether the last answer of each conversation ended with a stop token.
            microbatch: Number of conversations per forward pass.
            device: Device of the reward model.
        """
        tokenizer = load_tokenizer(self.directory)
        if self._model is None:
            from transformers import AutoModelForSequenceClassification

            auto = AutoModelForSequenceClassification
            model = auto.from_pretrained(self.directory, dtype="auto")
            if self.inputs is not None:
                place = self.directory.absolute()
                checksum = state_checksum(model.state_dict())
                self.inputs.check(f"weights of the reward model {place}", checksum, place)
            self._model = model.to(device).eval()
        turns = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
        ids, trained_mask = encode_conversation(tokenizer, Conversation(turns))
        suffix = ids[len(trained_mask) - trained_mask[::-1].index(True) :]
        conversations = [row + suffix if end else row for row, end in zip(rows, stopped, strict=True)]
        pad, scores = self._model.config.get_text_config().pad_token_id, list[float]()
        for first in range(0, len(conversations), microbatch):
            part = [torch.tensor(row) for row in conversations[first : first + microbatch]]
            padded = torch.nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=pad)
            lengths = torch.tensor([[len(row)] for row in part])
            mask = (torch.arange(padded.shape[1]) < lengths).long()
            out = self._model(input_ids=padded.to(device), attention_mask=mask.to(device))
            scores += out.logits[:, 0].tolist()
        return scores
