"""Modules that only some ranks run in a step: gradients of one rank, or one coded refusal."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

import hyper_parallel as hp
from hyper_parallel.backends.torch import check_flow
from hyper_parallel.backends.torch.partial_use import encoder_inputs, refuse_other_inputs
from hyper_parallel.errors import (
    CollectiveMismatch,
    HyperParallelError,
    NoLoss,
    UnsupportedSharding,
)
from hyper_parallel.ir import Strategy

LAYOUTS = ("dp_shard=2", "dp_replicate=2", "dp_shard=2 zero=1")


class _Branches(nn.Module):
    """Blocks of one shape in a list, and a branch beside them of another; the caller says which ones run."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.wide = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 6))
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor, path: Sequence[int], wide: bool = False) -> Tensor:
        x = self.first(x)
        for number in path:
            x = x + torch.tanh(self.blocks[number](x))
        return self.last(x + self.wide(x) if wide else x).square().sum()


Path_ = tuple[int, ...]
PATHS: dict[str, list[list[tuple[Path_, ...]]]] = {
    # Of every step, of every rank: the blocks that run in each microbatch.
    "branches": [[((0,),), ((1,),)]] * 2,
    "skipped": [[((0, 1, 2),), ((0, 2),)], [((1, 2),), ((0, 1, 2),)]],
    "order": [[((0, 1, 2),), ((2, 0, 1),)]] * 2,
    "calls": [[((0, 1, 1, 2),), ((0, 2, 2, 2, 1),)]] * 2,
    "skipped later": [[((0, 1, 2),), ((0, 1, 2),)], [((0, 1, 2),), ((1,),)], [((0, 2),), ((0, 2),)]],
    "used later": [[((0,),), ((0,),)], [((0,),), ((0, 1),)], [((2, 0),), ((0,),)]],
    "microbatches": [[((0, 1), (2,)), ((1,), (0, 1, 2))]] * 2,
}  # fmt: skip


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    whole = {n: getattr(p.grad, "full_tensor", lambda g=p.grad: g)() for n, p in model.named_parameters()}
    model.zero_grad()
    return {name: None if g is None else g.clone() for name, g in whole.items()}


