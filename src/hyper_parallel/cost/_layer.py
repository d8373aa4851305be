"""Compute seconds of one decoder layer and microbatch on one rank, as arrays over candidate strategies.

Letters: T tokens of the microbatch in a tensor-parallel group, P tensor-parallel ranks, d FSDP ranks
(dp_shard x cp), b bytes of the compute format; h, k, f, V as in `_numbers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from hyper_parallel.cost._pricing_case import Machine, PricingCase
from hyper_parallel.cost.candidates import SHAPES, Array

SCORE_BYTES = 13.0
"""Bytes per attention score that unfused attention reads and writes in forward, in half precision.

The products write and read the scores (4), the softmax reads and writes them (4), dropout reads, writes and masks them
(5).
"""

PASSES: Final = (0.4, 0.6)
"""Fractions of a stack's `passes` and `bias_passes` in forward and in backward."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds of computation of one layer per microbatch and rank, by kind of kernel, and bytes saved for backward."""

    matmul: Array  # matmuls of attention projections, feed-forward part and experts, forward; backward takes twice that
    attention: Array  # attention scores and their product with the values, forward
    attention_backward: Array  # attention scores and their product with the values, backward
    elementwise: Array  # element-wise kernels, forward
    elementwise_backward: Array  # element-wise kernels, backward
    quantize: Array  # casting matmul inputs to 8 or 4 bits, forward
    quantize_backward: Array  # casting output gradients, backward
    recompute: Array  # recomputed forward work in backward
    # kernel launches and host work that kernels do not hide, in forward, backward and recomputation
    launch: Array
    # bytes saved for backward without recomputation, and outputs of experts, divided by the tensor-parallel ranks
    saved_bytes: Array

    @property
    def forward(self) -> Array:
        """Seconds of the forward, without kernel launches."""
        return self.matmul + self.attention + self.elementwise + self.quantize

    @property
    def backward(self) -> Array:
        """Seconds of the backward, without kernel launches and recomputation."""
        products = 2.0 * self.matmul + self.attention_backward
        return products + self.elementwise_backward + self.quantize_backward

    @property
    def launched_forward(self) -> Array:
        """Seconds of the forward with its kernel launches, approximately one third of `launch`."""
        return self.forward + self.launch / 3.0

    @property
    def launched_backward(self) -> Array:
        """Seconds of the backward and of recomputation with their kernel launches, two thirds of `launch`."""
        return self.backward + self.recompute + self.launch / 1.5


def matmul_seconds(machine: Machine, rows: Array, outputs: Array | float, inputs: Array | float) -> Array:
    """Return the seconds of a matmul of [rows, inputs] with [inputs, outputs].

    For sizes M x K x N, the achieved fraction of the peak FLOP/s is e0 M/(M+s) N/(N+s) K/(K+s). Here e0 is the fraction
    of a large matmul, and s is `Machine.saturation`. With `DeviceCard.few_rows`, kernels of M rows take longer by the
    factor 1 + 4 c M r / (M + r)^2, for r `rows` and c `cost`.
    """
    s, few = machine.saturation, machine.card.few_rows
    stretch = (1.0 + s / rows) * (1.0 + s / outputs) * (1.0 + s / inputs)
    if few:
        stretch = stretch * (1.0 + 4.0 * few["cost"] * rows * few["rows"] / (rows + few["rows"]) ** 2)
    return 2.0 * rows * outputs * inputs / machine.matmul_flops * stretch


