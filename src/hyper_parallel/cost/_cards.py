"""Cards: efficiency of a device and of a training framework (stack), as YAML with a source for every number.

A device card has the fractions of the topology's peak rates that kernels and links achieve. A stack card has the
constants of a training framework, such as overlap, recomputation and host work. Shipped cards are in `cost/cards`;
`hyper-parallel calibrate` writes cards of the same form. The path of a number is its key in the file, such as `link` or
`matmul.bfloat16`.

Cards of this machine depend on the number of concurrent ranks, of which `calibrate` measures several. Between two
measured numbers of ranks, positive constants follow a power law; below the smallest and above the largest number, all
are constant.
"""

from __future__ import annotations

import fnmatch
import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from pydantic import Field

from hyper_parallel.config import Section, read_section
from hyper_parallel.errors import CardUnreadable
from hyper_parallel.topology import Device, cache_dir

_FOLDER: Final = Path(__file__).with_name("cards")
_NO_NUMBERS: Final = ("name", "devices", "sources", "priors")
UNFITTED_HALF_WIDTH: Final = 0.2
"""Half width of a prediction interval, in natural logarithm, with a card that was not fitted to runs."""
_INTERPOLATED: Final = "not on the card: the share of bfloat16"


@dataclass(frozen=True, slots=True)
class DeviceCard:
    """Constants of a device's kernels and links; achieved rates are fractions of the peak rates in the topology."""

    name: str
    devices: tuple[str, ...]  # globs over the device names that the card applies to
    matmul: Mapping[str, float]  # share of the peak FLOP/s that a large matmul reaches, by dtype
    # matmul dimension that reaches half of the `matmul` rate, in units of peak FLOP/s / memory bytes/s, for 2-byte
    # elements; proportional to the bytes of an element
    saturation: float
    # share of the peak FLOP/s that the two attention products reach on long sequences and wide heads, by dtype
    attention: Mapping[str, float]
    # rate of portable attention kernels, which are not specific to this device, as a share of the `attention` rate
    portable: float
    attention_head: float  # head width that reaches half of the `attention` rate
    attention_len: float  # sequence length that reaches half of the `attention` rate
    # share of the memory bandwidth that element-wise and normalising kernels reach
    elementwise: float
    stream: float  # share of the memory bandwidth that one long pass reaches, as in the optimizer
    link: float  # share of the bandwidth of the innermost links that collectives reach
    network: float  # share of the bandwidth that collectives reach on outer tiers with links of their own
    exchange: float  # share of `network` that all-to-alls of long messages reach
    # message length that reaches half of the `exchange` rate; a message is one token
    message_bytes: float
    kernel_s: float  # seconds to launch one kernel or run one small operator
    # 1 if the host launches kernels ahead of the device, so that launches add only the time by which they take longer
    # than the kernels
    launch_hidden: float
    context_bytes: float  # bytes of driver context, communicators and workspaces
    # memory reserved by the allocator but unusable, as a share of transient bytes
    fragmentation: float
    # seconds of a collective with a tiny message, relative to the topology's latency
    latency: float = 1.0
    # number of `rows` at which matmuls are slowest relative to `saturation`, and their relative extra `cost` there;
    # {}: no extra cost
    few_rows: Mapping[str, float] = field(default_factory=dict)
    # share of the compute units that a collective occupies, so that overlapped computation and communication are
    # slower; with 1, overlap gains no time
    collective_share: float = 1.0
    # standard deviation of one task's time on one rank, relative to its mean; collectives wait for the latest rank
    jitter: float = 0.0
    # share of a collective's time by which the first rank has its result before the last one
    collective_spread: float = 0.0
    # share of the stack's `moe_month`, the slowdown of older releases, that applies to this device
    maturing: float = 1.0
    # speed of a rank relative to its speed while all ranks run, by the share of ranks that run; for ranks that share
    # cores, caches and memory
    pace: Mapping[str, float] = field(default_factory=dict)
    # source of each number, by path (`matmul.bfloat16`)
    sources: Mapping[str, str] = field(default_factory=dict)
    # value assumed before the fit to runs, by path
    priors: Mapping[str, float] = field(default_factory=dict)

    def source(self, name: str) -> str:
        """Return the source of the number with path `name`; without such a number, a note that bfloat16's is used."""
        return f"device card {self.name}: {self.sources.get(name, _INTERPOLATED)}"

    def share(self, table: str, dtype: str) -> float:
        """Return the entry for a dtype in the table `matmul` or `attention`, else for bfloat16, else the first one."""
        values: Mapping[str, float] = getattr(self, table)
        return values.get(dtype, values.get("bfloat16", next(iter(values.values()))))


