"""Search for the assignment of a multimodal model's encoders and language part to devices.

A rank is a group of devices that works in lockstep. Language ranks form a pipeline. Copies of the encoders run on ranks
of their own, on language ranks, where they fill bubbles, or on both. An encoder has one to six stages. Each microbatch
passes through one copy of each stage, and the copies of a stage reduce their gradients once per step.

The search enumerates widths of ranks, copies, stages, I/W split of the backward, and orders of microbatches (`Choice`).
For each choice, layers and encoder microbatches are balanced over the ranks, and list scheduling orders the actions.
Choices are evaluated by ascending lower bound of the step time, until the next bound reaches the best step time. So the
result is the best of all choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import product
from types import MappingProxyType
from typing import Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Action, Schedule, StageCost, StageGraph, Timeline
from hyper_parallel.mpmd._list_schedule import ListScheduler
from hyper_parallel.mpmd._tasks import computations, cost_function, nanoseconds, schedule_tasks
from hyper_parallel.sim import simulate
from hyper_parallel.units import plural

_Order: TypeAlias = Literal["given", "light", "heavy", "mixed"]
_Variant: TypeAlias = tuple[bool, _Order, bool]
"""Fields `split`, `order` and `reduce_first` of a `Choice`, which change neither layers nor placement."""
_ORDERS: Final[tuple[_Order, ...]] = get_args(_Order)
_MOST_PIECES: Final = 6
"""Maximum number of stages of an encoder.

