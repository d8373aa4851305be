"""One buffer on the device: every storage at its planned address, no allocation in a step but what is counted."""

from dataclasses import replace

import pytest
import torch
from benchmarks._kernel_workspace import with_kernel_bytes
from benchmarks._model_steps import capture_training, training_step
from torch.profiler import ProfilerActivity, profile

from hyper_parallel.backends.torch.memory import PlannedDevice, StorageWatch
from hyper_parallel.backends.torch.memory import arena_state as held_state
from hyper_parallel.backends.torch.memory.kernel_bytes import columns, in_pieces, piece_bytes
from hyper_parallel.backends.torch.memory.operators import Call, View
from hyper_parallel.backends.torch.memory.out_variants import out_variant
from hyper_parallel.errors import MemoryPlanInvalid
from hyper_parallel.memory import plan_memory, wrong_address
from hyper_parallel.topology.cpu_machine import read_cpu
from tests.torch_memory.test_parity import (
    MACHINE,
    ROOFLINE,
    assert_same_state,
    batch,
    captured_training,
    trainer,
)
from tests.torch_memory.test_streams import Net, captured_net, planned
from tests.torch_memory.test_streams import batch as net_batch

pytestmark = pytest.mark.torch


def allocations(run):
    """Bytes of every allocation while `run` runs, kernels' own included, and the most that live at the same time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    sizes = [e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for size in sizes:
        live += size
        most = max(most, live)
    return [size for size in sizes if size > 0], most


def test_a_step_allocates_nothing():
    """All operators of this step can write at an address; what is left are numbers, and the loss that is handed out."""
    _, captured = captured_net()
    plan, machine = planned(False)
    assert plan.program.staging_bytes == 0
    with PlannedDevice(captured, plan, machine) as device:
        device.step(net_batch(1))
        given = net_batch(2)
        sizes, _ = allocations(lambda: device.step(given))
        _, measured = device.step(given)
    assert max(sizes) <= 8, sizes
    assert measured.device_bytes == plan.device_bytes == plan.arena_bytes
    net = Net()
    eager, _ = allocations(lambda: net.step(**given))
    assert sum(eager) > 4 * plan.arena_bytes  # every result


def test_a_model_allocates_what_is_counted():
    _, _, captured = captured_training("llama")
    program = ROOFLINE.annotate(captured.program)
    plan = plan_memory(program, MACHINE, max_slowdown=0.05)
    staged = [op for op in program.operators if op.scratch_bytes]
    made = [op for op in program.operators if op.allocs]
    assert len(staged) < 0.05 * len(made)
    with PlannedDevice(captured, plan, MACHINE, copies="at_issue") as device:
        device.step(batch(2))
        given = batch(3)
        _, most = allocations(lambda: device.step(given))
        _, measured = device.step(given)
    assert measured.device_bytes == plan.device_bytes == plan.arena_bytes + program.staging_bytes
    assert 0 < most <= program.staging_bytes + 4096  # numbers, and what kernels take for themselves


def test_with_its_kernels_measured_a_step_allocates_what_is_predicted():
    """bfloat16 products pack their operands; the profiler's events agree to the largest number that is made."""
    model, optimizer = trainer("llama", hidden_size=128, intermediate_size=320)
    model.to(torch.bfloat16)
    training_step(model, optimizer, batch(0))
    captured = capture_training(model, optimizer, batch(1))
    metered = with_kernel_bytes(captured)
    packs = read_cpu().has_bfloat16  # without these instructions, products allocate no packed operands
    least = 1.5 * captured.program.staging_bytes if packs else 0.0
    assert metered.program.staging_bytes > least
    plan = plan_memory(ROOFLINE.annotate(metered.program), MACHINE, max_slowdown=0.05)
    with PlannedDevice(metered, plan, MACHINE, copies="at_issue") as device:
        device.step(batch(2))
        given = batch(3)
        _, most = allocations(lambda: device.step(given))
    assert abs(most - metered.program.staging_bytes) <= 4096


