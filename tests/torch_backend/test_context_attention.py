"""Blocks of attention, joined as the ring joins them, against the whole softmax; all places in one process."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from hyper_parallel.backends.torch.context import block_attention
from hyper_parallel.backends.torch.context.attention import RingAttention
from hyper_parallel.backends.torch.context.block_attention import (
    AttentionBlock,
    AttentionRules,
    score_dtype,
)
from hyper_parallel.backends.torch.context.state import sequence_view
from hyper_parallel.ir import SequenceCut

pytestmark = pytest.mark.torch


def dense(q, k, v, rules, seq_len):
    """Attention as one formula, differentiable."""
    length, times = q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    scores = q @ k.transpose(-1, -2) * rules.scale
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    row, col = torch.arange(length)[:, None], torch.arange(length)
    seen = (col <= row)[None] if rules.causal else (col < seq_len)[None]
    if rules.window is not None:
        seen = seen & (row - col < rules.window)
    if rules.documents is not None:
        seen = seen & (rules.documents[:, :, None] == rules.documents[:, None])
    return scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v


def ring(q, k, v, grad, rules, view):
    """Output and gradients of every place, its blocks in the order in which they come."""
    cut = view.cut
    held = [torch.tensor([p for a, b in s for p in range(a, b)]) for s in cut.spans]
    out, dq, dk, dv = (torch.zeros_like(x, dtype=score_dtype(q.dtype)) for x in (grad, q, k, v))
    for place, mine in enumerate(held):
        own = RingAttention(view, rules, place)
        local, g = q[:, :, mine], grad[:, :, mine]
        d_local = torch.zeros_like(local, dtype=out.dtype)
        order = [(place - d) % cut.ring for d in range(cut.ring)]
        arriving = [(other, k[:, :, held[other]], v[:, :, held[other]]) for other in order]
        part, lse = own.forward(local, v.shape[3], iter(arriving))
        saved = (part.to(q.dtype), lse, (g * part).sum(-1))
        for other, *found in own.backward(g, local, saved, d_local, iter(arriving)):
            dk.index_add_(2, held[other], found[0])
            dv.index_add_(2, held[other], found[1])
        out[:, :, mine], dq[:, :, mine] = part, d_local
    return out, dq, dk, dv


def compare(places, chunk, rules, packed, shape, dtype, tolerance, missing=0):
    batch, heads, groups, width, v_width = shape
    cut = SequenceCut(2 * places * chunk - missing, places)
    length = cut.padded
    generator = torch.Generator().manual_seed(places * 100 + chunk)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    q, k = draw(batch, heads, length, width), draw(batch, groups, length, width)
    v, grad = draw(batch, groups, length, v_width), draw(batch, heads, length, v_width)
    positions = torch.arange(length).expand(batch, -1)
    if packed:
        positions = torch.stack([torch.arange(length) % (5 + 3 * b) for b in range(batch)])
    view = sequence_view(cut, positions, positions.max())
    assert (view.documents is not None) == packed
    rules = replace(rules, documents=view.documents)
    found = ring(q, k, v, grad, rules, view)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = dense(*leaves, rules, cut.seq_len)
    wanted.backward(grad.double())
    for mine, theirs in zip(found, (wanted, *(x.grad for x in leaves)), strict=True):
        assert (mine - theirs).abs().max() <= tolerance * max(1.0, theirs.abs().max())


@settings(max_examples=40, deadline=None)
@given(
    places=st.integers(1, 3),
    chunk=st.integers(1, 7),
    window=st.none() | st.integers(1, 20),
    softcap=st.none() | st.just(3.0),
    packed=st.booleans(),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    v_width=st.sampled_from([4, 6]),
)
def test_joined_blocks_are_the_whole_softmax(places, chunk, window, softcap, packed, heads, v_width):
    packed = packed and places * chunk >= 5  # the documents are of 5 and 8 tokens
    rules = AttentionRules(0.4, window, softcap)
    compare(places, chunk, rules, packed, (2, *heads, 4, v_width), torch.float64, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("missing", [0, 1, 5])
def test_tokens_that_see_all_do_not_see_padding(dtype, missing):
    rules, tolerance = AttentionRules(0.4, causal=False), 1e-12 if dtype == torch.float64 else 1e-5
    for places in (1, 2, 3):
        compare(places, 3, rules, False, (2, 4, 2, 8, 8), dtype, tolerance, missing)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_kernel_gives_the_same(dtype, packed):
    rules = AttentionRules(0.4)
    spans = ((0, 16), (16, 32))
    q = torch.randn(2, 4, 16, 8).to(dtype)
    v = torch.randn(2, 2, 16, 8).to(dtype)
    windowed = AttentionRules(0.4, window=3)
    assert AttentionBlock(spans[1], spans[0], rules, True).fused(q, v)
    assert AttentionBlock(spans[0], spans[0], rules, False).fused(q, v)
    assert not AttentionBlock(spans[0], spans[0], windowed, False).fused(q, v)
    assert not AttentionBlock(spans[1], spans[0], rules, True).fused(q.double(), v)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    compare(2, 16, rules, packed, (2, 4, 2, 8, 8), dtype, tolerance)


def test_the_accelerator_kernels_take_these_arguments():
    """Shapes and formats on a fake device; no numbers."""
    with FakeTensorMode():
        q = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(2, 2, 32, 64, dtype=torch.bfloat16, device="cuda")
        block = AttentionBlock((32, 48), (0, 32), AttentionRules(0.1), True)
        assert block.fused(q, k)
        out, lse = block.forward(q, k, k)
        assert (out.shape, out.dtype, lse.shape) == (q.shape, torch.float32, q.shape[:3])
        found = block.backward(q, q, k, k, q, lse, lse)
        assert [x.shape for x in found] == [q.shape, k.shape, k.shape]


def test_large_blocks_are_computed_in_tiles(monkeypatch):
    monkeypatch.setattr(block_attention, "_SCORES", 64)
    for window in (None, 3):
        compare(2, 8, AttentionRules(0.4, window), False, (1, 2, 1, 4, 4), torch.float64, 1e-12)


def test_a_row_that_sees_nothing_gives_nothing():
    q, k = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 2, 4)
    block = AttentionBlock((10, 12), (0, 2), AttentionRules(1.0, window=10), False)
    out, lse = block.forward(q, k, k)
    assert torch.equal(out[0, 0, 1], torch.zeros(4))
    assert lse[0, 0, 1] == -torch.inf
    assert torch.isfinite(lse[0, 0, 0])
