"""One microbatch of one data-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.trainer.data._sequences import Int64


@dataclass(frozen=True)
class Batch:
    """Inputs, targets and padding of one microbatch."""

    input_ids: Int64  # [B, S]
    shift_labels: Int64  # [B, S]; the label at t is the token at t + 1, -100 where there is no loss
    num_valid: int  # labels that are not -100
    position_ids: Int64 | None = (
        None  # [B, S], 0 where a document begins; None: a row is one document
    )
    num_real: Int64 | None = None  # [B] tokens of each row before its padding; None: there is none

    @property
    def token_mask(self) -> NDArray[np.bool_] | None:
        """[B, S], False where a token is padding; None: none is."""
        if self.num_real is None:
            return None
        found: NDArray[np.bool_] = np.arange(self.input_ids.shape[1]) < self.num_real[:, None]
        return found
