"""Tokenization of a text with target spans (characters with loss), which must begin at token boundaries.

The tokens before a span must equal those of the same prompt in generation. The text is first tokenized as a whole. It
is cut at the start or end of a span that a token crosses. For example, `"ASSISTANT: "` and `return` share the token
`" return"`. After white space, it is also cut if the text before a span, tokenized alone, has different tokens. The
parts between cuts are then tokenized separately, without additional spaces, and their tokens are concatenated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

from hyper_parallel.errors import BadValue, abbreviated
from hyper_parallel.trainer.data.tokenizer_limits import tokenizing

_ANCHORS: Final = ("\n", "a", ".", "0")
"""Texts to prepend to a part, for tokenizers that insert a space before the first word of a text."""
_MOST_STEPS: Final = 64
"""Number of tokens at the end of a prompt among which `_restart` searches."""
_FAR_WORDS: Final = 8
"""Text after this many further words is assumed not to affect the tokens of a word."""
_SAMPLE: Final = (
    "A text:  it has 12 words\n\nand, after\tan empty line, `code()`... then a few "
    "more words. USER: why? ASSISTANT: it's so that every word\nhas 8 words behind it"
)
"""Text on which `_Facts.restarts` is measured."""
_MOST_TAILS: Final = 1024
"""Maximum number of prompt tails whose tokens are cached; each has fewer characters than this number."""
_MOST_ROUNDS: Final = 8
"""Maximum number of rounds of cutting and tokenizing a text."""
_PAIRS: Final = (("a", "b"), ("a ", "b"), ("a:", " b"), ("a\n", "\nb"), ("\u00fc", "\u6f22"))
"""Texts on which `_Facts.joins` is measured."""

Offsets = Sequence[tuple[int, int]]
Tokens = tuple[list[int], Offsets]
"""Token ids, and the [start, end) characters of each token."""


class _LazyOffsets(Sequence[tuple[int, int]]):
    """Sequence of the [start, end) characters of each token, computed on access because a search reads only a few."""

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding

    def __len__(self) -> int:
        return len(self._encoding)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) or index < 0:
            return self._encoding.offsets[index]
        if index >= len(self):
            raise IndexError(index)
        return self._encoding.token_to_chars(index)

    def word(self, index: int) -> int:
        """Return the index of the pre-tokenizer's word that contains token `index`; 0 if there are no words."""
        return self._encoding.token_to_word(index) or 0


@dataclass
class _Facts:
    """Measured properties of a tokenizer.

    Attributes:
        special: Ids of added tokens.
        joins: Whether the concatenated tokens of two texts decode to the concatenated texts.
        restarts: Whether the tokens of a word and of the text after it are independent of the text before the word.
        tails: Cached tokens of prompt tails.
    """

    special: frozenset[int]
    joins: bool
    restarts: bool
    tails: dict[str, list[int]] = field(default_factory=dict)


_KNOWN: Final[WeakKeyDictionary[Any, _Facts]] = WeakKeyDictionary()


def _facts_of(tokenizer: Any) -> _Facts:
    facts = _KNOWN.get(tokenizer)
    if facts is None:
        joins = all(
            _text(tokenizer, _tokens(tokenizer, one)[0] + _tokens(tokenizer, other)[0]) == one + other
            for one, other in _PAIRS
        )
        special = frozenset(tokenizer.added_tokens_decoder)
        facts = _KNOWN[tokenizer] = _Facts(special, joins, _restarts(tokenizer))
    return facts


def _restarts(tokenizer: Any) -> bool:
    """Return whether tokens from each word of `_SAMPLE` on do not depend on earlier text; False for few words."""
    ids, offsets = _tokens(tokenizer, _SAMPLE)
    starts = [k for k in range(1, len(ids)) if offsets.word(k) != offsets.word(k - 1)]
    return len(starts) > _FAR_WORDS and all(_tokens(tokenizer, _SAMPLE[offsets[k][0] :])[0] == ids[k:] for k in starts)