def layer_compute(s: PricingCase) -> Compute:
    """Return the compute seconds of one average layer."""
    n, machine, c, tokens = s.n, s.machine, s.c, s.tokens
    stack = machine.stack
    matmul = matmuls(s)
    attention, attention_backward = _attention(s)

    dense, expert = n.saved_elements, n.expert_saved_width
    routed = s.over_tp(s.uncut.stream)
    biases = stack.bias_passes * n.bias_width / c.tp
    seconds = tokens * machine.width / machine.passing_bytes_s
    elementwise, elementwise_backward = (
        seconds * (sum(moved) + share * biases) for moved, share in zip(moved_elements(s), PASSES, strict=True)
    )

    cast = stack.quantize_bytes.get(machine.matmul_dtype, 0.0) / machine.passing_bytes_s
    inputs = sum(m.inputs * m.count for m in n.matmuls)
    outputs = sum(m.outputs * m.count for m in n.matmuls)
    quantize = tokens / c.tp * inputs * cast
    quantize_backward = tokens / c.tp * outputs * cast

    full, selective = c.recompute > 1, c.recompute == 1
    # Operator-level selective recomputation also recomputes the cheap operators around its matmuls.
    redone_elementwise = elementwise if stack.selective_matmul else 0.0
    forward = matmul + attention + elementwise + quantize
    part = stack.selective_matmul * matmul + stack.selective_attention * attention + redone_elementwise
    recompute = np.where(full, forward, np.where(selective, part, 0.0))

    backward = 2.0 * matmul + attention_backward + elementwise_backward + quantize_backward
    norms = n.head_norms * stack.kernels_norm
    launch = forward_launch(s, forward) * np.where(full, 2.0, 1.0)
    launch = launch + _exposed_launches(machine, backward, stack.kernels_backward + 0.75 * norms)
    copies = tokens * routed * n.experts_per_token
    launch = launch + n.moe_share * stack.moe_host_s + copies * stack.moe_copy_s
    return Compute(
        matmul, attention, attention_backward, elementwise, elementwise_backward, quantize, quantize_backward,
        recompute, launch, (dense + expert) * machine.width * tokens / c.tp,
    )  # fmt: skip


def moved_elements(s: PricingCase) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Return the elements per token that element-wise kernels of an average layer read and write on one rank.

    Biases are excluded.

    Returns:
        (forward, backward). Each is a tuple for four parts: the attention block, the feed-forward part without routed
        experts, routed experts, and the copies of rows to send buffers of experts and from their results.
    """
    n, c, stack = s.n, s.c, s.machine.stack
    dense, uncut = n.saved_elements, n.whole_bytes(s.uncut, 1.0, 0.0)
    whole = 0.0 if stack.sequence_parallel or s.uncut.stream else 5.0 * n.hidden
    blocks = (dense - whole - uncut) / c.tp + whole + uncut * s.over_tp(1.0)
    attention_share = (2.0 * n.hidden + n.attention_width) / dense
    experts = n.expert_saved_width * stack.moe * stack.imbalance * s.over_tp(s.uncut.stream)
    # Experts keep the copied rows, 2 h per choice of a token, and their own activations.
    copied = min(1.0, 2.0 * n.hidden * n.experts_per_token / max(n.expert_saved_width, 1e-9))
    moved = (
        attention_share * blocks,
        (1.0 - attention_share) * blocks,
        (1.0 - copied) * experts,
        copied * experts,
    )
    # Half of the norms precede the attention block, half the feed-forward part.
    norm = 0.5 * n.unfused_norms * n.hidden * s.over_tp(s.uncut.stream)
    heads = (n.normed_width + n.latent_width) * s.over_tp(s.uncut.attention)
    combined = n.experts_per_token * n.hidden * s.over_tp(s.uncut.stream)

    def passes(share: float, direction: str) -> tuple[Array, ...]:
        norms, combines = (table.get(direction, 0.0) for table in (stack.norm_passes, stack.combine_passes))
        attention, mlp, *routed = (stack.passes * share * elements for elements in moved)
        return attention + norms * (norm + heads), mlp + norms * norm + combines * combined, *routed

    return passes(PASSES[0], "forward"), passes(PASSES[1], "backward")


def forward_launch(s: PricingCase, seconds: Array) -> Array:
    """Return the exposed seconds of kernel launches in a layer's forward, whose kernels take `seconds` in total."""
    stack = s.machine.stack
    norms = s.n.head_norms * stack.kernels_norm
    return _exposed_launches(s.machine, seconds, stack.kernels_forward + 0.25 * norms)


def _exposed_launches(machine: Machine, seconds: Array, kernels: float) -> Array:
    """Return the exposed seconds to launch `kernels` kernels that take `seconds` in total; see `launch_hidden`."""
    launches = np.full_like(seconds, kernels * machine.card.kernel_s * machine.ranks_per_core)
    return np.maximum(0.0, launches - seconds) if machine.card.launch_hidden else launches


