"""Traffic of context parallelism by hand."""

import pytest

from hyper_parallel.cost import context_bytes, step_collectives
from hyper_parallel.ir import SequenceCut, Strategy, Workload
from hyper_parallel.model import AttentionSpec
from hyper_parallel.shard import family_rules, plan_layouts
from tests.cost.machines import small_model

pytestmark = pytest.mark.unit

ATTENTION = AttentionSpec("full", num_heads=8, num_kv_heads=2, qk_head_dim=64, v_head_dim=32)


def sent(kind, seq_len=64, cp=4, ulysses=1, attention=ATTENTION, **more):
    cut = SequenceCut.of(seq_len, cp, kind, ulysses)
    found = context_bytes(attention, cut, kind, microbatch=3, **more)
    return [(x.kind, x.forward, x.backward, x.sent_bytes) for x in found]


def test_bytes_by_hand():
    tokens = 3 * 16
    keys = tokens * 2 * (64 + 32) * 2
    assert sent("ring") == [("send_recv", 3, 3, keys), ("send_recv", 0, 3, keys)]
    # Gathered gradients are added up in float32.
    assert sent("all_gather") == [
        ("all_gather", 1, 1, 3 * keys),
        ("reduce_scatter", 0, 1, 3 * 2 * keys),
    ]
    # Two key heads are repeated to four.
    into, out = tokens * (8 * 64 + 4 * 96) * 2, tokens * 8 * 32 * 2
    assert sent("ulysses") == [
        ("all_to_all", 1, 0, into * 3 // 4),
        ("all_to_all", 0, 1, into * 3 // 4),
        ("all_to_all", 0, 1, out * 3 // 4),
        ("all_to_all", 1, 0, out * 3 // 4),
    ]
    into = tokens * (8 * 64 + 2 * 96) * 2
    assert sent("hybrid", ulysses=2) == [
        ("all_to_all", 1, 0, into // 2),
        ("all_to_all", 0, 1, into // 2),
        ("all_to_all", 0, 1, out // 2),
        ("all_to_all", 1, 0, out // 2),
        ("send_recv", 1, 1, keys),
        ("send_recv", 0, 1, keys),
    ]


def test_windows_tensor_parallelism_latents_and_padding_change_the_bytes():
    window = AttentionSpec("sliding", 8, 2, 64, 32, window=4)
    assert [x[1] for x in sent("ring", attention=window)] == [2, 0]  # of three rounds
    assert sent("ring", tp=2)[0][3] * 2 == sent("ring", tp=1)[0][3]
    assert sent("ring", tp=4)[0][3] == sent("ring", tp=2)[0][3]  # one key head cannot be cut
    latent = AttentionSpec("mla", 8, 1, 64, 32)
    assert sent("ring", attention=latent)[0][3] == 4 * sent("ring")[0][3]  # expanded to all heads
    assert sent("ring", seq_len=57)[0][3] == sent("ring")[0][3]


def test_the_step_counts_layers_microbatches_and_recompute():
    model = small_model()
    workload = Workload(512, microbatch=2, accumulation_steps=3)

    def rounds(**choices):
        strategy = Strategy(cp=4, **choices)
        params = [(p.name, p.shape, p.dims) for b in model.blocks for p in b.params]
        layouts = plan_layouts(
            params, family_rules(model.family), strategy,
            num_heads=8, num_kv_heads=4, head_dim=8, vocab_size=model.vocab_size,
        ).layouts  # fmt: skip
        found = step_collectives(model, layouts, strategy, workload)
        return sum(c.count for c in found if c.kind == "send_recv")

    assert rounds() == model.num_layers * 3 * (3 + 2 * 3)
    assert rounds(recompute="full") == model.num_layers * 3 * (2 * 3 + 2 * 3)