def ids_of(tokenizer: Any, text: str, where: str) -> list[int]:
    """Return the token ids of a text without added special tokens.

    Raises:
        BadValue: HP102 when the tokenizer fails.
    """
    with tokenizing(where):
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return list(ids)


def ids_behind(tokenizer: Any, token: int, text: str, where: str) -> list[int]:
    """Return the token ids of a text that follows the token id `token`, as if both were tokenized together.

    If this is not possible, return the token ids of the text alone.

    Raises:
        BadValue: HP102 when the tokenizer fails.
    """
    with tokenizing(where):
        before = tokenizer.decode([token])
        ids = list(tokenizer(before + text, add_special_tokens=False, verbose=False)["input_ids"])
    # Some tokenizers insert a token for a space before the first token of a text.
    first = next((i for i in range(min(2, len(ids))) if ids[i] == token), None)
    return ids_of(tokenizer, text, where) if first is None else ids[first + 1 :]


def tokens_of_spans(
    tokenizer: Any, text: str, spans: Sequence[tuple[int, int]], where: str
) -> tuple[list[int], list[bool]]:
    """Return the token ids of a text, and for each whether it is a target.

    Args:
        tokenizer: Fast tokenizer of transformers.
        text: Text to tokenize.
        spans: [start, end) characters of the target spans, in order and disjoint.
        where: Location of the record, for error messages.

    Raises:
        BadValue: HP102 when the tokenizer fails, or no tokens with boundaries at the spans reproduce the text.
    """
    with tokenizing(where, "data.tokenizer=TOKENIZER_DIR"):
        spans = [span for span in spans if span[0] < span[1]]
        facts = _facts_of(tokenizer)
        cuts: set[int] = set()
        ids, offsets = _tokens(tokenizer, text)
        for _ in range(_MOST_ROUNDS):
            added = {*_borders(tokenizer, facts, text, (ids, offsets), spans, cuts)} - cuts
            if not added:
                return ids, _targets(offsets, spans)
            cuts |= added
            ids, offsets = _tokens_of_parts(tokenizer, facts, text, sorted(cuts), where)
    raise BadValue(
        "the tokenizer joins the end of the prompt and the start of the answer into one token",
        where=where,
        got=abbreviated(text[-80:]),
        hint="end the prompt with a special token or a line end",
    )


def _borders(
    tokenizer: Any,
    facts: _Facts,
    text: str,
    tokens: Tokens,
    spans: Sequence[tuple[int, int]],
    cuts: set[int],
) -> Iterator[int]:
    """Yield the starts and ends of spans at which the text must be cut, given the tokens with the current `cuts`."""
    ids, offsets = tokens
    for start, end in spans:
        token = _first_token(offsets, start)
        if token and offsets[token - 1][1] > start:
            yield start
        elif start and start not in cuts and text[start - 1].isspace():
            prompt = text[:start]
            yield from [start] * (not _is_prompt(tokenizer, facts, prompt, ids[:token], offsets))
        token = _first_token(offsets, end)
        # A special token may include the white space after it; that needs no cut.
        if token and offsets[token - 1][1] > end and text[end : offsets[token - 1][1]].strip():
            yield end


def _is_prompt(tokenizer: Any, facts: _Facts, prompt: str, ids: Sequence[int], offsets: Offsets) -> bool:
    # To save time, first compare only the tail from a token on that does not depend on the text before it.
    begin = _restart(facts, ids, offsets)
    tail = prompt[offsets[begin][0] :] if begin else prompt
    known = facts.tails.get(tail)
    if known is None:
        known = _tokens(tokenizer, tail)[0]
        if len(tail) < _MOST_TAILS and len(facts.tails) < _MOST_TAILS:
            facts.tails[tail] = known
    return known == ids[begin:] or (begin > 0 and _tokens(tokenizer, prompt)[0] == ids)


