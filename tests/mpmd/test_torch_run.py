"""torch executes our schedules on four gloo ranks; gradients equal those of one process."""

import os
import warnings

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.pipelining import PipelineStage  # noqa: E402
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from hyper_parallel.mpmd import lower, make_schedule, verify  # noqa: E402
from hyper_parallel.runtime import launch  # noqa: E402
from hyper_parallel.runtime.local_launch import INIT_METHOD  # noqa: E402

pytestmark = pytest.mark.dist
RANKS, WIDTH, ROWS = 4, 6, 4


def _loss(output, target):
    return torch.nn.functional.mse_loss(output, target)


def _model(stages):
    generator = torch.Generator().manual_seed(1)
    layers = []
    for _ in range(stages):
        linear = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator).double() / 2)
        layers.append(torch.nn.Sequential(linear, torch.nn.Tanh()))
    return torch.nn.ModuleList(layers)


def _data(microbatches):
    generator = torch.Generator().manual_seed(2)
    shape = (microbatches * ROWS, WIDTH)
    x, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def _one_process(stages, microbatches):
    model = _model(stages)
    x, y = _data(microbatches)
    hidden = x
    for layer in model:
        hidden = layer(hidden)
    loss = _loss(hidden, y)
    loss.backward()
    return loss.item(), [[p.grad for p in layer.parameters()] for layer in model]


def _whole(grad):
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def _run_rank(rank, cases, folder, dp=1):
    """Run every (schedule, form) on this rank; loss and gradients by stage.

    With dp > 1 the stages are sharded by FSDP over the inner axis of a (pp, dp) mesh.
    """
    # Shape inference of the stages and deprecated names inside torch warn; not the subject here.
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=os.environ[INIT_METHOD], rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS // dp, dp), mesh_dim_names=("pp", "dp"))
    pp_rank, dp_rank = mesh.get_coordinate()
    results = []
    for number, (schedule, form) in enumerate(cases):
        model = _model(schedule.stages)
        mine = [s for s, r in sorted(schedule.placement().items()) if r == pp_rank]
        if dp > 1:
            for s in mine:
                fully_shard(model[s], mesh=mesh["dp"], reshard_after_forward=False)
        group = mesh.get_group("pp")
        stages = [PipelineStage(model[s], s, schedule.stages, torch.device("cpu"), group=group) for s in mine]
        runtime = _PipelineScheduleRuntime(stages, schedule.microbatches, loss_fn=_loss)
        runtime._load_csv(os.fspath(folder / f"{number}.csv"), format=form)
        # Every dp rank takes its rows of every microbatch.
        x, y = (
            t.unflatten(0, (schedule.microbatches, dp, -1))[:, dp_rank].flatten(0, 1)
            for t in _data(schedule.microbatches)
        )
        last = schedule.stages - 1 in mine
        losses = [] if last else None
        runtime.step(*([x] if 0 in mine else []), target=y if last else None, losses=losses)
        grads = {s: [_whole(p.grad) for p in model[s].parameters()] for s in mine}
        results.append((torch.stack(losses).mean().item() if last else None, grads))
    dist.destroy_process_group()
    return results


@pytest.mark.slow
def test_torch_runs_our_schedules_with_the_gradients_of_one_process(tmp_path):
    cases = []
    for name, microbatches, v in (
        ("1f1b", 6, None),
        ("1f1b", 2, None),
        ("interleaved_1f1b", 8, 2),
        ("zb_h1", 6, None),
        ("zbv", 8, None),
        ("zbv", 3, None),
        ("dualpipev", 10, None),
    ):
        schedule = make_schedule(name, RANKS, microbatches, v)
        lowered = lower(schedule)
        verify(lowered)
        cases.append((lowered, "compute_comms"))
    cases.append((make_schedule("zbv", RANKS, 8), "compute_only"))
    _compare(cases, tmp_path)


def test_torch_runs_our_schedules_with_fsdp_inside_the_stages(tmp_path):
    cases = []
    for name, microbatches, v in (
        ("1f1b", 4, None),
        ("interleaved_1f1b", 4, 4),
        ("zb_h1", 4, None),
        ("zbv", 5, None),
        ("dualpipev", 6, None),
    ):
        lowered = lower(make_schedule(name, RANKS // 2, microbatches, v), unshard=True)
        verify(lowered)
        cases.append((lowered, "compute_comms"))
    _compare(cases, tmp_path, dp=2)


def _compare(cases, tmp_path, dp=1):
    for number, (schedule, _) in enumerate(cases):
        (tmp_path / f"{number}.csv").write_text(schedule.to_csv())
    ranks = launch(lambda rank: _run_rank(rank, cases, tmp_path, dp), RANKS, timeout_s=180)
    for number, (schedule, form) in enumerate(cases):
        loss, expected = _one_process(schedule.stages, schedule.microbatches)
        got, losses = {}, []
        for rank in ranks:
            rank_loss, grads = rank[number]
            got |= grads
            if rank_loss is not None:
                losses.append(rank_loss)
        assert sum(losses) / len(losses) == pytest.approx(loss, rel=1e-12)
        assert sorted(got) == list(range(schedule.stages))
        for s, grads in got.items():
            for grad, reference in zip(grads, expected[s], strict=True):
                torch.testing.assert_close(
                    grad, reference, rtol=1e-12, atol=1e-14, msg=f"{schedule.name} {form} stage {s}"
                )
