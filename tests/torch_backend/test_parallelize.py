"""What parallelize gives beside equal training runs: honest outputs, isolation, refusals, formats."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hyper_parallel.errors import (
    AuditError,
    DegreesMismatch,
    NotDivisible,
    PlanMismatch,
    UnsupportedSharding,
)
from hyper_parallel.ir import Layout, Plan, Rule, Strategy
from hyper_parallel.runtime import (
    World,
    accumulate,
    audit,
    clip_grad_norm_,
    handle,
    launch,
    parallelize,
)
from hyper_parallel.shard import plan_layouts
from tests.parity._case import Case, Reference, run
from tests.parity.planned import make_plan
from tests.parity.universal import Setup

CASE = Case()


def _logits(model: nn.Module, ids: Tensor, **more: object) -> Tensor:
    return model(input_ids=ids, **more).logits


@pytest.mark.dist
@pytest.mark.parametrize("vocab", [96, 97])
def test_logits_without_labels_are_whole(vocab: int) -> None:
    case = Case("qwen3", vocab=vocab, kv_heads=1, seq_len=13)
    model = case.build()
    ids = case.batches()[0][0][:2]
    alone = parallelize(copy.deepcopy(model), case.plan(Strategy()), World.join("cpu"))
    expected = _logits(alone, ids)
    (expected**2).sum().backward()
    grads = {n: p.grad for n, p in alone.named_parameters()}
    last = _logits(alone, ids, logits_to_keep=1).detach()
    text = alone.generate(ids, max_new_tokens=4, do_sample=False)

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            split = parallelize(copy.deepcopy(model), case.plan(Strategy(tp_x=2)), world)
            found = _logits(split, ids)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
            (found**2).sum().backward()
            for name, param in split.named_parameters():
                torch.testing.assert_close(param.grad.full_tensor(), grads[name], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(_logits(split, ids, logits_to_keep=1), last, rtol=1e-10, atol=1e-12)
            out = split(input_ids=ids, labels=ids)
            assert out.logits is None
            base = split.model(input_ids=ids).last_hidden_state
            assert base.shape == (*ids.shape, case.hidden)
            assert torch.equal(split.generate(ids, max_new_tokens=4, do_sample=False), text)

    launch(rank, 2, timeout_s=180)


@pytest.mark.torch
def test_one_device_is_the_plain_model() -> None:
    case = Case("qwen3", tied=True)
    model = case.build()
    ids, labels = case.batches()[0]
    found = parallelize(copy.deepcopy(model), case.plan(Strategy()), World.join("cpu"))
    loss = found(input_ids=ids, labels=labels, shift_labels=labels).loss
    logits = model(input_ids=ids).logits  # the model's own norms round to float32
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert type(found) is type(model)
    assert [n for n, _ in found.named_parameters()] == [n for n, _ in model.named_parameters()]
    own = found(input_ids=ids, labels=ids).loss
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(own, expected, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.dist
def test_plain_backward_calls_add_up() -> None:
    """Gradients are right after every call, whether or not the caller announces microbatches."""
    reference = Reference(CASE)
    batches = CASE.batches()

    def gradients(world: World, strategy: Strategy, announced: bool) -> list[dict[str, Tensor]]:
        model = parallelize(copy.deepcopy(reference.model), CASE.plan(strategy), world)
        kept = []
        for number, (ids, labels) in enumerate(batches[:3]):
            loss = model(input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=100).loss
            if announced and number < 2:
                with accumulate(model):
                    loss.backward()
            else:
                loss.backward()
                kept.append({
                    n: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
                    for n, p in model.named_parameters()
                })  # fmt: skip
        return kept

    expected = gradients(World.join("cpu"), Strategy(), False)

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            for strategy, copies in ((Strategy(tp_x=4), 1), (Strategy(dp_shard=2, tp_x=2), 2)):
                for found, wanted in zip(gradients(world, strategy, False), expected, strict=True):
                    for name, grad in found.items():
                        torch.testing.assert_close(grad, wanted[name] * copies, rtol=1e-9, atol=1e-12)
                found = gradients(world, strategy, True)[0]
                for name, grad in found.items():
                    torch.testing.assert_close(grad, expected[2][name] * copies, rtol=1e-9, atol=1e-12)

    launch(rank, 4, timeout_s=180)


@pytest.mark.dist
def test_two_models_on_two_meshes_in_one_process() -> None:
    """Both on all ranks, interleaved; then one on each half of the ranks."""
    first, second = Reference(CASE), Reference(Case("qwen3", tied=True, kv_heads=2))
    expected = [first.run.losses, second.run.losses]

    def losses(model: nn.Module, case: Case, steps: int) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        out = []
        for ids, labels in case.batches()[:steps]:
            count = int((labels != -100).sum())
            loss = model(input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=count).loss
            loss.backward()
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            out.append(float(loss.detach()))
        return out

    def rank(number: int) -> list[float]:
        with World.join("cpu") as world:
            a = parallelize(copy.deepcopy(first.model), CASE.plan(Strategy(tp_x=4)), world)
            plan = second.case.plan(Strategy(dp_shard=2, tp_x=2))
            b = parallelize(copy.deepcopy(second.model), plan, world)
            ids, labels = CASE.batches()[0]
            args = {"input_ids": ids, "labels": labels, "shift_labels": labels}
            one, two = a(**args).loss, b(**args).loss  # both forwards before both backwards
            two.backward()
            one.backward()
            assert handle(a).ranks.mesh is not handle(b).ranks.mesh
            halves = [(0, 1), (2, 3)]
            plans = [first.case.plan(Strategy(tp_x=2)), second.case.plan(Strategy(tp_x=2))]
            for half, half_plan in zip(halves, plans, strict=True):
                world.mesh(half_plan.strategy, half)
            mine = number // 2
            reference = (first, second)[mine]
            model = parallelize(copy.deepcopy(reference.model), plans[mine], world, halves[mine])
            return losses(model, reference.case, 3)

    found = launch(rank, 4, timeout_s=180)
    for number, curve in enumerate(found):
        assert curve == pytest.approx(expected[number // 2][:3], rel=1e-10, abs=0)


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.head = nn.Linear(8, 12)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.down(torch.relu(self.up(self.norm(x))))).log_softmax(-1)


def _plain_plan(strategy: Strategy) -> Plan:
    rules = (
        Rule("embed", "vocab"), Rule("up", "colwise"), Rule("down", "rowwise"), Rule("head", "head"),
    )  # fmt: skip
    strategy = dataclasses.replace(strategy, rules=rules if strategy.tp > 1 else ())
    layouts = plan_layouts(
        [(n, tuple(p.shape), ()) for n, p in _Mlp().named_parameters()], (), strategy,
        num_heads=strategy.tp, num_kv_heads=strategy.tp, head_dim=8, vocab_size=12,
    ).layouts  # fmt: skip
    return dataclasses.replace(CASE.plan(Strategy()), strategy=strategy, layouts=layouts)


@pytest.mark.dist
def test_any_module_with_rules() -> None:
    torch.manual_seed(0)
    model = _Mlp().double()
    ids = torch.randint(0, 12, (4, 5))

    def gradients(net: nn.Module, data: Tensor) -> dict[str, Tensor]:
        net(data).square().sum().backward()
        grads = {n: p.grad for n, p in net.named_parameters()}
        return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}

    expected = gradients(copy.deepcopy(model), ids)

    def rank(number: int) -> None:
        with World.join("cpu") as world:
            for strategy in (
                Strategy(tp_x=4),
                Strategy(dp_shard=2, tp_x=2),
                Strategy(dp_replicate=4),
            ):
                net = parallelize(copy.deepcopy(model), _plain_plan(strategy), world)
                rows = ids.chunk(strategy.dp)[number // strategy.tp]
                found = gradients(net, rows)
                for name, grad in expected.items():
                    torch.testing.assert_close(found[name], grad, rtol=1e-10, atol=1e-12)
                total = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
                assert float(clip_grad_norm_(net, None)) == pytest.approx(total, rel=1e-12)

    launch(rank, 4, timeout_s=180)


@pytest.mark.slow
@pytest.mark.dist
def test_lower_precision_stays_close() -> None:
    """float32 repeats float32; bfloat16 compute with float32 parameters and reductions stays near it."""
    plain = Reference(Case("qwen3", tied=True, dtype="float32"))
    mixed = Reference(dataclasses.replace(plain.case, compute_dtype="bfloat16"))
    expected = plain.run.losses

    def rank(_: int) -> list[list[float]]:
        with World.join("cpu") as world:
            strategy = Strategy(dp_shard=2, tp_x=2)
            out = []
            for reference in (plain, mixed):
                found = run(reference, strategy, world, gradients=False, fused=True)
                assert found.counted == found.planned or world.rank
                out.append(found.losses)
            return out

    ranks = launch(rank, 4, timeout_s=180)
    for i, tolerance in ((0, 1e-5), (1, 2e-2)):
        losses = [sum(r[i][k] for r in ranks) for k in range(len(expected))]
        assert losses == pytest.approx(expected, rel=tolerance)
    with World.join("cpu") as world:  # one rank computes in bfloat16 as well
        found = parallelize(copy.deepcopy(mixed.model), mixed.case.plan(Strategy()), world)
        ids, labels = mixed.case.batches()[0]
        out = found(input_ids=ids, labels=labels, shift_labels=labels)
        assert out.logits.dtype == torch.bfloat16
        assert float(out.loss.detach()) == pytest.approx(expected[0], rel=2e-2)
        out.loss.backward()
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in found.parameters())


@pytest.mark.dist
def test_meta_parameters_are_laid_out_without_memory() -> None:
    case = Case("llama")

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            with torch.device("meta"):
                model = case.build()
            parallelize(model, case.plan(Strategy(dp_shard=2, tp_x=2)), world)
            assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
            audit(model)

    launch(rank, 4, timeout_s=180)


@pytest.mark.dist
@pytest.mark.filterwarnings("default")  # Dynamo's tracer warns about what it does itself
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_layers_compile_without_a_graph_break(family: str) -> None:
    """Norms over one head, and over a width that ranks share."""
    setup = Setup(family, config=(("num_hidden_layers", 1),))
    narrow = {f"{kind}_dtype": "float32" for kind in ("compute", "param", "reduce")}
    workload = dataclasses.replace(setup.workload(Strategy()), **narrow)
    plan = make_plan(setup.spec, Strategy(tp_x=2), workload)
    model, batch = setup.build().float(), setup.batch()

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            norms = []
            for compiled in (False, True):
                net = parallelize(copy.deepcopy(model), plan, world)
                if compiled:
                    for layer in net.model.layers:
                        layer.compile(backend="aot_eager", fullgraph=True)
                net(**batch, labels=batch["shift_labels"]).loss.backward()
                norms.append(float(clip_grad_norm_(net, None)))
            assert norms[1] == pytest.approx(norms[0], rel=1e-5)

    launch(rank, 2, timeout_s=100)


@pytest.mark.torch
def test_refusals_come_before_any_rank() -> None:
    world = World.join("cpu")
    model = CASE.build()
    plan = CASE.plan(Strategy())
    with pytest.raises(DegreesMismatch, match="HP301") as caught:
        parallelize(model, CASE.plan(Strategy(tp_x=2)), world)
    assert caught.value.got == "tp_x=2 on 1 rank"
    assert caught.value.hint == "torchrun --nproc-per-node 2 SCRIPT"
    with pytest.raises(DegreesMismatch) as caught:
        parallelize(model, CASE.plan(Strategy(dp_shard=2)), world)
    assert caught.value.hint == "torchrun --nproc-per-node 2 SCRIPT, or dp_shard=1"
    layouts = dict(plan.layouts)
    del layouts["model.norm.weight"]
    with pytest.raises(PlanMismatch, match=r"HP307.*model\.norm\.weight"):
        parallelize(model, dataclasses.replace(plan, layouts=layouts), world)
    with pytest.raises(NotDivisible, match="HP203"):
        CASE.plan(Strategy(tp_x=3))
    with pytest.raises(UnsupportedSharding, match="HP205"):
        CASE.plan(Strategy(tp_y=2))
    with pytest.raises(TypeError, match="parallelize"):
        audit(model)


@pytest.mark.dist
def test_audit_names_a_parameter_that_moved() -> None:
    def rank(_: int) -> None:
        with World.join("cpu") as world:
            model = parallelize(CASE.build(), CASE.plan(Strategy(dp_shard=2)), world)
            layouts = handle(model).layouts
            layouts["model.norm.weight"] = Layout.replicated(1)
            with pytest.raises(AuditError, match=r"HP206[\s\S]*model\.norm\.weight"):
                audit(model)
            split = parallelize(CASE.build(), CASE.plan(Strategy(tp_x=2)), world)
            with pytest.raises(UnsupportedSharding, match="HP205"):
                split(input_ids=CASE.batches()[0][0], output_hidden_states=True)
            whole = Rule("model.layers.*.self_attn", "replicate")
            with pytest.raises(UnsupportedSharding, match="are inconsistent"):
                CASE.plan(Strategy(tp_x=2, rules=(whole,)))

    launch(rank, 2, timeout_s=180)


@pytest.mark.dist
def test_a_later_world_with_an_equal_mesh_uses_its_own_groups() -> None:
    def whole(world: World) -> torch.Tensor:
        mesh = world.mesh(Strategy(dp_shard=2))["dp_shard"]
        part = torch.full((1,), float(world.rank))
        return DTensor.from_local(part, mesh, [Shard(0)], run_check=False).full_tensor()

    with World.fake(0, 2) as world:
        whole(world)

    def rank(_: int) -> list[float]:
        with World.join("cpu") as world:
            return whole(world).tolist()

    assert launch(rank, 2, timeout_s=180) == [[0.0, 1.0], [0.0, 1.0]]
