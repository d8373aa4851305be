"""Hostile chat templates: each ends with one coded refusal, after a bounded amount of work."""

import pytest

pytestmark = [pytest.mark.unit, pytest.mark.torch]
pytest.importorskip("transformers")

from hyper_parallel.trainer.data import CHATML, PLAIN, render, stop_ids  # noqa: E402
from hyper_parallel.trainer.data.chat import encode_conversation  # noqa: E402
from hyper_parallel.trainer.data.document import Conversation  # noqa: E402
from tests.received.bounds import refusal, within_bounds  # noqa: E402
from tests.received.tokenizers import small, with_template  # noqa: E402

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
DOUBLED = "{% set ns = namespace(s=START) %}{% for i in range(60) %}{% set ns.s = STEP %}{% endfor %}{{ ns.s USE }}"
SHARED = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ USE }}"
)
OFTEN = "{% for a in range(100000) %}{% for b in range(100000) %}USE{% endfor %}{% endfor %}"
LONG = "{% set s = 'x' * 100000 %}{{ USE }}"


def doubled(start: str, step: str, use: str = "| length") -> str:
    return DOUBLED.replace("START", start).replace("STEP", step).replace("USE", use)


REFUSED = {
    "division": ("{{ 1 / 0 }}", "division by zero"),
    "recursion": ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
    "product": ("{{ 'x' * 10**10 }}", "more work"),
    "product of a list": ("{{ ([1] * 10**10) | length }}", "more work"),
    "power": ("{{ 7 ** 1000000 }}", "bits"),
    "squares": (doubled("7", "ns.s * ns.s", ""), "bits"),
    "doubled text": (doubled("'x'", "ns.s ~ ns.s"), "more work"),
    "doubled sum": (doubled("'x'", "ns.s + ns.s"), "more work"),
    "doubled list": (doubled("[1]", "ns.s + ns.s"), "more work"),
    "doubled block": (
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"
        "{% endfor %}",
        "more work",
    ),
    "loops": (OFTEN.replace("USE", ""), "more work"),
    "loops that print": (OFTEN.replace("USE", "x" * 500), "more work"),
    "loop of a number": ("{% for a in range(10**9) %}{% endfor %}", "a number above"),
    "recursive loop": (
        "{% for a in range(9) recursive %}{% if loop.depth < 9 %}{{ loop(range(100000)) }}{% endif %}{% endfor %}",
        "more work",
    ),
    "macros": (
        "{% macro a(n) %}{% if n %}{{ a(n-1) }}{{ a(n-1) }}{% endif %}{% endmacro %}{{ a(60) }}",
        "more work",
    ),
    "slices": (LONG.replace("{{ USE }}", OFTEN.replace("USE", "{% set t = s[1:] %}")), "more work"),
    "search": (LONG.replace("{{ USE }}", OFTEN.replace("USE", "{{ 'yx' in s }}")), "more work"),
    "copies": (OFTEN.replace("USE", "{{ range(100000) | max }}"), "more work"),
    "batches": (
        OFTEN.replace("USE", "{% for c in [1] | batch(1000000, 0) %}{% endfor %}"),
        "more work",
    ),
    "center": ("{{ 'x' | center(10**10) }}", "a number above"),
    "constant center": ("{{ 'x' | center(99999999999) }}", "a number above"),
    "ljust": ("{{ 'x'.ljust(10**10) }}", "a number above"),
    "filter of a block": ("{% filter center(10**10) %}x{% endfilter %}", "a number above"),
    "replace": (LONG.replace("USE", "s | replace('x', s)"), "more work"),
    "replace nothing": (LONG.replace("USE", "s.replace('', s)"), "more work"),
    "join": (LONG.replace("USE", "range(100000) | join(s)"), "more work"),
    "join by a method": (LONG.replace("USE", "s.join(s)"), "more work"),
    "translate": (LONG.replace("USE", "s.translate({120: s})"), "more work"),
    "indent": ("{{ ('\\n' * 100000) | indent(1000000, blank=true) }}", "more work"),
    "expandtabs": ("{{ ('\\t' * 100000).expandtabs(1000000) }}", "more work"),
    "format": ("{{ '%10000000000d' % 1 }}", "width"),
    "format by a filter": ("{{ '%10000000000d' | format(1) }}", "width"),
    "format by an argument": ("{{ '%*d' % (10000000000, 1) }}", "width"),
    "format in braces": ("{{ '{:10000000000}'.format(1) }}", "width"),
    "format in braces by an argument": ("{{ '{:{}}'.format(1, 1000000) }}", "width"),
    "tojson": ("{{ [[[[1]]]] | tojson(indent=1000000) }}", "tojson"),
    "shared tojson": (SHARED.replace("USE", "ns.a | tojson"), "holds more"),
    "shared text": (SHARED.replace("USE", "ns.a ~ 'x'"), "holds more"),
    "shared comparison": (SHARED.replace("USE", "ns.a == ns.b"), "holds more"),
    "sum of lists": ("{{ ([[1] * 1000] * 1000) | sum(start=[]) }}", "adds numbers"),
    "list of a text": ("{{ ('x' * 10000000) | list | length }}", "more work"),
    "split": ("{{ ('x ' * 5000000).split() | length }}", "more work"),
    "number of digits": ("{{ ('f' * 100000) | int(0, 16) }}", "bits"),
    "filler": ("{{ lipsum(n=100000) }}", "undefined"),
    "include": ("{% include '/etc/passwd' %}", "loader"),
    "syntax": ("{% for %}", "Expected"),
    "nested": ("{{ " + "(" * 20_000 + ")" * 20_000 + " }}", "recursion"),
    "nested blocks": ("{% if x %}" * 5000 + "{% endif %}" * 5000, "recursion"),
    "long": ("{{ x }}" * 100_000, "characters"),
    "its own message": ("{{ raise_exception('\x1b[31mred\u202e') }}", "\\u001b[31mred\\u202e"),
    "no text": (5, "HP102"),
    "escape": ("{{ ''.__class__.__mro__ }}", "unsafe"),
}