def _assert_equal(found: Any, expected: Any) -> None:
    for (loss, gradients), (wanted, right) in zip(found, expected, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-10)
        assert {n for n, g in gradients.items() if g is None} == {n for n, g in right.items() if g is None}
        for name, gradient in gradients.items():
            if gradient is not None:
                torch.testing.assert_close(gradient, right[name], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_that_run_different_blocks_repeat_one_rank() -> None:
    torch.manual_seed(0)
    model = _Branches().double()
    data = torch.randn(2, 2, 4, 6, dtype=torch.float64)  # by rank and microbatch

    def step(net: nn.Module, paths: Sequence[Path_], rank: int, share: Callable[..., Any]) -> float:
        total = 0.0
        for number, path in enumerate(paths):
            with share(number == len(paths) - 1):
                loss = net(data[rank, number], path, wide=rank == 1)
                loss.backward()
            total += float(loss.detach())
        return total

    def alone(steps: Any) -> Any:
        net = copy.deepcopy(model)
        for ranks in steps:
            loss = sum(step(net, p, r, lambda _: torch.enable_grad()) for r, p in enumerate(ranks))
            yield loss, _gradients(net)

    expected = {name: list(alone(steps)) for name, steps in PATHS.items()}

    def rank(number: int) -> None:
        with hp.World.join("cpu") as world:
            for layout in LAYOUTS:
                for name, steps in PATHS.items():
                    net = copy.deepcopy(model)
                    hp.parallelize(net, hp.plan_of(net, layout), world)

                    def share(last: bool, net: nn.Module = net) -> Any:
                        return torch.enable_grad() if last else hp.accumulate(net)

                    found = []
                    for ranks in steps:
                        loss = torch.tensor(step(net, ranks[number], number, share), dtype=torch.float64)
                        torch.distributed.all_reduce(loss)
                        found.append((float(loss), _gradients(net)))
                    _assert_equal(found, expected[name])

    hp.launch(rank, 2, timeout_s=100)


@pytest.mark.dist
def test_an_order_that_changes_later_is_refused_and_the_hint_works() -> None:
    model = _Branches().double()
    data = torch.randn(2, 4, 6, dtype=torch.float64)
    orders = [[(0, 1, 2), (0, 1, 2)], [(0, 1, 2), (2, 1, 0)]]

    def losses(one_order: bool) -> Callable[[int], None]:
        def rank(number: int) -> None:
            with hp.World.join("cpu") as world:
                net = copy.deepcopy(model)
                hp.parallelize(net, hp.plan_of(net, "dp_shard=2"), world, one_order=one_order)
                for order in orders:
                    net(data[number], order[number]).backward()

        return rank

    with pytest.raises(CollectiveMismatch, match=r"HP622[\s\S]*blocks\.[\s\S]*one_order=False"):
        hp.launch(losses(True), 2, timeout_s=60)
    hp.launch(losses(False), 2, timeout_s=60)


class _EncoderPerImage(nn.Module):
    """Model whose blocks, which FSDP gathers one by one, run once for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.head = nn.Linear(6, 1)

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
        x = self.words(input_ids).sum((0, 1))
        for image in () if pixel_values is None else pixel_values:
            for block in self.blocks:
                image = torch.tanh(block(image))
            x = x + image.sum(0)
        return self.head(x).square().sum()


@pytest.mark.dist
def test_more_images_after_equal_passes_are_refused_or_repeat_one_rank() -> None:
    model = _EncoderPerImage().double()
    images = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    counts = [(1, 1), (1, 1), (1, 1), (1, 3), (2, 0)]  # images of each rank, by step
    ids = torch.ones(1, 3, dtype=torch.int64)

    def loss(net: nn.Module, number: int, count: int) -> Tensor:
        return net(ids, images[number, :count] if count else None)

    expected = []
    for step in counts:
        losses = [loss(model, number, count) for number, count in enumerate(step)]
        sum(losses).backward()
        expected.append((float(sum(losses).detach()), _gradients(model)))

    def steps(one_order: bool) -> Callable[[int], None]:
        def rank(number: int) -> None:
            with hp.World.join("cpu") as world:
                net = copy.deepcopy(model)
                hp.parallelize(net, hp.plan_of(net, "dp_shard=2"), world, one_order=one_order)
                found = []
                for step in counts:
                    own = loss(net, number, step[number])
                    own.backward()
                    total = own.detach().clone()
                    torch.distributed.all_reduce(total)
                    found.append((float(total), _gradients(net)))
                _assert_equal(found, expected)

        return rank

    with pytest.raises(CollectiveMismatch, match=r"HP622[\s\S]*parallel\.one_order=false"):
        hp.launch(steps(True), 2, timeout_s=60)
    hp.launch(steps(False), 2, timeout_s=60)


def _qwen3_vl() -> nn.Module:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
        "spatial_merge_size": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, image_token_id=90, video_token_id=91,
        vision_start_token_id=92, vision_end_token_id=93,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3VLForConditionalGeneration(config).double()


def _steps_with_an_image() -> list[list[list[dict[str, Tensor]]]]:
    """Return microbatches by step and rank: one rank's second microbatch has an image, then none has."""
    ids = torch.randint(3, 80, (3, 16))
    pictured = ids[:1].clone()
    pictured[0, 2:6] = 90
    image = {
        "input_ids": pictured, "labels": pictured.masked_fill(pictured == 90, -100),
        "pixel_values": torch.randn(16, 96, dtype=torch.float64), "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (pictured == 90).int(),
    }  # fmt: skip
    texts = [{"input_ids": row[None], "labels": row[None]} for row in ids]
    return [[[texts[0], image], texts[1:]], [texts[:2], texts[1:]]]


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_one_rank_with_an_image_and_one_without_repeat_one_rank() -> None:
    model = _qwen3_vl()
    steps = _steps_with_an_image()
    (_, image), _ = steps[0]
    alone = hp.parallelize(copy.deepcopy(model), hp.plan_of(model, ""), hp.World.join("cpu"))
    expected = [
        (float(hp.forward_backward(alone, a + b)), _gradients(alone)) for a, b in steps
    ]  # fmt: skip

    def rank(number: int) -> None:
        with hp.World.join("cpu") as world:
            for layout in LAYOUTS:
                net = copy.deepcopy(model)
                hp.parallelize(net, hp.plan_of(net, layout), world)
                found = [(float(hp.forward_backward(net, step[number])), _gradients(net)) for step in steps]
                _assert_equal(found, expected)
            net = copy.deepcopy(model)
            hp.parallelize(net, hp.plan_of(net, "cp=2"), world)
            with pytest.raises(UnsupportedSharding, match=r"HP205[\s\S]*pixel_values"):
                hp.forward_backward(net, [image, image])

    hp.launch(rank, 2, timeout_s=100)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_stages_that_both_need_an_encoder_repeat_one_rank() -> None:
    model = _qwen3_vl()
    steps = _steps_with_an_image()
    alone = hp.parallelize(copy.deepcopy(model), hp.plan_of(model, ""), hp.World.join("cpu"))
    expected = [(float(hp.forward_backward(alone, a + b)), _gradients(alone)) for a, b in steps]

    def rank(number: int) -> None:
        with hp.World.join("cpu") as world:
            for layout in ("pp=2 dp_shard=2", "pp=2 dp_replicate=2"):
                net = copy.deepcopy(model)
                hp.parallelize(net, hp.plan_of(net, layout), world)
                share, shares = hp.data_share(net)
                for step, (wanted, right) in zip(steps, expected, strict=True):
                    microbatches = step[share] if shares == 2 else step[0] + step[1]
                    loss = float(hp.forward_backward(net, microbatches))
                    gradients = _gradients(net)
                    own = {name: right[name] for name in gradients}
                    _assert_equal([(loss, gradients)], [(wanted, own)])

    hp.launch(rank, 4, timeout_s=200)


@pytest.mark.dist
def test_features_that_enter_an_unknown_layer_of_a_later_stage_are_refused() -> None:
    model = _qwen3_vl()
    model.config.vision_config.deepstack_visual_indexes = []  # of which the config says nothing
    (_, image), _ = _steps_with_an_image()[0]

    def rank(number: int) -> None:
        with hp.World.join("cpu") as world:
            net = copy.deepcopy(model)
            hp.parallelize(net, hp.plan_of(net, "pp=2"), world)
            hp.forward_backward(net, [image, image])

    with pytest.raises(UnsupportedSharding, match=r"HP205[\s\S]*features of media enter layer 1"):
        hp.launch(rank, 2, timeout_s=100)


class _FirstStageForCausalLM(Qwen2ForCausalLM):
    """Model that repeats its tokens, or masks a logit, in passes with the argument of that name."""

    def forward(
        self,
        input_ids: Any = None,
        labels: Any = None,
        repeats: Any = None,
        masked: Any = None,
        **kwargs: Any,
    ) -> Any:
        ids = input_ids if repeats is None else torch.cat([input_ids] * len(repeats), dim=1)
        out = super().forward(input_ids=ids, labels=labels, **kwargs)
        if masked is not None:
            out.logits[:, :, 5] = 0
        return out


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("repeats", NoLoss, "HP514[\\s\\S]*do not match the input tokens"),
        ("masked", UnsupportedSharding, "HP205[\\s\\S]*code after its layers"),
    ],
)
def test_code_that_fails_on_the_first_stage_only_is_refused(
    name: str, error: type[HyperParallelError], match: str
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 32, "num_hidden_layers": 2}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2)
    model = _FirstStageForCausalLM(config)
    ids = torch.ones(1, 4, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, name: torch.ones(2)}

    def rank(number: int) -> None:
        with hp.World.join("cpu") as world:
            hp.parallelize(model, hp.plan_of(model, "pp=2"), world)
            hp.forward_backward(model, [batch, batch])

    with pytest.raises(error, match=match):
        hp.launch(rank, 2, timeout_s=100)