def test_a_wrong_address_is_refused_and_would_be_seen(monkeypatch):
    """One storage at the address of another that comes while it is needed."""
    _, captured = captured_net()
    plan, machine = planned(False)
    sizes, stays = plan.program.sizes, plan.addresses
    used = {at: a.target for at, a in enumerate(plan.actions) if a.kind == "run"}  # action -> operator
    assert wrong_address(plan) is None
    seen = []
    for i, a in enumerate(stays):
        reads = [at for at, op in used.items() if a.storage in plan.program.operators[op].reads]
        made = [b for b in stays if a.start < b.start < max(reads, default=0) and b.start in used]
        b = next((b for b in made if b.stop - b.start > 1 and max(reads) < a.stop), None)
        if b is None or min(sizes[a.storage], sizes[b.storage]) <= 512:
            continue
        forged = replace(
            plan,
            addresses=(*stays[:i], replace(a, offset_bytes=b.offset_bytes), *stays[i + 1 :]),
        )
        assert wrong_address(forged)
        with pytest.raises(MemoryPlanInvalid, match="HP404"):
            PlannedDevice(captured, forged, machine)
        net, known = captured_net()
        reference = Net()
        reference.step(**net_batch(0))
        with monkeypatch.context() as patch:
            patch.setattr(held_state, "wrong_address", lambda _: None)
            with PlannedDevice(known, forged, machine, check=False) as device:
                for number in (1, 2):
                    device.step(net_batch(number))
                    reference.step(**net_batch(number))
        seen.append(not all(torch.equal(x, y) for x, y in zip(net.weights, reference.weights, strict=True)))
    assert len(seen) > 4
    assert all(seen)


