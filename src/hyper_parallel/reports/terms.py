"""Wording of reports: labels and colours of spans and cost terms, and names of the loss and the records by stage."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

_ACTION: Final = re.compile(r"(\d+)\s?([A-Za-z_]+?)(\d+)?")
"""Pipeline action such as `2F0`, `1RECV_B3`, `0REDUCE_GRAD` or `0 update`: stage, operation, microbatch."""
_STAGE: Final = re.compile(r"(\d+) ")
"""Stage before a term of the step time, as in `0 gradient norm`."""
_ACTIONS: Final = {
    "F": ("forward", "forward"),
    "B": ("backward", "backward"),
    "I": ("backward of inputs", "backward of inputs"),
    "W": ("backward of weights", "backward of weights"),
    "SEND_F": ("communication", "send activations"),
    "SEND_B": ("communication", "send gradients"),
    "RECV_F": ("waiting", "wait for activations"),
    "RECV_B": ("waiting", "wait for gradients"),
    "REDUCE_GRAD": ("communication", "gradient reduction"),
    "UNSHARD": ("communication", "gather parameters"),
    "update": ("optimizer", "gradient norm and optimizer"),
}
"""Kind and label of each operation of an action."""
_NAMES_OF_KINDS: Final = {
    "waiting": ("wait", "pipeline bubble", "stragglers"),
    "data and host": ("data", "every step", "host"),
    "optimizer": ("update",),
    "parameters": ("weight", "expert"),
    "gradients": ("gradient",),
    "optimizer states": ("optimizer state",),
    "communication": (
        "pipeline sends", "gradient norm", "gradient reduction", "data-parallel reduction", "loss", "routing",
    ),
    "copies": ("offload copies",),
}  # fmt: skip
_KINDS: Final = {name: kind for kind, names in _NAMES_OF_KINDS.items() for name in names}
BOTH, MOVING, WHOLE = "forward and backward", "activations and buffers", "not broken down"
STATES: Final = ("parameters", "gradients", "optimizer states")
COLORS: Final = {
    "forward": "#1f77b4",
    "backward": "#ff7f0e",
    "backward of inputs": "#ffbb78",
    "backward of weights": "#8c564b",
    BOTH: "#7a9cc6",
    "recompute": "#0b7285",
    "rollout": "#f783ac",
    "communication": "#9467bd",
    "optimizer": "#2ca02c",
    "waiting": "#b4b8be",
    "data and host": "#bcbd22",
    "copies": "#e64980",
    "parameters": "#17becf",
    "gradients": "#e377c2",
    "optimizer states": "#98df8a",
    MOVING: "#d8a657",
    "offloaded": "#6c757d",
    WHOLE: "#495057",
}
"""Colour of each kind of time and memory."""
RESUMED: Final = "#66a80f"
"""Colour of lines that mark resumes."""
RUNS: Final = (
    "#d6336c",
    "#1c7ed6",
    "#f08c00",
    "#2b8a3e",
    "#7048e8",
    "#0c8599",
    "#a0522d",
    "#868e96",
)
"""Colours of the runs on a page, used cyclically and distinct from the colours of kinds."""


def kind_of(name: str, category: str = "") -> str:
    """Return the kind of a span or of a cost term of the step time; a kind is a key of `COLORS`."""
    action = _ACTION.fullmatch(name)
    if action and action[2] in _ACTIONS:
        return _ACTIONS[action[2]][0]
    name = _STAGE.sub("", name)
    kind = _KINDS.get(name, name)
    if kind in COLORS:
        return kind
    if category == "wait":
        return "waiting"
    if category == "in flight" or "communication" in (category, name.rpartition(" ")[2]):
        return "communication"
    return BOTH


def words(name: str) -> str:
    """Return a readable label for the name of a span: `forward, stage 2, microbatch 0` for `2F0`."""
    action = _ACTION.fullmatch(name)
    if not action or action[2] not in _ACTIONS:
        if stage := _STAGE.match(name):
            return f"{name[stage.end() :]}, stage {stage[1]}"
        return _KINDS.get(name, name) if name in ("weight", "expert", "wait", "update") else name
    microbatch = f", microbatch {action[3]}" if action[3] else ""
    return f"{_ACTIONS[action[2]][1]}, stage {action[1]}{microbatch}"


def time_kind(name: str) -> str:
    """Return the kind of a cost term of the step time; forward, backward and recompute have the same kind."""
    kind = kind_of(name)
    return BOTH if kind.startswith(("forward", "backward", "recompute")) else kind


def memory_kind(name: str) -> str:
    """Return the kind of a memory term of a plan: one of `STATES`, `offloaded`, or `MOVING` for any other memory."""
    kind = _KINDS.get(name, "optimizer states" if name == "optimizer" else name)
    return kind if kind in STATES else "offloaded" if name.startswith("offloaded") else MOVING


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
