"""Rewards of completions by a reward model: a directory as `stage: rm` exports it, named among `grpo.reward_funcs`.

Every rank reads the model whole and scores its own conversations, in one pass without gradient. What the chat template
writes behind an answer is added first, as the model has seen it when it learned to score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.backends.torch.weights.checksums import state_checksum
from hyper_parallel.errors import Contradiction, ModelUnreadable
from hyper_parallel.model import read_config
from hyper_parallel.trainer.data import load_tokenizer
from hyper_parallel.trainer.data.chat import encode_conversation
from hyper_parallel.trainer.data.conversation import Conversation


@dataclass
class ModelReward:
    """Scores of one reward model; it is read when it first scores, which is after ranks were started.

    Attributes:
        directory: Holds config.json, weights and tokenizer.
        loaded: Called with the checksum of the model's parameters when they are read.
    """

    directory: Path
    loaded: Callable[[ModelReward, str], None] | None = None
    _model: Any = None

    def check(self, tokenizer_dir: str | Path, where: str) -> None:
        """Refuse, before a rank starts, another kind of directory, and a model that reads other tokens than the run's.

        Raises:
            ModelUnreadable: HP305. Contradiction: HP104.
        """
        try:
            config = read_config(self.directory).values
            kind = str((config.get("architectures") or [""])[0])[:80]
        except (LookupError, TypeError) as error:
            kind = str(error)
        if not kind.endswith("ForSequenceClassification"):
            raise ModelUnreadable(
                "a directory among the rewards is a reward model, such as `stage: rm` exports",
                where=f"{where}: {self.directory}",
                got=kind,
                allowed="a *ForSequenceClassification of one label",
            )
        mine, theirs = (load_tokenizer(d) for d in (self.directory, tokenizer_dir))
        if mine.get_vocab() != theirs.get_vocab() or mine.chat_template != theirs.chat_template:
            raise Contradiction(
                "the reward model reads other tokens, or another chat template, than the model that learns",
                where=f"{where}: {self.directory}",
                got=f"{len(mine)} tokens",
                allowed=f"the {len(theirs)} tokens of {tokenizer_dir}",
                hint=f"data.tokenizer={self.directory}",
            )

    @torch.no_grad()
    def __call__(
        self,
        rows: Sequence[list[int]],
        stopped: Sequence[bool],
        microbatch: int,
        device: Any,
        **_: Any,
    ) -> list[float]:
        """Score of each conversation; `stopped`: its last answer came to its end."""
        tokenizer = load_tokenizer(self.directory)
        if self._model is None:
            from transformers import AutoModelForSequenceClassification

            auto = AutoModelForSequenceClassification
            model = auto.from_pretrained(self.directory, dtype="auto")
            if self.loaded is not None:
                self.loaded(self, state_checksum(model.state_dict()))
            self._model = model.to(device).eval()
        turns = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
        ids, wrote = encode_conversation(tokenizer, Conversation(turns))
        behind = ids[len(wrote) - wrote[::-1].index(True) :]
        whole = [row + behind if end else row for row, end in zip(rows, stopped, strict=True)]
        pad, found = self._model.config.get_text_config().pad_token_id, list[float]()
        for first in range(0, len(whole), microbatch):
            part = [torch.tensor(row) for row in whole[first : first + microbatch]]
            given = torch.nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=pad)
            lengths = torch.tensor([[len(row)] for row in part])
            mask = (torch.arange(given.shape[1]) < lengths).long()
            out = self._model(input_ids=given.to(device), attention_mask=mask.to(device))
            found += out.logits[:, 0].tolist()
        return found