def _restart(facts: _Facts, ids: Sequence[int], offsets: Offsets) -> int:
    """Return the index of a token near the end of a prompt; tokens from it on do not depend on the text before it.

    The token is the last added token or, if there is none and `facts.restarts`, the first token of a word at least
    `_FAR_WORDS` words before the end. Return 0 if the last `_MOST_STEPS` tokens contain no such token.
    """
    first = max(0, len(ids) - _MOST_STEPS)
    steps = range(len(ids) - 1, first - 1, -1)
    if (special := next((k for k in steps if ids[k] in facts.special), None)) is not None:
        return special
    if facts.restarts and isinstance(offsets, _LazyOffsets):
        end = offsets.word(len(ids) - 1) - _FAR_WORDS
        return next((k for k in steps if k and offsets.word(k - 1) < offsets.word(k) <= end), 0)
    return 0


def _tokens_of_parts(tokenizer: Any, facts: _Facts, text: str, cuts: Sequence[int], where: str) -> Tokens:
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    before: tuple[str, list[int]] = ("", [])
    for start, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
        part = text[start:end]
        own, places = (
            _continued(tokenizer, before, part, where) if start and not facts.joins else _tokens(tokenizer, part)
        )
        ids += own
        offsets += [(first + start, last + start) for first, last in places]
        before = (part, own)
    return ids, offsets


def _continued(tokenizer: Any, before: tuple[str, list[int]], part: str, where: str) -> Tokens:
    """Return tokens of `part` that fit after `before`, the previous (part, ids); if none do, raise BadValue (HP102).

    Tokens fit if they add the text that tokenizing both parts together adds. If no candidate does, tokens fit whose
    text agrees with `part` up to and including its first character that is not white space.
    """
    context, ids = before
    decoded = _text(tokenizer, ids)
    alone, whole = (_text(tokenizer, _tokens(tokenizer, one)[0]) for one in (context, context + part))
    candidates = list(_candidates(tokenizer, part))
    added = [_text(tokenizer, ids + own)[len(decoded) :] for own, _ in candidates]
    size = len(part) - len(part.lstrip()) + 1
    for wanted, end in ((whole[len(alone) :], None), (part, size)):
        for candidate, text in zip(candidates, added, strict=True):
            if text[:end] == wanted[:end]:
                return candidate
    raise BadValue(
        "the tokenizer cannot continue a prompt with an answer without inserting a space between them",
        where=where,
        got=f"{abbreviated(context[-40:])} + {abbreviated(part[:40])}",
        allowed="a prompt that ends with a special token or a line end",
    )


def _candidates(tokenizer: Any, part: str) -> Iterator[Tokens]:
    """Yield candidate tokens of a part: of the part alone, then with and without leading space after `_ANCHORS`."""
    yield _tokens(tokenizer, part)
    stripped = part.lstrip()  # some tokenizers merge white space into one space
    for text in (part, stripped) if stripped != part else (part,):
        for anchor in _ANCHORS:
            alone = _tokens(tokenizer, anchor)[0]
            ids, offsets = _tokens(tokenizer, anchor + text)
            size, count = len(anchor), len(alone)
            shifted = [(max(0, a - size), max(0, b - size)) for a, b in offsets[count:]]
            is_disjoint = all(a >= size for a, b in offsets[count:] if b > a)
            if ids[:count] == alone and is_disjoint:
                shift = len(part) - len(text)
                yield ids[count:], [(a + shift, b + shift) for a, b in shifted]


def _first_token(offsets: Offsets, position: int) -> int:
    return bisect_left(offsets, (position, -1))


def _targets(offsets: Offsets, spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Return, for each token, whether it contains a character of a span.

    An empty token, such as a word-start marker, is a target if a span contains its position.
    """
    targets = [False] * len(offsets)
    for start, end in spans:
        token, stop = _first_token(offsets, start), _first_token(offsets, end)
        while token and offsets[token - 1][1] > start:
            token -= 1
        targets[token:stop] = [True] * (stop - token)
    return targets


def _tokens(tokenizer: Any, text: str) -> Tokens:
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    encoding = backend.encode(text, add_special_tokens=False)
    return encoding.ids, _LazyOffsets(encoding)


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