class _MaskedLogitForCausalLM(Qwen2ForCausalLM):
    """Model that never predicts token 5, as models that read but do not write images."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids=input_ids, **kwargs)
        out.logits[:, :, [5]] = torch.finfo(out.logits.dtype).min
        if labels is not None:
            out.loss = self.loss_function(out.logits, labels, self.config.vocab_size, **kwargs)
        return out


@pytest.mark.dist
def test_stages_before_the_head_run_code_that_writes_logits() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 32, "num_hidden_layers": 2}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2)
    model = _MaskedLogitForCausalLM(config).double()
    ids = torch.arange(8)[None] % 4
    batch = {"input_ids": ids, "labels": ids}
    alone = hp.parallelize(copy.deepcopy(model), hp.plan_of(model, ""), hp.World.join("cpu"))
    expected = float(hp.forward_backward(alone, [batch, batch])), _gradients(alone)

    def rank(number: int) -> None:
        with hp.World.join("cpu") as world:
            hp.parallelize(model, hp.plan_of(model, "pp=2"), world)
            loss, gradients = float(hp.forward_backward(model, [batch, batch])), _gradients(model)
            own = {name: expected[1][name] for name in gradients}
            _assert_equal([(loss, gradients)], [(expected[0], own)])

    hp.launch(rank, 2, timeout_s=100)


def test_codes_of_media_are_inputs_of_an_encoder_and_grids_and_masks_are_not() -> None:
    batch = {
        "codes": torch.ones(1, 3, 2, dtype=torch.long),
        "pixels": torch.ones(1, 3),
        "grid": torch.ones(1, 3, dtype=torch.long),
        "pixel_mask": torch.ones(1, 1, 4, 4, dtype=torch.bool),
        "input_ids": torch.ones(1, 4, 2, dtype=torch.long),
        "num_items_in_batch": torch.tensor(1.0),
    }
    assert {*encoder_inputs(batch)} == {"codes", "pixels"}


@pytest.mark.parametrize(("name", "dtype"), [("audio_ids", torch.long), ("pixels", torch.double)])
def test_context_parallelism_refuses_media_by_name_and_reads_text(name: str, dtype: torch.dtype) -> None:
    ids = torch.ones(1, 4, dtype=torch.long)
    batch = {"input_ids": ids, "position_ids": ids, "shift_labels": ids, "token_mask": ids.bool()}
    model = nn.Identity()
    refuse_other_inputs(model, ("cp",), batch)
    media = {**batch, name: torch.ones(1, 3, 2, dtype=dtype)}
    refuse_other_inputs(model, (), media)
    with pytest.raises(UnsupportedSharding, match=f"HP205[\\s\\S]*`{name}`[\\s\\S]*parallel.cp=1"):
        refuse_other_inputs(model, ("cp",), media)


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_layers_left_out_by_chance_repeat_one_rank_or_are_refused() -> None:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(
        vocab_size=96, hidden_size=32, ffn_dim=48, num_hidden_layers=4, num_attention_heads=4, dropout=0.0,
        max_position_embeddings=64, word_embed_proj_dim=32, layerdrop=0.5,
    )).double().train()  # fmt: skip
    ids = torch.randint(3, 90, (2, 12))
    for axis in ("tp_x", "cp", "pp"):
        plan = hp.plan_of(model, Strategy(**{axis: 2}))
        with pytest.raises(UnsupportedSharding, match=r"HP205[\s\S]*layers\.0[\s\S]*layerdrop"):
            check_flow(model, plan)

    def step(net: nn.Module, number: int, seed: int) -> float:
        torch.manual_seed(seed + 100 * number)  # what every rank draws
        row = ids[number : number + 1]
        loss = net(input_ids=row, labels=row, num_items_in_batch=torch.tensor(22)).loss
        loss.backward()
        return float(loss.detach())

    alone = hp.parallelize(copy.deepcopy(model), hp.plan_of(model, ""), hp.World.join("cpu"))
    expected = [(sum(step(alone, n, s) for n in (0, 1)), _gradients(alone)) for s in range(4)]

    def rank(number: int) -> None:
        with hp.World.join("cpu") as world:
            net = copy.deepcopy(model)
            hp.parallelize(net, hp.plan_of(net, "dp_shard=2"), world)
            found = []
            for seed in range(4):
                loss = torch.tensor(step(net, number, seed), dtype=torch.float64)
                torch.distributed.all_reduce(loss)
                found.append((float(loss), _gradients(net)))
            _assert_equal(found, expected)

    hp.launch(rank, 2, timeout_s=100)


@pytest.mark.dist
def test_sigterm_ends_ranks_that_wait_and_says_where_they_are(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import sys, time, pathlib, torch, hyper_parallel as hp\n"
        "def rank(number):\n"
        "    with hp.World.join('cpu'):\n"
        "        pathlib.Path(sys.argv[1], str(number)).touch()\n"
        "        if number:\n"
        "            time.sleep(1000)\n"
        "        torch.distributed.all_reduce(torch.ones(1))\n"
        "hp.launch(rank, 2)\n"
    )
    words = [sys.executable, str(script), str(tmp_path)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("[01]"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(2.5)  # ranks look at themselves twice a second
        process.terminate()
        _, errors = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGTERM
    assert "SIGTERM: rank 0 waits for all_reduce over all ranks" in errors
    assert "SIGTERM: rank 1 is in rank (waits.py:6)" in errors
