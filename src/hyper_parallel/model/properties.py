"""Measured properties of a model class, such as whether an output depends on later tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Property:
    """Measured answer to a yes-or-no question about a model.

    Attributes:
        holds: Whether the property holds; None: not measured.
        difference: Largest absolute difference between two outputs that should be equal, divided by the largest
            absolute value of the output.
        reason: Reason why the property was not measured.
        error: Whether the measurement failed with an exception or non-finite numbers; `holds` is then None.
    """

    holds: bool | None = None
    difference: float = 0.0
    reason: str = ""
    error: bool = False

    @property
    def agrees(self) -> bool:
        """True if the property holds, or was not measured for a reason other than an error."""
        return self.holds is True or (self.holds is None and not self.error)

    def __str__(self) -> str:
        if self.holds is None:
            return f"not measured: {self.reason}"
        return f"{'yes' if self.holds else 'no'} (difference {self.difference:.1e})"


@dataclass(frozen=True, slots=True)
class ModelProperties:
    """Properties of a model, measured on a small float64 copy of its class with random weights.

    Attributes:
        model_class: Name of the class.
        causal: The output at a token does not depend on later tokens.
        documents_independent: In a packed row whose positions restart with each document, the output of a document
            depends neither on earlier tokens nor on its position in the row.
        padding_inert: Trailing padding does not change the output of a text.
        rows_independent: The output of a row does not depend on the other rows of the batch.
        half_batches: Decoder layers that run on two halves of the rows give the output of the whole batch.
        history_independent: The output does not depend on earlier forward passes.
        growing_cache: Decoding token by token with the model's cache gives the logits of the full text.
        fixed_cache: As `growing_cache`, with a cache of fixed length and one text.
        slot_cache: As `growing_cache`, with a cache of fixed length and several texts of different lengths.
        idle_modules: Outermost modules whose parameters get no gradient from a batch of text.
        measured_on: Sizes of the copy and how it was built, as text.
    """

    model_class: str
    causal: Property = Property()
    documents_independent: Property = Property()
    padding_inert: Property = Property()
    rows_independent: Property = Property()
    half_batches: Property = Property()
    history_independent: Property = Property()
    growing_cache: Property = Property()
    fixed_cache: Property = Property()
    slot_cache: Property = Property()
    idle_modules: tuple[str, ...] = ()
    measured_on: str = ""

    def by_name(self) -> dict[str, Property]:
        """Return the property of each key of `QUESTIONS`."""
        return {name: getattr(self, name) for name in QUESTIONS}


QUESTIONS: dict[str, str] = {
    "causal": "a token does not depend on later tokens",
    "documents_independent": "packed documents do not influence each other",
    "padding_inert": "padding after a text does not change its output",
    "rows_independent": "rows of a batch do not influence each other",
    "half_batches": "layers that run on half-batches give the same output",
    "history_independent": "earlier batches do not change the output",
    "growing_cache": "decoding with the model's own cache gives the logits of the full text",
    "fixed_cache": "decoding with a cache of fixed length gives the logits of the full text",
    "slot_cache": "decoding several texts in one cache gives the logits of each full text",
}
"""Meaning of each property, as printed by `doctor --model`."""
