"""Tensor parallelism of one block, 1-D, 2-D or weight-moving: elements sent, gathers and scatters, by formula.

Notation: T tokens of one microbatch in the tensor-parallel group, P = x y ranks. A block is a column matmul (h to O)
and a row matmul (I to h). Per device, in elements; a ring over g ranks sends (g-1)/g of what is gathered.

    1d       T h (P-1)/P each: gather and scatter forward; backward as many, and a gather more when the gathered
             input is not kept
    2d       forward T/P [2h (x-1) + (O + I)(y-1)]: inputs are gathered over one axis, outputs scattered over the
             other; backward gathers dY, scatters dX, and gathers X again when it was not kept
             attention on spans of the sequence also gathers keys and values over y, T/P 2k (y-1), and scatters
             their gradients
    weight   x as 1d on T/y tokens; weights gathered over y in forward and backward, their gradients scattered;
             attention also gathers keys and values and scatters their gradients

Sources: Korthikanti et al. 2022, section 4.2.2 (1d); Xu et al. 2021 (GSPMD), section 3.2 and Pope et al. 2022, section
3.2 (2-D weight-stationary); weight-gathered layouts Pope et al. 2022, section 3.2.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._numbers import ModelNumbers

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BlockWidths:
    """Widths of one block, as its two matmuls see them.

    Attributes:
        hidden: h, width of the residual stream.
        outputs: O, width of the column matmul's output: h + 2k for attention, 2f gated.
        inputs: I, width of the row matmul's input: the value heads, f.
        weights: Elements of the matrices.
        kv: Width of all key heads; 0 for a feed-forward block.
        kv_heads: Key and value heads; 0 for a feed-forward block.
    """

    hidden: float
    outputs: float
    inputs: float
    weights: float
    kv: float = 0.0
    kv_heads: int = 0

    @classmethod
    def attention(cls, n: ModelNumbers) -> BlockWidths:
        """The attention block of a mean layer."""
        outputs = float(n.q_width + 2 * n.k_width)
        return cls(n.hidden, outputs, n.v_width, n.attention_weights, n.k_width, n.num_kv_heads)

    @classmethod
    def mlp(cls, n: ModelNumbers) -> BlockWidths:
        """The feed-forward block of a mean layer: dense part, shared and visited experts."""
        wide = [m for m in n.matmuls if m.part != "attention"]
        outputs = sum(m.outputs * m.count for m in wide if not m.row)
        inputs = sum(m.inputs * m.count for m in wide if m.row)
        weights = n.mlp_weights + n.expert_weights
        return cls(n.hidden, outputs, inputs, weights)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Elements one device sends for one block, layer and microbatch.

    Attributes:
        x: Over tp_x; for a 1-D block over the whole tensor-parallel group.
        y: Over tp_y.
        collectives_x: Collectives over x (or the whole group).
        collectives_y: Collectives over y.
    """

    x: Array
    y: Array
    collectives_x: Array
    collectives_y: Array

    @property
    def total(self) -> Array:
        """All elements."""
        return self.x + self.y


def block_traffic(
    widths: BlockWidths,
    shape: Array,
    tokens: Array,
    x: Array,
    y: Array,
    *,
    keep: Array | float = 1.0,
    keep_kv: Array | float | None = None,
    spans: Array | float = 0.0,
    backward: bool = True,
) -> Traffic:
    """Traffic of one block, forward and (with `backward`) backward.

    Args:
        widths: The block.
        shape: Index into `SHAPES`; without meaning where y = 1.
        tokens: T.
        x: Ranks on x.
        y: Ranks on y.
        keep: 1 when gathered inputs are kept for backward, 0 when they are gathered again.
        keep_kv: The same of keys and values that are gathered over y; None: as `keep`.
        spans: 1 when 2-D attention works on spans of the sequence (scatters tokens over y), 0 on heads.
        backward: Whether backward is included.
    """
    w, ranks, once = widths, x * y, tokens / (x * y)
    both = float(backward)
    # Forward gathers the input and scatters the output; backward gathers dY, scatters dX and perhaps gathers X.
    of_input = 1.0 + both * (2.0 - keep)
    of_output = 1.0 + both
    one = w.hidden * (of_input + of_output)
    line = once * one * (ranks - 1)
    calls = np.where(ranks > 1, of_input + of_output, 0.0)
    # The column matmul reads over x and writes over y, the row matmul the other way round.
    plane_x = once * one * (x - 1)
    plane_y = once * (w.outputs * of_output + w.inputs * of_input) * (y - 1)
    of_kv = 1.0 + both * (2.0 - (keep if keep_kv is None else keep_kv))
    gathered_kv = once * 2.0 * w.kv * (y - 1) * of_kv
    if w.kv_heads:
        doubled = np.where(np.mod(w.kv_heads, ranks) > 0, once * 2.0 * w.kv * (y - 1), 0.0)
        plane_y = plane_y + np.where(spans > 0, gathered_kv, doubled * (1.0 + both))
    moved = w.weights * (y - 1) / ranks * (1.0 + 2.0 * both) + gathered_kv
    is_1d, is_2d = (shape == 0) | (y <= 1), (shape == 1) & (y > 1)
    calls_x = np.where(x > 1, calls, 0.0)
    calls_y = np.where(y > 1, np.where(is_2d, of_input + of_output, 2.0 + 2.0 * both), 0.0)
    return Traffic(
        np.where(is_1d, line, plane_x),
        np.where(is_1d, 0.0, np.where(is_2d, plane_y, moved)),
        np.where(is_1d, calls, calls_x),
        np.where(is_1d, 0.0, calls_y),
    )


def relayout_elements(
    hidden: float, attention: Array, mlp: Array, tokens: Array, x: Array, y: Array
) -> Array:
    """Elements a device sends between blocks that leave the boundary in different layouts, one way, once.

    2-D blocks leave [T/x, h/y], the others [T/P, h]: an all-to-all inside y of T h / P elements.
    """
    differ = ((attention == 1) != (mlp == 1)) & (y > 1)
    return np.where(differ, tokens * hidden / (x * y) * (y - 1) / y, 0.0)
