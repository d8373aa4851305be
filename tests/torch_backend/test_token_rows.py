"""Rows of experts that get a part of the tokens, such as those of images."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel.backends.torch.pass_context import Padding, PassContext, RunningPass
from hyper_parallel.backends.torch.token_rows import Tokens
from hyper_parallel.errors import UnsupportedSharding

pytestmark = pytest.mark.torch


def with_padding(real: torch.Tensor) -> Tokens:
    return Tokens(running=RunningPass(PassContext(padding=Padding(real, unread=True))))


def test_a_part_of_the_tokens_has_no_padding_if_the_batch_has_none() -> None:
    tokens = with_padding(torch.ones(19, dtype=torch.bool))
    assert tokens.own_tokens(15, torch.device("cpu")) == (None, None)


def test_padding_among_a_part_of_the_tokens_is_refused() -> None:
    real = torch.arange(19) < 17
    tokens = with_padding(real)
    assert torch.equal(tokens.own_tokens(19, torch.device("cpu"))[1], real)
    with pytest.raises(UnsupportedSharding, match="HP205") as caught:
        tokens.own_tokens(15, torch.device("cpu"))
    assert "`training.microbatch=1`" in caught.value.hint
