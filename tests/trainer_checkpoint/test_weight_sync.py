"""Weights that one layout publishes to ranks that sample are, in any other layout, the same to the last bit."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import hyper_parallel as hp
from hyper_parallel.backends.torch import materialize
from hyper_parallel.config import Grpo
from hyper_parallel.runtime import World, launch, parallelize, plan_of
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from hyper_parallel.trainer.checkpoints.manifest import steps
from hyper_parallel.trainer.stages.rollout_folder import RolloutFolder
from hyper_parallel.trainer.stages.rollouts import Publisher
from tests.parity.planned import whole
from tests.slow import slow_cells
from tests.weights.models import on_meta, qwen3_moe

LAYOUTS = {
    1: ("dp_shard=4", 4),
    2: ("tp=4", 4),
    3: ("tp=2 pp=2", 4),
    4: ("dp_shard=4 ep=4", 4),
    5: ("", 1),
}
"""Version to the layout that publishes it, and its ranks."""
SEQUENCES, SEQ_LEN = 8, 8


def build(layout, world, seed):
    """The model in a layout, with the values of a seed."""
    model = on_meta(qwen3_moe, vocab_size=64, hidden_size=32)
    work = hp.Workload(
        SEQ_LEN, tokens_per_step=SEQUENCES * SEQ_LEN, microbatch=2,
        compute_dtype="float32", param_dtype="float32", reduce_dtype="float32",
    )  # fmt: skip
    parallelize(model, plan_of(model, layout, work), world)
    materialize(model, seed=seed, device="cpu")
    return model


def parameters(model):
    """Whole parameters of this rank's stages, by name."""
    return {name: whole(p).detach().contiguous() for name, p in model.named_parameters()}


def learn(model):
    """One optimizer step, whose last bits are those of the layout."""
    share, count = hp.data_share(model)
    ids = torch.randint(0, 64, (SEQUENCES, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    parts = [{"input_ids": part} for part in ids.chunk(count)[share].split(2)]
    hp.forward_backward(model, parts)
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def publish(version, root):
    """Ranks of a layout learn, keep what each of them holds beside the run, and publish it as training does."""
    layout, ranks = LAYOUTS[version]

    def rank(number):
        with World.join() as world:
            model = build(layout, world, seed=version)
            learn(model)
            save_file(parameters(model), root / f"held.{version}.{number}.safetensors")
            recipe = SimpleNamespace(
                grpo=Grpo(rollout_ranks=1, max_staleness=len(LAYOUTS)),
                training=SimpleNamespace(deterministic=True),
            )
            job = SimpleNamespace(output_dir=root, checkpoint_dir=root / "checkpoints", recipe=recipe)
            publisher = Publisher(job, world, model, done=0, origin_s=0.0)
            publisher.publish(version, {})
            publisher.end()

    launch(rank, ranks, timeout_s=240)


def read(layout, ranks, root, versions):
    """Ranks of a layout take every version as those that sample do; what differs, by name."""

    def rank(number):
        with World.join() as world:
            model = build(layout, world, seed=99)
            folder = RolloutFolder(root / "rollouts")
            published = Checkpointer(folder.policy, keep=1, asynchronous=False, fingerprint=None)
            different, names = [], set()
            for version in versions:
                assert folder.version(version, exact=True) == version
                published.load(model, None, version)
                mine, held = parameters(model), held_by_all(version, root)
                names |= mine.keys()
                different += [(version, n) for n in mine if not torch.equal(mine[n], held[n])]
            return different, names

    return launch(rank, ranks, timeout_s=240)


def held_by_all(version, root):
    """What the ranks that published a version held, by name; ranks that held the same had the same bits."""
    found = {}
    for path in sorted(root.glob(f"held.{version}.*")):
        for name, value in load_file(path).items():
            assert torch.equal(found.setdefault(name, value), value), name
    return found


@slow_cells("versions0")
@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize("versions", [(3, 4, 5), pytest.param((*LAYOUTS,), marks=pytest.mark.slow)])
def test_layouts_give_each_other_the_same_bits(versions, tmp_path):
    for version in versions:
        publish(version, tmp_path)
    (tmp_path / "rollouts" / "end").unlink()
    assert steps(tmp_path / "rollouts" / "policy") == [*versions]
    whole_model = {name for name, _ in on_meta(qwen3_moe).named_parameters()}
    held = {version: held_by_all(version, tmp_path) for version in versions}
    assert all(found.keys() == whole_model for found in held.values())
    # Versions differ everywhere but in norms, whose first values are alike: one for another would be seen.
    experts = [name for name in whole_model if ".experts." in name]
    assert experts
    for name in experts:
        assert len({held[version][name].sum().item() for version in versions}) == len(versions)
    for layout, ranks in map(LAYOUTS.get, versions):
        found = read(layout, ranks, tmp_path, versions)
        assert not [d for different, _ in found for d in different], layout
        assert set().union(*(names for _, names in found)) == whole_model
