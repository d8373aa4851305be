"""Names of the loss and of the counted records in reports, by stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple


class StageTerms(NamedTuple):
    """Wording of reports for one stage.

    Attributes:
        loss: Name of the loss.
        meaning: One sentence about the loss.
        records: Plural name of the data records that a step counts; empty: a step counts tokens.
        rows: Number of sequences per record.
    """

    loss: str
    meaning: str
    records: str = ""
    rows: int = 1


_TOKENS: Final = "Mean over the valid tokens of all ranks, in nats per token."
_PAIRS: Final = "Mean over the pairs of a step."
_STAGES: Final = {
    "pt": StageTerms("loss", _TOKENS),
    "sft": StageTerms("loss", "Mean over the target tokens of all ranks, in nats per token."),
    "dpo": StageTerms("DPO loss", _PAIRS, "pairs", 2),
    "orpo": StageTerms("ORPO loss", _PAIRS, "pairs", 2),
    "kto": StageTerms("KTO loss", "Mean over the answers of a step.", "answers", 2),
    "rm": StageTerms("reward-model loss", _PAIRS, "pairs", 2),
    "grpo": StageTerms("GRPO loss", "Policy loss; it is near 0 while rewards rise.", "completions"),
}
_DPO_LOSSES: Final = {
    "hinge": "hinge (SLiC) loss",
    "ipo": "IPO loss",
    "simpo": "SimPO loss",
    "orpo": "ORPO loss",
}


def stage_terms(settings: Mapping[str, Any]) -> StageTerms:
    """Return the wording for the stage of a recipe, given as values by dotted key."""
    stage = settings.get("stage")
    terms = _STAGES.get(f"{stage}", _STAGES["pt"])
    if stage == "dpo":
        terms = terms._replace(loss=_DPO_LOSSES.get(f"{settings.get('dpo.loss_type')}", terms.loss))
    return terms
