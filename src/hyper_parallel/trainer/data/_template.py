"""Rendering of chat templates with a work budget, because a template is an untrusted program.

Templates are compiled in Jinja's immutable sandbox with most filters and globals of transformers. Loop iterations,
calls, filters, comparisons, operators and output are charged to a budget in proportion to the sizes of their operands.
The budget grows with the conversation. A template that exceeds its budget raises TemplateBudget. The budget limits
work, not time, so the result does not depend on the speed of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, Final

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hyper_parallel.trainer.data._template_work import (
    ITEM,
    MOST_BITS,
    READ,
    Counted,
    TemplateBudget,
    Work,
    as_text,
    charged,
    check_format,
    check_integers,
    deep_size,
    num_bytes_of,
    size_of,
    spend_method,
)

_MOST_SOURCE: Final = 128 * 1024
"""Maximum characters of a template."""
_DROPPED: Final = (
    "lipsum", "cycler", "joiner", "urlize", "striptags", "xmlattr", "wordwrap", "pprint",
)  # fmt: skip
"""Globals and filters of Jinja that chat templates do not use and whose work is hard to bound."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja sandbox that charges the steps of a template to a budget.

    Args:
        like: Environment of transformers; its extensions, filters and globals except `_DROPPED` are copied.

    Attributes:
        work: Budget of the current rendering.
    """

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, like: jinja2.Environment) -> None:
        self.work = work = Work()
        super().__init__(
            trim_blocks=like.trim_blocks,
            lstrip_blocks=like.lstrip_blocks,
            extensions=[type(extension) for extension in like.extensions.values()],
            finalize=work.finalize,
            optimized=False,
        )
        names = {k: v for k, v in like.globals.items() if k not in _DROPPED and k != "range"}
        self.globals = {"range": self.globals["range"], **names}
        self.filters = {name: charged(name, f, work) for name, f in like.filters.items() if name not in _DROPPED}
        self.filters |= {"_counted": self._counted, "_joined": self._joined}
        self.filters |= {"_compared": self._compared, "_copied": self._copied}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Charging().visit(super()._parse(source, name, filename))

    def _counted(self, values: Any) -> Counted:
        return Counted(values, self.work)

    def _joined(self, values: Sequence[Any]) -> str:
        texts = [v if isinstance(v, str) else as_text(v, self.work) for v in values]
        self.work.step()
        self.work.spend(sum(map(size_of, texts)))
        return "".join(texts)

    def _compared(self, value: Any) -> Any:
        self.work.step(value)
        if isinstance(value, (list, tuple, dict)):
            self.work.spend(deep_size(value) // ITEM)
        return value

    def _copied(self, value: Any) -> Any:
        self.work.step(value)
        self.work.spend(size_of(value))
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluate a binary operator, and charge operands and result; raise TemplateBudget beyond the limits."""
        self.work.step(left, right)
        if operator == "*":
            for text, count in ((left, right), (right, left)):
                if isinstance(text, (str, bytes, list, tuple)) and isinstance(count, int):
                    self.work.spend(size_of(text) * max(count, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > MOST_BITS:
                raise TemplateBudget(f"an integer of more than {MOST_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            check_format(left, right if isinstance(right, tuple) else (right,), self.work)
        return self.work.allocate(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, method or macro, and charge arguments and result; raise TemplateBudget beyond the limits."""
        work = __self.work
        work.step(*args)
        check_integers(args, kwargs)
        owner = getattr(__obj, "__self__", None)
        if isinstance(__obj, LoopContext) and args:  # call of a recursive loop
            args = (Counted(args[0], work), *args[1:])
        elif isinstance(owner, Extension):  # `{% generation %}` reads all output so far
            work.spend(work.printed // READ + work.num_pieces * ITEM)
        if isinstance(owner, (str, bytes)):
            work.step(owner)
            name = getattr(__obj, "__name__", "")
            if name == "join" and args:
                args = (list(Counted(args[0], work)), *args[1:])
            spend_method(name, owner, args, work)
        elif getattr(__obj, "__name__", "") in ("format", "format_map"):
            # The sandbox wraps these methods of `str`; `__wrapped__` is the original method.
            text = getattr(getattr(__obj, "__wrapped__", None), "__self__", "")
            check_format(text, [*args, *kwargs.values()], work)
        elif isinstance(owner, (list, tuple, dict)):
            work.step(owner)
        return work.allocate(super().call(__context, __obj, *args, **kwargs))


class _Charging(jinja2.visitor.NodeTransformer):
    """AST transformer that inserts charging filters around operators that Jinja compiles to plain Python."""

    def visit_TemplateData(self, node: nodes.TemplateData, *_: Any, **__: Any) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)

    def visit_For(self, node: nodes.For, *args: Any, **kwargs: Any) -> nodes.Node:
        self.generic_visit(node, *args, **kwargs)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat, *args: Any, **kwargs: Any) -> nodes.Node:
        self.generic_visit(node, *args, **kwargs)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "_joined", [], [], None, None, lineno=node.lineno)

    def visit_Compare(self, node: nodes.Compare, *args: Any, **kwargs: Any) -> nodes.Node:
        self.generic_visit(node, *args, **kwargs)
        node.expr = _filtered(node.expr, "_compared")
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "_compared")
        return node

    def visit_Getitem(self, node: nodes.Getitem, *args: Any, **kwargs: Any) -> nodes.Node:
        self.generic_visit(node, *args, **kwargs)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, "_copied")
        return node


def _filtered(node: nodes.Expr, name: str) -> nodes.Expr:
    if isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@lru_cache(maxsize=8)
def compiled(source: str) -> jinja2.Template:
    """Compile the source of a chat template in a `BoundedEnvironment`.

    Raises:
        jinja2.TemplateError: The source is not a valid template, or too long.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    if len(source) > _MOST_SOURCE:
        raise TemplateBudget(f"a template of more than {_MOST_SOURCE:,} characters")
    environment = BoundedEnvironment(_compile_jinja_template("").environment)
    environment.work.reset(0, 0)
    template = environment.from_string(source)
    template.globals = dict(template.globals)  # Jinja copies it in every call, which is slow for a ChainMap
    return template


def rendered(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    values: Mapping[str, Any],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    marks: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """Render a conversation; return its text, and the [start, end) spans inside `{% generation %}` blocks.

    Args:
        source: Source of the template.
        messages: Turns, each with the keys that the template reads.
        values: Additional variables of the template.
        tools: Functions that the assistant may call, as JSON schemas; if empty, the variable `tools` is None.
        marks: Whether to return the spans; False: the list is empty.

    Raises:
        Exception: Any error that the template raises; TemplateBudget when it exceeds its budget.
    """
    template = compiled(source)
    environment: Any = template.environment
    num_bytes = num_bytes_of([*messages, *tools, values])
    environment.work.reset(len(messages) + len(tools), num_bytes)
    pieces: list[str] = []
    marked: list[tuple[int, int]] = []
    variables = {"documents": None, **values, "tools": list(tools) or None}
    with environment.activate_tracker(pieces, marked) if marks else nullcontext():
        for piece in template.generate(messages=list(messages), **variables):
            pieces.append(piece)  # noqa: PERF402  # the tracker reads the pieces so far
    return "".join(pieces), marked


@lru_cache(maxsize=8)
def variables_of(source: str) -> frozenset[str]:
    """Return the names of all variables that a template reads without defining them."""
    environment: Any = compiled(source).environment
    return frozenset(meta.find_undeclared_variables(environment.parse(source)))