_PAUSES = "recursive loop"
"""Takes 0.7 s of its own, and 8 s once at its place in the whole suite; the cause is not known."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == _PAUSES else ()) for n in REFUSED])
def test_a_template_is_refused_with_a_code(name: str) -> None:
    template, word = REFUSED[name]
    tokenizer = with_template(template)
    refusal(lambda: render(tokenizer, TURNS, where="rows:1"), "HP102", word, "rows:1")


@pytest.mark.parametrize("name", ["syntax", "nested", "long"])
def test_a_template_is_refused_with_a_code_for_a_record_with_variables(name: str) -> None:
    template, word = REFUSED[name]
    record = Conversation(tuple(TURNS), template_values={"style": "short"})
    refusal(lambda: render(with_template(template), record, where="rows:1"), "HP102", word, "rows:1")


def test_end_markers_of_a_template_without_end_are_refused() -> None:
    tokenizer = with_template(REFUSED["macros"][0])
    refusal(lambda: stop_ids(tokenizer), "HP102", "more work")


def test_marks_of_a_template_are_work_as_well() -> None:
    template = "{% for a in range(100000) %}x{{ a }}{% generation %}y{% endgeneration %}{% endfor %}"
    refusal(
        lambda: encode_conversation(with_template(template), Conversation(tuple(TURNS))),
        "HP102",
        "more work",
    )


@pytest.mark.parametrize("template", [CHATML, PLAIN])
def test_a_long_conversation_is_rendered_as_by_transformers(template: str) -> None:
    turns = [{"role": ("user", "assistant")[n % 2], "content": "word " * 200} for n in range(2000)]
    tokenizer = with_template(template)
    with within_bounds():
        assert render(tokenizer, turns) == small().apply_chat_template(turns, tokenize=False)


def test_a_template_with_every_construct_is_rendered_as_by_transformers() -> None:
    template = """{%- set ns = namespace(first=true, text='') -%}
{%- macro head(role, mark='|') -%}<{{ mark ~ role ~ mark }}>{%- endmacro -%}
{%- for message in messages if message.role != 'tool' -%}
{%- if loop.first and message['role'] == 'system' -%}{{ message.content | trim | upper }}{%- continue -%}{%- endif -%}
{{- head(message.role) + '%s-%d' % (message.content[1:3], loop.index0) + ('=' * 3) -}}
{%- set ns.text = ns.text + message.content.split('l')[0].strip().replace('H', 'h') -%}
{{- {'a': [1, 2.5, none, true], 'b': message.content} | tojson(indent=2) -}}
{{- messages | map(attribute='role') | unique | sort | join(', ') -}}{{ messages[::-1][0].role }}
{{- "{:>6}".format(loop.length) if not loop.last else loop.revindex -}}{{ message.get('x', 'none') | default('d') }}
{%- endfor -%}{{ ns.text | length }}{{ [3, 1] | sum }}{{ (1, 2) | list }}{{ 7 // 2 ** 2 }}
{{- 'a' in 'abc' and 'x' not in [1] }}
{%- call(x) head2() -%}{{ x }}{%- endcall -%}{{ bos_token }}{{ eos_token }}{{ range(3) | list }}"""
    template = template.replace(
        "{%- macro head(",
        "{%- macro head2() -%}[{{ caller('c') }}]{%- endmacro -%}{%- macro head(",
        1,
    )
    turns = [{"role": "system", "content": " be brief "}, *TURNS, *TURNS]
    tokenizer = with_template(template)
    text = render(tokenizer, turns)
    assert text == small().apply_chat_template(turns, tokenize=False)
    assert "<|user|>i-1===" in text