@dataclass(frozen=True, slots=True)
class StackCard:
    """Constants of a training framework."""

    name: str
    # time of matmuls, attention and element-wise kernels relative to the device card
    compute: float = 1.0
    # passes of element-wise kernels over a layer's saved bytes, forward and backward
    passes: float = 5.0
    # passes over the elements of a norm, `forward` and `backward`, beyond those in `passes`; for norms that run
    # operator by operator
    norm_passes: Mapping[str, float] = field(default_factory=dict)
    # the same over the results of experts, which are weighted and summed
    combine_passes: Mapping[str, float] = field(default_factory=dict)
    # bytes moved per element of a matmul input or output gradient that is cast to 8 or 4 bits, by dtype
    quantize_bytes: Mapping[str, float] = field(default_factory=dict)
    # 1 for fused attention; 0 for attention that writes the score matrix to memory and computes the masked half too
    flash: float = 1.0
    # 1 if attention uses portable kernels instead of device-specific ones
    portable: float = 0.0
    # 1 where tensor parallelism shards the sequence between blocks; 0 where it all-reduces
    sequence_parallel: float = 1.0
    dropout: float = 0.0  # 1 where dropout masks are kept
    # 1 if gathered inputs are kept for backward; 0 re-gathers them, overlapped with the backward matmul
    keep_gathered: float = 1.0
    # 1 where every pipeline stage has the same number of layers; 0 where layers are split by cost
    even_stages: float = 0.0
    selective_matmul: float = 0.0  # share of the matmuls that selective recomputation redoes
    selective_attention: float = 0.0  # share of attention that selective recomputation redoes
    selective_kept: float = 1.0  # share of a layer's activations that selective recomputation keeps
    overlap_tp: float = 0.0  # share of tensor-parallel traffic that hides behind matmuls
    overlap_cp: float = 0.9  # share of the key-value ring that hides behind attention
    overlap_ep: float = 0.0  # share of expert exchanges that hides behind other work
    # `overlap_ep` with virtual pipeline stages, where an exchange can hide behind a forward and a backward
    overlap_ep_chunks: float = 0.0
    # share of the weight gradients of token chunks that is computed while later collectives are in flight; no
    # collective is in flight during the rest
    overlap_weights: float = 1.0
    # share of the weight gradients of the experts' first chunk that is computed while its rows are in flight
    overlap_expert_weights: float = 0.0
    # 1 where separate kernels add the weight gradients of half-batches and of chunks of experts; 0 where matmuls
    # accumulate them
    adds_gradients: float = 0.0
    overlap_dp: float = 0.9  # share of data-parallel traffic that hides behind compute
    # efficiency of the stack's collectives on outer tiers with links of their own, relative to the device card
    network: float = 1.0
    # tensors of a layer that ZeRO 1 reduces and gathers one by one; 0 where they share buckets
    tail_tensors: float = 0.0
    overlap_pp: float = 0.0  # share of pipeline sends that hides behind compute
    # 1 if a token is sent once to a rank, and once to a domain, with several of its experts
    ep_dedup: float = 0.0
    # time of the experts' element-wise work (permutation, activation), relative to the formula
    moe: float = 1.0
    # host seconds per expert layer, forward and backward together, that no kernel hides
    moe_host_s: float = 0.0
    # extra seconds to route, sort and permute a token for one of its experts; for a published run, times `moe_month`,
    # the device's `maturing` and the square root of its release's age
    moe_copy_s: float = 0.0
    # relative growth of `moe_host_s` per square root of a release's age in months before `moe_release`
    moe_month: float = 0.0
    moe_release: float = 0.0  # newest release in the fit, in months since January 2020
    # number of rows with which an expert's matmul takes twice as long per row as with many rows, because of ragged
    # tiles and the ramp of many small matmuls; in addition to the device's saturation
    expert_rows: float = 0.0
    # memory passes per token over the elements of a bias, forward and backward, in kernels separate from the matmul:
    # addition, clamping and gradient reduction
    bias_passes: float = 0.0
    imbalance: float = 1.0  # tokens of the busiest expert rank, relative to the mean
    kernels_forward: float = 30.0  # operators of a layer's forward
    kernels_backward: float = 55.0  # operators of a layer's backward
    # operators of one norm of query or key heads, forward and backward; a quarter of them forward
    kernels_norm: float = 0.0
    # core seconds of the host work of an axis per layer and microbatch, by axis; for dp_replicate per layer and step,
    # for pp per microbatch and virtual stage
    host_s: Mapping[str, float] = field(default_factory=dict)
    step_s: float = 0.0  # seconds per step not explained by other terms: data, logging, host
    # relative increase of the step time per doubling of the number of devices
    straggle: float = 0.0
    logit_bytes: float = 10.0  # bytes per logit at the peak of the loss, in half precision
    kept: float = 1.0  # activations kept for backward, relative to the formula
    # bytes of workspaces and of the allocator's reserve, added to `context_bytes` for published runs only
    reserve_bytes: float = 0.0
    # 1 where operators are not fused, so that norms, gates and attention keep copies for backward
    eager: float = 0.0
    # 1 for HyperParallel's own runtime: memory is predicted per phase of a step, and tensor parallelism replicates
    # parts without a sharding rule; 0 for other frameworks: memory terms are added, and all parts are sharded
    phased: float = 0.0
    gradient_copy_bytes: float = 0.0  # bytes per parameter of a second copy of the gradients, with ZeRO 0 and 1
    # 2 where embedding and head are gathered separately, 1 where they are gathered together
    vocabulary_groups: float = 1.0
    # half width of a prediction interval in natural logarithm, by kind of model (dense, moe); with `_unknown_stack`
    # appended if the card substitutes for that of a stack without a card
    interval: Mapping[str, float] = field(default_factory=dict)
    # source of each number, by path
    sources: Mapping[str, str] = field(default_factory=dict)
    # value assumed before the fit to runs, by path
    priors: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_own_runtime(self) -> bool:
        """True if the card describes HyperParallel's own runtime, by the key `phased`."""
        return self.phased > 0.0

    def half_width(self, kind: str) -> float:
        """Return h; 80 % of step times are expected between `t / e**h` and `t * e**h` for a prediction t.

        `kind` is a key of `interval`, such as `dense`; without an entry, h is `UNFITTED_HALF_WIDTH`.
        """
        return self.interval.get(kind, UNFITTED_HALF_WIDTH)

    def source(self, name: str) -> str:
        """Return the source of the number with path `name`; `default` if the card file lacks it."""
        return f"stack card {self.name}: {self.sources.get(name, 'default')}"


