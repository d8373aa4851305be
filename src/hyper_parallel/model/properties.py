"""Measured properties of a model class: answers to "does changing this input change that output?"."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Property:
    """Answer to one question about a model.

    Attributes:
        holds: Whether the property holds; None: it could not be measured.
        difference: Largest absolute difference between two outputs that should be equal, divided by the largest
            absolute value of the output.
        reason: Why it could not be measured.
        error: Whether the measurement raised an exception or gave numbers that are not finite.
    """

    holds: bool | None = None
    difference: float = 0.0
    reason: str = ""
    error: bool = False

    @property
    def agrees(self) -> bool:
        """Whether the two outputs were equal, or nothing was measured because the question does not apply."""
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
            depends neither on the tokens before it nor on its place in the row.
        padding_inert: Padding behind a text changes no output of the text.
        rows_independent: The output of a row does not depend on the other rows of the batch.
        history_independent: The output does not depend on what the model has read before.
        growing_cache: Decoding token by token with the model's own cache gives the logits of the whole text.
        fixed_cache: The same with a cache of fixed length, one text.
        slot_cache: The same with a cache of fixed length that holds several texts of different lengths.
        idle_modules: Outermost modules with parameters that a batch of text does not run.
        measured_on: The copy: sizes and how it was made.
    """

    model_class: str
    causal: Property = Property()
    documents_independent: Property = Property()
    padding_inert: Property = Property()
    rows_independent: Property = Property()
    history_independent: Property = Property()
    growing_cache: Property = Property()
    fixed_cache: Property = Property()
    slot_cache: Property = Property()
    idle_modules: tuple[str, ...] = ()
    measured_on: str = ""

    def questions(self) -> dict[str, Property]:
        """Return the answers by the name of the property."""
        answers = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in answers.items() if isinstance(value, Property)}


QUESTIONS: dict[str, str] = {
    "causal": "a token does not see later ones",
    "documents_independent": "packed documents do not see each other",
    "padding_inert": "padding behind a text does not change it",
    "rows_independent": "rows of a batch do not see each other",
    "history_independent": "earlier batches do not change the output",
    "growing_cache": "decoding with the model's own cache equals the whole text",
    "fixed_cache": "decoding with a cache of fixed length equals the whole text",
    "slot_cache": "decoding several texts in one cache equals each whole text",
}
"""What each property means, as `doctor --model` prints it."""