def matmuls(
    s: PricingCase,
    visited_experts: Array | None = None,
    part: str | None = None,
    row: bool | None = None,
) -> Array:
    """Return the seconds of the matmuls with weights in the forward of one average layer.

    Args:
        s: Pricing case.
        visited_experts: Number of experts per rank that receive tokens; None: all.
        part: Only matmuls of this part of the layer: `attention`, `mlp` or `expert`; None: all.
        row: True: only row-parallel projections; False: only column-parallel projections; None: all.
    """
    n, machine, c, tokens = s.n, s.machine, s.c, s.tokens
    total: Array = np.zeros(1)
    flat = c.tp_y <= 1
    x = {"attention": c.attention_shape, "mlp": c.mlp_shape}
    uncut = {"attention": s.uncut.attention, "mlp": s.uncut.mlp}
    for m in n.matmuls:
        if part not in (None, m.part) or row not in (None, m.row):
            continue
        if m.part == "expert":
            # Routing is uniform over the experts of the ranks that share them.
            copies = tokens * s.over_tp(s.uncut.stream) * n.routed_experts_per_token
            rows = copies * c.ep * s.etp / n.experts
            experts = n.experts / c.ep
            if visited_experts is not None:
                rows, experts = rows * experts / visited_experts, visited_experts
            cut_in, cut_out = (s.etp, 1.0) if m.row else (1.0, s.etp)
            seconds = matmul_seconds(machine, rows, m.outputs / cut_out, m.inputs / cut_in)
            # One matmul per expert of the rank; `m.count` is the number per token.
            share = experts * m.count / n.routed_experts_per_token
            stretch = machine.stack.imbalance * (1.0 + machine.stack.expert_rows / rows)
            total = total + seconds * share * stretch
            continue
        shape = x[m.part]
        is_1d, is_2d = flat | (shape == SHAPES.index("1d")), shape == SHAPES.index("2d")
        # Rows, outputs and inputs of the local matmul: 1-D divides one width by P, 2-D divides one by x and one by y,
        # weight-moving divides one by x and the tokens by y.
        rows = np.where(is_1d | is_2d, tokens, tokens / c.tp_y)
        narrow = np.where(is_1d, c.tp, c.tp_x)
        second_width = np.where(~is_1d & is_2d, c.tp_y, 1.0)
        cut_in, cut_out = (narrow, second_width) if m.row else (second_width, narrow)
        seconds = matmul_seconds(machine, rows, m.outputs / cut_out, m.inputs / cut_in)
        if uncut[m.part]:
            uncut_seconds = matmul_seconds(machine, tokens, m.outputs, m.inputs)
            share = uncut[m.part] * s.keeps_whole
            seconds = (1.0 - share) * seconds + share * uncut_seconds
        total = total + m.count * seconds
    return total


def _attention(s: PricingCase) -> tuple[Array, Array]:
    """Return (forward, backward) seconds of attention scores and their product with the values in one layer.

    With fused attention, masked scores do not count, and backward takes 2.5 times as long: 5 matmuls, forward 2.
    """
    n, machine, seq_len = s.n, s.machine, s.workload.seq_len
    card, tokens, per_token = machine.card, s.tokens * s.over_tp(s.uncut.attention), 0.0
    if machine.stack.flash:
        for count, a in n.attentions:
            num_keys = min(seq_len, a.window or seq_len)
            head = (a.qk_head_dim + a.v_head_dim) / 2.0
            efficiency = head / (head + card.attention_head) * num_keys / (num_keys + card.attention_len)
            flops = a.forward_flops_per_token(seq_len, causal=True)
            per_token += count / n.layers * flops / (machine.attention_flops * efficiency)
        forward = tokens * per_token
        return forward, 2.5 * forward
    scores = 0.0
    for count, a in n.attentions:
        share = count / n.layers * a.num_heads
        head = (a.qk_head_dim + a.v_head_dim) / 2.0
        rows = np.asarray([float(seq_len)])
        per_token += float(2 * share * matmul_seconds(machine, rows, seq_len, head)[0] / seq_len)
        scores += share * seq_len * SCORE_BYTES / machine.passing_bytes_s
    forward = tokens * (per_token + scores)
    return forward, tokens * (2.0 * per_token + scores)