C = TypeVar("C", DeviceCard, StackCard)
CardPair = tuple[DeviceCard, StackCard]


def numbers_of(card: DeviceCard | StackCard) -> dict[str, float]:
    """Return a dict from path, such as `link` or `matmul.bfloat16`, to number, for all numbers of a card."""
    named = {f.name: getattr(card, f.name) for f in fields(card) if f.name not in _NO_NUMBERS}
    return _by_path(named)


def _by_path(named: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested tables to a dict with paths such as `matmul.bfloat16` as keys; the inverse of `by_field`."""
    flat: dict[str, Any] = {}
    for name, value in named.items():
        table = isinstance(value, Mapping)
        flat |= {f"{name}.{k}": v for k, v in value.items()} if table else {name: value}
    return flat


def by_field(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nest a dict with paths as keys: the value at `matmul.bfloat16` moves to `bfloat16` in the dict at `matmul`."""
    named: dict[str, Any] = {}
    for path, value in values.items():
        name, _, key = path.partition(".")
        if key:
            named.setdefault(name, {})[key] = value
        else:
            named[name] = value
    return named


def with_numbers(card: C, values: Mapping[str, float]) -> C:
    """Return a card with some numbers replaced; `values` is a dict from path to number."""
    named = by_field(values)
    tables = {k: {**getattr(card, k), **v} for k, v in named.items() if isinstance(v, dict)}
    return replace(card, **(named | tables))


class _Number(Section):
    """Number in a card file."""

    value: float
    """The number."""
    source: str = Field(min_length=1)
    """Source of the number, one short phrase."""
    prior: float | None = None
    """Value assumed before the fit to runs, at which the fit starts."""


_Numbers = dict[str, _Number]
"""Dict from path, such as `matmul.bfloat16`, to a number."""


class _Part(Section):
    """Numbers in a card file: those of a device card and those of a stack card."""

    device: dict[str, _Number | dict[str, _Number]] = Field(default_factory=dict)
    """Numbers of the device card."""
    stack: dict[str, _Number | dict[str, _Number]] = Field(default_factory=dict)
    """Numbers of the stack card."""

    def over(self, base: tuple[_Numbers, _Numbers]) -> tuple[_Numbers, _Numbers]:
        """Return `base`, a pair (device numbers, stack numbers) by path, updated with the numbers of this section."""
        return base[0] | _by_path(self.device), base[1] | _by_path(self.stack)


class _CardFile(_Part):
    """Card file: a device card, a stack card, or both."""

    name: str
    """Name of the card, printed with every term."""
    extends: str | None = None
    """Name of the shipped card whose numbers are the defaults of this file."""
    devices: tuple[str, ...] = ()
    """Globs over device names that a device card applies to."""
    ranks: int | None = Field(default=None, ge=1)
    """Number of concurrent ranks in the measurement. None: the numbers apply to any number of ranks."""
    fewer: dict[Annotated[int, Field(ge=1)], _Part] = Field(default_factory=dict)
    """Numbers that differ with fewer concurrent ranks, by the number of ranks."""

    def numbers(self, path: Path) -> tuple[_Numbers, _Numbers]:
        """Return (device numbers, stack numbers) of this file by path, with those of `extends` as defaults."""
        if not self.extends:
            return self.over(({}, {}))
        base = _shipped_path(self.extends, f"{path}: extends")
        return self.over(_parsed(base).numbers(base))

    def cards(self, numbers: tuple[_Numbers, _Numbers], path: Path) -> tuple[DeviceCard | None, StackCard | None]:
        """Return (device card, stack card) with the given numbers; None for a card without numbers."""
        device, stack = numbers
        return (
            DeviceCard(self.name, self.devices, **_values(DeviceCard, device, path)) if device else None,
            StackCard(self.name, **_values(StackCard, stack, path)) if stack else None,
        )  # fmt: skip


@cache
def card_names() -> tuple[str, ...]:
    """Return the names of the shipped cards."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def read_card(path: str | Path) -> tuple[DeviceCard | None, StackCard | None]:
    """Return (device card, stack card) of a file; None for a card that the file lacks.

    Raises:
        CardUnreadable: HP313 when the file is missing or no mapping, `extends` is unknown, or a number is missing or
            unknown.
        UnknownKey: HP101 for an unknown key.
        BadValue: HP102 for a value that is not allowed.
    """
    path = Path(path)
    file = _parsed(path)
    return file.cards(file.numbers(path), path)


@cache
def load_card(name: str) -> tuple[DeviceCard | None, StackCard | None]:
    """Return a shipped card by name; result and errors as for `read_card`, and HP313 for an unknown name."""
    return read_card(_shipped_path(name))


def _shipped_path(name: str, where: str | None = None) -> Path:
    """Return the path of a shipped card; raise CardUnreadable (HP313) if no card has this name, set at `where`."""
    if name not in card_names():
        near = get_close_matches(name, card_names(), 1) or ["accelerator"]
        hint = f"extends: {near[0]}" if where else None
        raise CardUnreadable(
            f"no shipped card is named `{name}`", where=where, got=name, allowed=card_names(), hint=hint
        )  # fmt: skip
    return _FOLDER / f"{name}.yaml"


def device_card(device_name: str, kind: str) -> DeviceCard:
    """Return the shipped card of a device; without a matching card, `cpu` if `kind` is cpu, else `accelerator`."""
    shipped = (load_card(name)[0] for name in card_names())
    card = matching_card((card for card in shipped if card), device_name)
    card = card or load_card("cpu" if kind == "cpu" else "accelerator")[0]
    assert card is not None, "the shipped cards of a kind are complete"
    return card


def matching_card(cards: Iterable[DeviceCard], device_name: str) -> DeviceCard | None:
    """Return the first card with a glob that matches a device name, ignoring case; None if no card matches."""
    name = device_name.lower()
    return next((c for c in cards if any(fnmatch.fnmatchcase(name, g.lower()) for g in c.devices)), None)


def stack_card(name: str) -> StackCard:
    """Return a shipped stack card by name; raise CardUnreadable (HP313) if there is none."""
    card = load_card(name)[1]
    if card is None:
        allowed = [n for n in card_names() if load_card(n)[1] is not None]
        raise CardUnreadable(f"the card `{name}` has no section `stack`", got=name, allowed=allowed)
    return card


def shipped_cards(device: Device) -> CardPair:
    """Return the shipped card of a device, and that of HyperParallel's own runtime on this kind of device."""
    stack = stack_card("cpu" if device.kind == "cpu" else "hyper-parallel")
    return device_card(device.name, device.kind), stack


def _parsed(path: Path) -> _CardFile:
    return read_section(path, _CardFile, CardUnreadable, "card")


def _values(card: type[DeviceCard | StackCard], numbers: _Numbers, path: Path) -> dict[str, Any]:
    """Return keyword arguments for the constructor of a card: numbers, their sources and priors."""
    known = {f.name: f for f in fields(card) if f.name not in _NO_NUMBERS}
    tables = {name for name, f in known.items() if "Mapping" in str(f.type)}
    for number in numbers:
        name, _, key = number.partition(".")
        if name not in known or bool(key) != (name in tables):
            allowed = sorted(f"{name}.KEY" if name in tables else name for name in known)
            near = get_close_matches(number, allowed, 1)
            raise CardUnreadable(
                f"the card has an unknown key `{number}`", where=str(path), got=number, allowed=allowed,
                hint=f"leave out `{number}`" + (f", or rename it to `{near[0]}`" if near else ""),
            )  # fmt: skip
    values = by_field({key: number.value for key, number in numbers.items()})
    needed = {k for k, f in known.items() if f.default is MISSING and f.default_factory is MISSING}
    if missing := sorted(needed - set(values)):
        raise CardUnreadable(
            f"the device card lacks the keys {', '.join(missing)}",
            where=str(path),
            hint="set `extends: accelerator` (for a CPU: `extends: cpu`) to take them from a shipped card",
        )
    return {
        **values, "sources": {key: number.source for key, number in numbers.items()},
        "priors": {key: number.prior for key, number in numbers.items() if number.prior is not None},
    }  # fmt: skip


LOCAL_CARD: Final = "local"
"""Name of a card that was measured on this machine."""


def own_path() -> Path:
    """Return the path of the file with this machine's cards: `card.yaml` in the user's cache folder."""
    return cache_dir() / "card.yaml"


def own_cards_by_ranks(device_name: str) -> dict[int, CardPair]:
    """Return a dict from number of ranks to the cards that `calibrate` measured with them; {} without any.

    The numbers of ranks ascend. The result is also {} if the calibration file is for another device.

    Raises:
        CardUnreadable: HP313 when the file lacks the device, the stack or the number of ranks.
        HyperParallelError: Errors of `read_card`.
    """
    path = own_path()
    if not path.is_file():
        return {}
    file = _parsed(path)
    numbers = file.numbers(path)
    parts = (("device", numbers[0]), ("stack", numbers[1]), ("ranks", file.ranks))
    if missing := [key for key, value in parts if not value]:
        raise CardUnreadable(
            f"the calibration file of this machine lacks the keys {', '.join(missing)}",
            where=str(path),
            hint=f"rm {shlex.quote(str(path))} && hyper-parallel calibrate",
        )
    assert file.ranks is not None, "the file has a number of ranks"
    cards: dict[int, CardPair] = {}
    for ranks, fewer in sorted({**file.fewer, file.ranks: _Part()}.items()):
        device, stack = file.cards(fewer.over(numbers), path)
        assert device is not None, "the file has a device"
        assert stack is not None, "the file has a stack"
        cards[ranks] = device, stack
    return cards if matching_card([cards[file.ranks][0]], device_name) else {}


def cards_for_ranks(by_ranks: Mapping[int, CardPair], ranks: int) -> CardPair:
    """Return the cards for a number of concurrent ranks, interpolated between the nearest measured numbers."""
    low_ranks = max((k for k in by_ranks if k <= ranks), default=min(by_ranks))
    high_ranks = min((k for k in by_ranks if k >= ranks), default=max(by_ranks))
    if low_ranks >= high_ranks:
        return by_ranks[low_ranks]
    share = math.log(ranks / low_ranks) / math.log(high_ranks / low_ranks)
    (device, stack), (device_high, stack_high) = by_ranks[low_ranks], by_ranks[high_ranks]
    return _between(device, device_high, share), _between(stack, stack_high, share)


def _between(low: C, high: C, share: float) -> C:
    """Return `high` with each number interpolated between both cards, logarithmically if both values are positive."""

    def interpolate(a: float, b: float) -> float:
        if a > 0.0 and b > 0.0:
            return math.exp((1.0 - share) * math.log(a) + share * math.log(b))
        return (1.0 - share) * a + share * b

    low_ranks = numbers_of(low)
    changed = {k: b for k, b in numbers_of(high).items() if low_ranks.get(k, b) != b}
    return with_numbers(high, {k: interpolate(low_ranks[k], b) for k, b in changed.items()})