def test_an_arena_too_small_or_moved_between_steps_is_refused():
    plan, _ = planned(False)
    assert wrong_address(replace(plan, arena_bytes=plan.arena_bytes - 1))
    assert wrong_address(replace(plan, addresses=plan.addresses[1:]))
    odd = [replace(plan.addresses[0], offset_bytes=plan.addresses[0].offset_bytes + 1)]
    assert "multiple of 64" in wrong_address(replace(plan, addresses=(*odd, *plan.addresses[1:])))
    stays, top = list(plan.addresses), -(-plan.arena_bytes // 64) * 64
    first = {stay.storage for stay in stays if stay.start == 0}
    at, last = next(
        (i, stay)
        for i, stay in enumerate(stays)
        if stay.storage in first and stay.start and stay.stop == len(plan.actions)
    )
    stays[at] = replace(last, offset_bytes=top)
    larger = top + plan.program.spans[last.storage]
    moved = replace(plan, addresses=tuple(stays), arena_bytes=larger)
    assert "another address than it begins" in wrong_address(moved)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2"])
def test_every_operator_gives_the_same_bits_at_an_address(family):
    """Each recorded operator with a way to write at an address, on drawn operands, against its own result."""
    _, _, captured = captured_training(family, clip_norm=0.5)
    seen = set()
    for call in captured.calls:
        bind = out_variant(call)
        if bind is None or "empty" in str(call.func):
            continue
        views = _views((call.args, call.kwargs))
        key = str(call.func), tuple((v.dtype, v.size, v.stride) for v in views)
        if key in seen or torch.Tag.nondeterministic_seeded in call.func.tags:
            continue
        seen.add(key)
        bases = {v.storage: _drawn(v, captured) for v in views}
        args, kwargs = torch.utils._pytree.tree_map_only(
            View, lambda v, bases=bases: v.as_tensor(bases[v.storage]), (call.args, call.kwargs)
        )
        expected = torch.utils._pytree.tree_flatten(call.func(*args, **kwargs))[0]
        outs = [
            view.as_tensor(torch.full((_size(view, captured),), 77, dtype=torch.uint8).untyped_storage())
            for _, view in call.results
        ]
        before = [(o.data_ptr(), o.shape, o.stride()) for o in outs]
        bind(args, kwargs, outs)()
        assert before == [(o.data_ptr(), o.shape, o.stride()) for o in outs], key
        for (position, _), out in zip(call.results, outs, strict=True):
            assert expected[position].stride() == out.stride(), key
            assert torch.equal(expected[position].nan_to_num(7.0), out.nan_to_num(7.0)), key
    assert len(seen) > 50


def _views(tree):
    return [v for v in torch.utils._pytree.tree_flatten(tree)[0] if isinstance(v, View)]


def _size(view, captured):
    return captured.program.storages[view.storage].num_bytes


def _drawn(view, captured):
    size = _size(view, captured)
    if view.dtype.is_floating_point:
        count = size // view.dtype.itemsize
        return torch.rand(count).to(view.dtype).untyped_storage()
    if view.dtype == torch.bool:
        return torch.randint(0, 2, (size,), dtype=torch.bool).untyped_storage()
    return torch.randint(0, 2, (size // view.dtype.itemsize,)).to(view.dtype).untyped_storage()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [-1, 5])
def test_an_embeddings_gradient_in_pieces_has_the_same_bits(dtype, padding):
    """Rows that repeat often, so that a sum in another order would show; odd numbers of columns."""
    op, rows, width = torch.ops.aten.embedding_dense_backward.default, 1500, 98
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(2, 1500, width, generator=generator).to(dtype)
    indices = torch.randint(0, 40, (2, 1500), generator=generator)
    rest = (indices, rows, padding, False)
    made = View(1, dtype, (rows, width), (width, 1), 0)
    given = View(0, dtype, grad.shape, grad.stride(), 0)
    call = Call(op, (given, *rest), {}, ((0, made),))
    pieces = columns(call)
    assert [c for piece in pieces for c in piece] == list(range(width))
    assert len(pieces) > 1
    assert not columns(replace(call, args=(*call.args[:4], True)))
    assert not columns(replace(call, reusable_bytes=made.num_bytes))
    room_bytes = made.num_bytes - 1
    wider = columns(replace(call, reusable_bytes=room_bytes))
    assert len(wider[0]) > len(pieces[0])
    assert sum(piece_bytes(call, wider)) <= room_bytes
    out = torch.full((rows, width), 7.0, dtype=dtype)
    run = in_pieces(pieces, (grad, *rest), {}, out)
    with StorageWatch() as watch:
        run()
    assert torch.equal(out, op(grad, *rest))
    assert watch.peak_bytes == sum(piece_bytes(call, pieces)) + out.nbytes


def test_an_embeddings_gradient_is_not_beside_the_arena_as_a_whole():
    model, optimizer = trainer("llama", vocab_size=1 << 10)
    reference, other = trainer("llama", vocab_size=1 << 10)
    for number in (0, 1):
        training_step(reference, other, batch(number))
    training_step(model, optimizer, batch(0))
    captured = capture_training(model, optimizer, batch(1))
    plan = plan_memory(ROOFLINE.annotate(captured.program), MACHINE, max_slowdown=0.05)
    table = model.model.embed_tokens.weight.nbytes
    assert 0.5 * table < plan.program.staging_bytes < 0.6 * table
    with PlannedDevice(captured, plan, MACHINE, copies="at_issue") as device:
        for number in (2, 3):
            loss, measured = device.step(batch(number))
            assert torch.equal(loss, training_step(reference, other, batch(number)))
            assert measured.device_bytes == plan.device_bytes
    assert_same_state(model, optimizer, reference, other)


@pytest.mark.parametrize("pad", [(0, 1), (2, 0, 0, 3)])
def test_a_border_is_written_at_an_address(pad):
    op = torch.ops.aten.constant_pad_nd.default
    given = torch.arange(12.0).view(3, 4)
    expected = op(given, list(pad), -100)
    made = View(1, given.dtype, expected.shape, expected.stride(), 0)
    views = (View(0, given.dtype, given.shape, given.stride(), 0), list(pad), -100)
    out = torch.full_like(expected, 7.0)
    out_variant(Call(op, views, {}, ((0, made),)))((given, *views[1:]), {}, [out])()
    assert torch.equal(out, expected)
    crop = Call(op, (views[0], [0, -1]), {}, ((0, made),))
    assert out_variant(crop) is None