Several stages let a rank run more urgent actions in between, and spread a large microbatch over several ranks. Chosen
on random cases on 8 devices (benchmarks/multimodal_schedule.py); more stages lengthen the search.
"""


@dataclass(frozen=True, slots=True)
class SubModel:
    """Encoder or language part, with its costs on one device.

    Attributes:
        name: Displayed name: `vision`, `language`.
        layers: Number of equal layers.
        forward_s: Seconds of the forward of each microbatch; 0 if a microbatch has no data for an encoder.
        activation_bytes: Bytes of saved activations of each microbatch.
        output_bytes: Bytes sent per microbatch: features of an encoder, hidden states of the language part.
        state_bytes: Bytes of parameters, gradients and optimizer states.
        gradient_bytes: Bytes of the gradients that copies of an encoder reduce.
        frozen: Whether an encoder has no backward.
        input_grad: Time of the input gradient (I) relative to the forward (F).
        weight_grad: Time of the weight gradient (W) relative to the forward.
        speedup: Speed relative to one device, by number of devices.
        readers: Number of language layers, counted from the first, that read an encoder's features; more than one for
            deepstack.
    """

    name: str
    layers: int
    forward_s: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]
    state_bytes: int
    gradient_bytes: int
    frozen: bool = False
    input_grad: float = 1.0
    weight_grad: float = 1.0
    speedup: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    readers: int = 1

    @property
    def passes(self) -> float:
        """Time of forward and backward divided by the time of the forward."""
        return 1.0 if self.frozen else 1.0 + self.input_grad + self.weight_grad

    def stage_costs(self, share: float, width: int, reduce_s: float = 0.0) -> list[StageCost]:
        """Return the costs by microbatch of a stage with the fraction `share` of the layers, on `width` devices."""
        factor = share / self.speedup[width]
        return [
            StageCost(
                seconds * factor,
                seconds * factor * self.input_grad,
                seconds * factor * self.weight_grad,
                activation_bytes=round(activation * share),
                weight_grad_input_bytes=round(activation * share),
                reduce_grad_s=reduce_s,
            )
            for seconds, activation in zip(self.forward_s, self.activation_bytes, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Devices:
    """Identical devices to assign sub-models to.

    Attributes:
        count: Number of devices.
        memory_bytes: Memory of one device.
        bytes_per_s: Bandwidth between two ranks in bytes/s.
    """

    count: int
    memory_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """Choice of ranks, copies and order that the search evaluates.

    Attributes:
        width: Devices of each language rank.
        own: Number of devices that run only encoders; each is a rank.
        copies: Number of language ranks, counted from the first, that have copies of the encoders.
        stages_per_rank: Language stages of a rank: 1 for a chain, 2 for a V-shaped schedule.
        split: Whether backwards are split into I and W.
        order: Order of microbatches. `given`: unchanged. `light` or `heavy`: lowest or highest encoder cost first.
            `mixed`: the lightest quarter first, so that the pipeline starts soon, then the others, heaviest first.
        reduce_first: As for `list_schedule`.
    """

    width: int
    own: int
    copies: int
    stages_per_rank: int
    split: bool
    order: _Order
    reduce_first: bool


@dataclass(frozen=True, slots=True)
class Assignment:
    """Best assignment of sub-models to ranks, with its schedule and costs.

    Attributes:
        choice: The best choice.
        parts: Name of the sub-model of each stage.
        layers: Layers of each language stage.
        widths: Number of devices of each rank: language ranks first, then ranks that run only encoders.
        schedule: Compute-only schedule; `lower(schedule, costs=..., transfer_s=...)` adds messages.
        costs: Cost per stage and microbatch.
        transfer_s: Transfer seconds per edge and microbatch.
        max_bytes: Bytes that each rank has for activations.
        value_s: Seconds of the step, including gradient reductions.
        lower_s: Lower bound of the seconds of a step, over all choices with the pins.
        tried: (number of choices, number of choices that were scheduled).
    """

    choice: Choice
    parts: tuple[str, ...]
    layers: tuple[int, ...]
    widths: tuple[int, ...]
    schedule: Schedule
    costs: Sequence[Sequence[StageCost]]
    transfer_s: Mapping[tuple[int, int], Sequence[float]]
    max_bytes: tuple[int, ...]
    value_s: float
    lower_s: float
    tried: tuple[int, int]

    @property
    def gap(self) -> float:
        """Upper bound of the fraction of the step time that an optimal assignment would save."""
        return 1.0 - self.lower_s / self.value_s

    @property
    def bubble(self) -> float:
        """Fraction of the device time of a step in which devices do not compute."""
        cost_of = cost_function(self.schedule, self.costs)
        busy_s = sum(cost_of(a)[0] * self.widths[rank] for rank, _, a in self.schedule.leaves())
        return 1.0 - busy_s / (sum(self.widths) * self.value_s)

    def lanes(self, columns: int = 96) -> str:
        """Return the step as text; see `lanes_text`.

        Args:
            columns: Columns of a line, for the whole step; an action shorter than one column may not be shown.
        """
        tasks = schedule_tasks(self.schedule, self.costs, transfer_s=self.transfer_s)
        ranks = [f"rank {rank} ({width})" for rank, width in enumerate(self.widths)]
        return "\n".join(lanes_text(simulate(tasks), self.parts, ranks, columns, self.value_s))


def lanes_text(
    timeline: Timeline,
    parts: Sequence[str],
    ranks: Sequence[str],
    columns: int,
    end_s: float | None = None,
) -> list[str]:
    """Return a simulated step as text: a line per rank and sub-model, with the kind of action over time (`.`: idle).

    Args:
        timeline: Simulation of a schedule.
        parts: Name of the sub-model of each stage.
        ranks: Name of each rank of the schedule.
        columns: Columns of a line, for the whole step; an action shorter than one column may not be shown.
        end_s: Seconds of the step; None: the end of the timeline.
    """
    end_s = end_s or timeline.end_s
    rows: dict[tuple[int, str], list[str]] = {}
    for rank, span in computations(timeline):
        action = Action.parse(span.name)
        row = rows.setdefault((rank, parts[action.stage]), ["."] * columns)
        first = int(span.start_s / end_s * columns)
        last = int(span.end_s / end_s * columns)
        row[first:last] = action.kind * (last - first)
    names = {key: f"{ranks[key[0]]}  {key[1]}" for key in rows}
    width = max(map(len, names.values()))
    return [f"{names[key]:<{width}}  {''.join(rows[key])}" for key in sorted(rows)]


_Number = TypeVar("_Number", int, float)


class Best(NamedTuple, Generic[_Number]):
    """Best candidate of a search: its index, its value, and the number of candidates that were evaluated."""

    position: int
    value: _Number
    priced: int


def search_by_bound(
    bounds: Sequence[_Number], price: Callable[[int, _Number | None], _Number | None]
) -> Best[_Number] | None:
    """Return the candidate with the smallest value; None if `price` returns None for all candidates.

    Candidates are evaluated by ascending bound, until the next bound reaches the best value.

    Args:
        bounds: Lower bound of the value of each candidate.
        price: Function of (index of a candidate, best value so far or None). It returns the candidate's value, or None
            if the candidate cannot run or is not better.
    """
    best: Best[_Number] | None = None
    priced = 0
    for position in sorted(range(len(bounds)), key=bounds.__getitem__):
        if best is not None and bounds[position] >= best.value:
            break
        priced += 1
        value = price(position, best.value if best else None)
        if value is not None and (best is None or value < best.value):
            best = Best(position, value, priced)
    return best and best._replace(priced=priced)


def assign_submodels(
    encoders: Sequence[SubModel],
    language: SubModel,
    devices: Devices,
    pins: Mapping[str, object] = MappingProxyType({}),
) -> Assignment:
    """Return the fastest assignment of encoders and language part to devices.

    Args:
        encoders: Encoders; the language part reads the features of each.
        language: Language part, which is not frozen.
        devices: Devices to use, all of them.
        pins: Dict from a field of `Choice` to its only allowed value.

    Raises:
        ScheduleError: HP320 for an unknown pin, equal names, incomplete costs, or when no choice has the pins and fits
            into memory.
    """
    _check([*encoders, language])
    names = [f.name for f in fields(Choice)]
    if unknown := sorted(set(pins) - set(names)):
        raise ScheduleError(f"unknown pin `{unknown[0]}`", got=unknown[0], allowed=names)
    plans = [
        plan
        for key in _geometries(encoders, language, devices)
        if all(value == pins.get(name, value) for name, value in zip(names, key, strict=False))
        and (plan := _Plan(encoders, language, devices, key)).is_possible
    ]
    variants = [
        variant
        for variant in product((True, False), _ORDERS, (False, True))
        if all(v == pins.get(name, v) for name, v in zip(names[4:], variant, strict=True))
    ]
    queue = sorted(
        (plan.bound(variant[0]), number, position)
        for number, plan in enumerate(plans)
        for position, variant in enumerate(variants)
    )
    best = search_by_bound(
        [bound for bound, *_ in queue],
        lambda k, stop: plans[queue[k][1]].end(variants[queue[k][2]], stop),
    )
    if best is None:
        raise ScheduleError(
            "no assignment fits the devices and the pins",
            got=f"{plural(devices.count, 'device')} of {devices.memory_bytes} bytes, pins={dict(pins)}",
            hint="raise memory_bytes, change the number of devices" + (", or remove pins" if pins else ""),
        )
    lower = min(plan.work_bound for plan in plans)
    _, number, position = queue[best.position]
    return plans[number].assignment(variants[position], best.value, lower, (len(queue), best.priced))


def _check(parts: Sequence[SubModel]) -> None:
    names, count = [part.name for part in parts], len(parts[-1].forward_s)
    if len(set(names)) < len(names):
        raise ScheduleError("two sub-models have the same name", got=names, hint="give every sub-model its own name")
    for part in parts:
        lengths = [len(x) for x in (part.forward_s, part.activation_bytes, part.output_bytes)]
        if lengths != [count] * 3 or not count:
            raise ScheduleError(
                f"the sub-model `{part.name}` needs one cost per microbatch",
                got=f"lengths {lengths} of forward_s, activation_bytes and output_bytes",
                allowed=f"{count} each, as the language part has" if count else "at least one microbatch",
            )
        if 1 not in part.speedup:
            raise ScheduleError(
                f"the sub-model `{part.name}` needs its speed on one device",
                got=f"speedup={dict(part.speedup)}",
                hint="speedup={1: 1.0, ...}",
            )


def _geometries(
    encoders: Sequence[SubModel], language: SubModel, devices: Devices
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (width, own, copies, stages_per_rank) of each `Choice` to evaluate; every choice uses all devices."""
    for width, own in product(sorted(language.speedup), range(devices.count)):
        ranks, rest = divmod(devices.count - own, width)
        if rest or not ranks:
            continue
        shareable = all(width in e.speedup for e in encoders)
        copies = {0} if own else set()
        copies |= {1, (ranks + 1) // 2, ranks} if shareable else set()
        if not encoders:
            copies = {0} if not own else set()
        for copy, stages in product(sorted(copies), (1, 2) if ranks > 1 else (1,)):
            if ranks * stages <= language.layers:
                yield width, own, copy, stages


class _Plan:
    """Assignment with fixed widths, copies and stages; layers and encoder microbatches are balanced over the ranks."""

    def __init__(
        self,
        encoders: Sequence[SubModel],
        language: SubModel,
        devices: Devices,
        key: tuple[int, int, int, int],
    ) -> None:
        self._encoders, self._language, self._devices, self._key = encoders, language, devices, key
        width, own, copies, per_rank = key
        self._ranks = ranks = (devices.count - own) // width
        self.widths = (width,) * ranks + (1,) * own
        self._hosts = [*range(copies), *range(ranks, ranks + own)]
        down = list(range(ranks))
        self._places = down + down[::-1] if per_rank == 2 else down
        self._language_s = sum(language.forward_s) * language.passes / language.speedup[width]
        # An encoder stage is somewhat shorter than a language stage, so that it delays none for long.
        stage_s = sum(language.forward_s) / language.speedup[width] / len(self._places)
        self._pieces = [max(1, min(_MOST_PIECES, e.layers, round(1.5 * sum(e.forward_s) / stage_s))) for e in encoders]
        # Ranks with copies have fewer layers if other ranks have none.
        encoder_s = sum(sum(e.forward_s) * e.passes for e in encoders)
        level = (encoder_s + self._language_s) / (own + ranks)
        share = max(0.0, encoder_s - own * level) / copies if 0 < copies < ranks else 0.0
        shares = [share if r < copies else 0.0 for r in range(ranks)]
        counts, self._homes, self._loads = self._balanced(shares)
        self._layers = tuple(counts)
        if per_rank == 2:
            self._layers = (*(n - n // 2 for n in counts), *(n // 2 for n in reversed(counts)))

    def _balanced(self, shares: Sequence[float]) -> tuple[list[int], list[list[int]], list[float]]:
        """Return the language layers of each rank, the rank of each microbatch per encoder stage, and each rank's load.

        Loads are in seconds. `shares` are the expected seconds of encoder work on each language rank. Each layer goes
        to the least loaded rank. Then each encoder microbatch, longest first, goes to the rank with copies whose load
        including this microbatch is lowest.
        """
        p, per_rank = self._ranks, self._key[3]
        layer_s = self._language_s / self._language.layers
        counts = [per_rank] * p
        for _ in range(self._language.layers - per_rank * p):
            loads = [s + n * layer_s for s, n in zip(shares, counts, strict=True)]
            counts[loads.index(min(loads))] += 1
        loads = [n * layer_s for n in counts] + [0.0] * (len(self.widths) - p)
        pieces = [(e, k) for e, k in zip(self._encoders, self._pieces, strict=True) for _ in range(k)]
        homes = [[0] * len(e.forward_s) for e, _ in pieces]
        work = sorted(
            (-e.forward_s[i] * e.passes / k, i, number)
            for number, (e, k) in enumerate(pieces)
            for i in range(len(e.forward_s))
        )
        for seconds, i, number in work:
            speed = pieces[number][0].speedup
            options = [loads[r] - seconds / speed[self.widths[r]] for r in self._hosts]
            homes[number][i] = rank = self._hosts[options.index(min(options))]
            loads[rank] = min(options)
        return counts, homes, loads

    @cached_property
    def _max_bytes(self) -> tuple[int, ...]:
        """Bytes that each rank has left after parameters, gradients and optimizer states of its sub-models."""
        memory = [self._devices.memory_bytes * width for width in self.widths]
        for rank, layers in zip(self._places, self._layers, strict=True):
            memory[rank] -= -(-self._language.state_bytes * layers // self._language.layers)
        owners = [e for e, k in zip(self._encoders, self._pieces, strict=True) for _ in range(k)]
        for e, homes in zip(owners, self._homes, strict=True):
            for rank in set(homes):
                memory[rank] -= -(-e.state_bytes // owners.count(e))
        return tuple(memory)

    @property
    def is_possible(self) -> bool:
        """True if parameters, gradients and optimizer states fit in the memory of every rank."""
        return min(self._max_bytes) >= 0

    def bound(self, split: bool) -> int:
        """Return a lower bound of the step in nanoseconds: the largest sum of busy and waiting time of a rank.

        A language rank without encoders waits for its first input and, unless backwards are `split`, at the end for the
        backward of earlier stages.
        """
        language, width = self._language, self._key[0]
        used = {rank for homes in self._homes for rank in homes}
        first = min(
            max((e.forward_s[i] / max(e.speedup.values()) for e in self._encoders), default=0.0)
            for i in range(len(language.forward_s))
        )
        way, seen, worst = 0.0, set[int](), max(self._loads)
        layer_s = min(language.forward_s) / language.speedup[width] / language.layers
        for rank, layers in zip(self._places, self._layers, strict=True):
            if rank not in seen and rank not in used:
                back = 0.0 if split else way * (language.input_grad + language.weight_grad)
                worst = max(worst, self._loads[rank] + first + way + back)
            seen.add(rank)
            way += layer_s * layers
        return _floor(worst)

    @property
    def work_bound(self) -> int:
        """Lower bound of the step in nanoseconds for any distribution of layers and microbatches over the ranks.

        The bound is the larger of two times: all work divided evenly over the devices, and the longest path of one
        microbatch through all stages.
        """
        (width, own, copies, _), n = self._key, self._devices.count
        language_s, shared_s, alone_s = self._language_s * width, 0.0, 0.0
        longest = [0.0] * len(self._language.forward_s)
        for e in self._encoders:
            rates = [1.0] * bool(own) + [e.speedup[width] / width] * bool(copies)
            shared_s += sum(e.forward_s) * e.passes / max(rates)
            alone_s += sum(e.forward_s) * e.passes
            way = 1.0 if e.frozen else 1.0 + e.input_grad
            fastest = max([1.0] * bool(own) + [e.speedup[width]] * bool(copies))
            longest = [max(s, f * way / fastest) for s, f in zip(longest, e.forward_s, strict=True)]
        way = (1.0 + self._language.input_grad) / self._language.speedup[width]
        chain = max(s + f * way for s, f in zip(longest, self._language.forward_s, strict=True))
        work = (language_s + shared_s) / n
        if not copies and own:
            work = max(language_s / (n - own), alone_s / own)
        return _floor(max(work, chain))

    @cached_property
    def _graph(self) -> tuple[StageGraph, list[list[int]], list[list[StageCost]], tuple[str, ...]]:
        """Stage graph, and for every stage its rank per microbatch, its costs and its sub-model; encoders first."""
        language, (width, *_) = self._language, self._key
        edges, frozen, copied = [], set[int](), set[int]()
        homes: list[list[int]] = []
        costs: list[list[StageCost]] = []
        names: list[str] = []
        ends = []
        for e, pieces in zip(self._encoders, self._pieces, strict=True):
            for piece in range(pieces):
                s = len(homes)
                edges += [(s - 1, s)] if piece else []
                homes.append(ranks := self._homes[s])
                copies = len(set(ranks))
                ring = 2 * (copies - 1) / copies * e.gradient_bytes / self._devices.bytes_per_s
                by_width = {w: e.stage_costs(1 / pieces, w, ring / pieces) for w in {self.widths[r] for r in ranks}}
                costs.append([by_width[self.widths[r]][i] for i, r in enumerate(ranks)])
                copied.add(s)
                frozen.update([s] if e.frozen else ())
            ends.append(len(homes) - 1)
            names += [e.name] * pieces
        first, layer = len(homes), 0
        for k, (rank, layers) in enumerate(zip(self._places, self._layers, strict=True)):
            edges += [(end, first + k) for end, e in zip(ends, self._encoders, strict=True) if layer < e.readers]
            edges += [(first + k - 1, first + k)] if k else []
            homes.append([rank] * len(language.forward_s))
            costs.append(language.stage_costs(layers / language.layers, width))
            layer += layers
        graph = StageGraph(tuple(edges), frozenset(frozen), frozenset(copied))
        return graph, homes, costs, (*names, *[language.name] * len(self._places))

    @cached_property
    def _transfer_s(self) -> dict[tuple[int, int], list[float]]:
        graph, _, _, names = self._graph
        parts = {part.name: part for part in (*self._encoders, self._language)}
        return {(s, t): [n / self._devices.bytes_per_s for n in parts[names[s]].output_bytes] for s, t in graph.edges}

    def _order(self, order: str) -> list[int]:
        microbatches = list(range(len(self._language.forward_s)))
        light = sorted(microbatches, key=lambda i: sum(e.forward_s[i] for e in self._encoders))
        few = len(light) // 4
        mixed = light[:few] + light[few:][::-1]
        return {"given": microbatches, "light": light, "heavy": light[::-1], "mixed": mixed}[order]

    def _run(self, variant: _Variant, stop: int | None = None) -> tuple[Schedule, int] | None:
        split, order, reduce_first = variant
        graph, homes, costs, _ = self._graph
        scheduler = ListScheduler(graph, homes, costs, self._transfer_s, split)
        return scheduler.run(self._order(order), self._max_bytes, reduce_first=reduce_first, stop=stop)

    def end(self, variant: _Variant, stop: int | None) -> int | None:
        """Return the nanoseconds of a step; None for `stop` nanoseconds or more, or if a microbatch exceeds memory."""
        try:
            result = self._run(variant, stop)
        except ScheduleError:
            return None
        return None if result is None else result[1]

    def assignment(self, variant: _Variant, end: int, lower: int, tried: tuple[int, int]) -> Assignment:
        result = self._run(variant)
        assert result is not None, "the variant has been scheduled before"
        return Assignment(
            Choice(*self._key, *variant),
            self._graph[3],
            self._layers,
            self.widths,
            result[0],
            self._graph[2],
            self._transfer_s,
            self._max_bytes,
            end / 1e9,
            lower / 1e9,
            tried,
        )


def _floor(seconds: float) -> int:
    """Return seconds as nanoseconds, lowered by one millionth, so that rounded durations never add up to less."""
    return nanoseconds(seconds * (1 - 1e-6))
