"""Schedule: the ordered list of actions of every pipeline rank, each on a stage and a microbatch.

The text form is that of torch.distributed.pipelining, so schedules can be exchanged in both directions: `2F0` is the
forward of stage 2 on microbatch 0, `1RECV_B3` receives the gradient of microbatch 3 for stage 1, `0UNSHARD` gathers the
parameters of stage 0, `(0F4;3B1)OVERLAP_F_B` runs a forward and a backward together. The CSV form has one row per rank.

Stages are a chain unless the schedule has a `StageGraph`. A message that does not go to the neighbour in the chain
names the stage at its other end: `0SEND_F3:2` sends the output of stage 0 on microbatch 3 to stage 2.

A schedule defines an order, not times. It may be illegal; `hyper_parallel.mpmd.verify` checks it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal, TypeAlias, get_args

from hyper_parallel.errors import ScheduleError

ActionKind: TypeAlias = Literal[
    "F", "I", "W", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD", "OVERLAP_F_B",
]  # fmt: skip
"""F forward, I input gradient, W weight gradient, B full backward (I and W); the other kinds are those of torch."""

COMPUTE: Final = frozenset({"F", "I", "W", "B", "OVERLAP_F_B"})
_PER_STAGE: Final = frozenset({"UNSHARD", "RESHARD", "REDUCE_GRAD"})
_KINDS: Final = "|".join(k for k in get_args(ActionKind) if k != "OVERLAP_F_B")
_TEXT: Final = re.compile(rf"(\d{{1,6}})({_KINDS})(\d{{0,6}})(?::(\d{{1,6}}))?")
_SLOTS: Final = {"F": 1, "I": 1, "W": 1, "B": 2}
_SENDS: Final[dict[str, ActionKind]] = {"F": "SEND_F", "B": "SEND_B", "I": "SEND_B"}
_GRAPH: Final = re.compile(r"(\d{1,6})>(\d{1,6})|(\d{1,6}) (frozen|copied|sharded)")
PEERS: Final[dict[str, tuple[int, ActionKind]]] = {
    "SEND_F": (1, "RECV_F"),
    "RECV_F": (-1, "SEND_F"),
    "SEND_B": (-1, "RECV_B"),
    "RECV_B": (1, "SEND_B"),
}
"""Dict from kind of send or receive to (stage offset of the peer in a chain, kind of the matching action)."""
_OVERLAP: Final = re.compile(r"\((.+)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Action:
    """Action of a pipeline rank, such as a computation, a message or a gather of parameters.

    Attributes:
        stage: Stage, counted from the start of the model; -1 for OVERLAP_F_B, whose parts each have a stage.
        kind: Kind of action.
        microbatch: Index of the microbatch; None for UNSHARD, RESHARD, REDUCE_GRAD and OVERLAP_F_B.
        parts: Computations of an OVERLAP_F_B; empty for other kinds.
        other: Stage at the other end of a message; None if that is the neighbour in the chain, and for other kinds.
    """

    stage: int
    kind: ActionKind
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()
    other: int | None = None

    @property
    def leaves(self) -> tuple[Action, ...]:
        """Computations inside an OVERLAP_F_B; for any other kind, only the action itself."""
        return self.parts or (self,)

    @property
    def peer(self) -> Action:
        """Matching receive of a send, or matching send of a receive; KeyError for other kinds."""
        step, kind = PEERS[self.kind]
        other = self.stage + step if self.other is None else self.other
        return message(other, kind, self.microbatch, self.stage)

    @property
    def slots(self) -> int:
        """Time slots of the action in `grid`: 1 for F, I or W, 2 for B, the sum over an OVERLAP_F_B, 0 otherwise."""
        return sum(_SLOTS.get(leaf.kind, 0) for leaf in self.leaves)

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(str(part) for part in self.parts)}){self.kind}"
        end = "" if self.other is None else f":{self.other}"
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}{end}"

    @staticmethod
    def parse(text: str) -> Action:
        """Return the action in a text such as `2F0`; raise ScheduleError (HP320) for a text that is no action."""
        return _parse(text.strip())


@lru_cache(maxsize=65536)
def _parse(text: str) -> Action:
    if overlap := _OVERLAP.fullmatch(text):
        parts = tuple(_parse(part.strip()) for part in overlap[1].split(";"))
        if all(part.kind in COMPUTE and not part.parts for part in parts):
            return Action(-1, "OVERLAP_F_B", None, parts)
    elif match := _TEXT.fullmatch(text):
        stage, kind, microbatch, other = match.groups()
        if (kind in _PER_STAGE) != bool(microbatch) and (kind in PEERS or other is None):
            number = int(microbatch) if microbatch else None
            if other is not None:
                return message(int(stage), kind, number, int(other))  # type: ignore[arg-type]
            return Action(int(stage), kind, number)  # type: ignore[arg-type]
    raise ScheduleError(
        f"`{text}` is not a schedule action",
        got=text,
        allowed="stage, kind, microbatch (up to 6 digits): 2F0, 1RECV_B3, 0SEND_F3:2, 0UNSHARD, (0F4;3B1)OVERLAP_F_B",
    )


def message(stage: int, kind: ActionKind, microbatch: int | None, other: int) -> Action:
    """Return the send or receive of stage `stage` whose other end is stage `other`."""
    chained = other == stage + PEERS[kind][0]
    return Action(stage, kind, microbatch, other=None if chained else other)


@dataclass(frozen=True, slots=True)
class StageGraph:
    """Graph of pipeline stages, for stages that do not form a chain.

    Attributes:
        edges: (producer, consumer) pairs of stages; a producer has the smaller number.
        frozen: Stages without a backward; their producers are frozen too.
        copied: Stages replicated on several ranks; each replica computes some of the microbatches.
        sharded: Replicated stages whose parameters FSDP shards over the ranks of the replicas. The n-th computations of
            all replicas run at the same time, because they share collectives.

    Raises:
        ScheduleError: HP320 for an edge to the same or a smaller stage, or from a trained stage to a frozen one.
    """

    edges: tuple[tuple[int, int], ...]
    frozen: frozenset[int] = frozenset()
    copied: frozenset[int] = frozenset()
    sharded: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for source, target in self.edges:
            if source >= target:
                raise ScheduleError(
                    f"the edge {source}>{target} does not lead to a stage with a larger number",
                    hint="remove the edge" if source == target else "number the stages in the order of their edges",
                )
            if target in self.frozen and source not in self.frozen:
                raise ScheduleError(
                    f"stage {source} gets no gradient, because stage {target} is frozen",
                    hint=f"freeze stage {source} too",
                )

    def __str__(self) -> str:
        marks = (("frozen", self.frozen), ("copied", self.copied), ("sharded", self.sharded))
        cells = [f"{source}>{target}" for source, target in self.edges]
        return ",".join([*cells, *(f"{s} {word}" for word, stages in marks for s in sorted(stages))])

    @staticmethod
    def parse(cells: Sequence[str]) -> StageGraph:
        """Return the graph written in CSV cells, such as `0>2`, `0 frozen`, `1 copied`, `1 sharded`.

        Raises:
            ScheduleError: HP320 for a cell of another form, or an edge that the class does not allow.
        """
        edges = []
        marked = {word: set[int]() for word in ("frozen", "copied", "sharded")}
        for cell in filter(None, map(str.strip, cells)):
            match = _GRAPH.fullmatch(cell)
            if match is None:
                raise ScheduleError(
                    f"`{cell}` is not an entry of a stage graph",
                    allowed="entries such as 0>2, 0 frozen, 1 copied, 1 sharded, with stages of up to 6 digits",
                )
            source, target, stage, word = match.groups()
            if word:
                marked[word].add(int(stage))
            else:
                edges.append((int(source), int(target)))
        return StageGraph(tuple(edges), *map(frozenset, marked.values()))


@dataclass(frozen=True, slots=True)
class Schedule:
    """Pipeline schedule: the ordered actions of every rank.

    Attributes:
        name: Name shown in messages, such as `1f1b` or the path of a schedule file.
        stages: Number of stages over all ranks, virtual stages included.
        microbatches: Number of microbatches of a step.
        ranks: Actions of each rank, in order, without idle time.
        graph: Edges between stages; None for the chain 0, 1, 2, ...

    Raises:
        ScheduleError: HP320 when the graph has an edge to, or a mark of, a stage that the schedule lacks.
    """

    name: str
    stages: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    graph: StageGraph | None = None

    def __post_init__(self) -> None:
        for edge in self.graph.edges if self.graph else ():
            if edge[1] >= self.stages:
                raise ScheduleError(
                    f"the edge {edge[0]}>{edge[1]} names a stage that does not exist",
                    where=self.name,
                    allowed=f"0 to {self.stages - 1}",
                )
        for mark in ("frozen", "copied", "sharded") if self.graph else ():
            if missing := [stage for stage in getattr(self.graph, mark) if stage >= self.stages]:
                raise ScheduleError(
                    f"`{missing[0]} {mark}` marks a stage that does not exist",
                    where=self.name,
                    allowed=f"0 to {self.stages - 1}",
                )

    def before(self, stage: int) -> tuple[int, ...]:
        """Return the stages that produce a stage's inputs."""
        if self.graph is None:
            return (stage - 1,) if stage else ()
        return tuple(source for source, target in self.graph.edges if target == stage)

    def after(self, stage: int) -> tuple[int, ...]:
        """Return the stages that read a stage's output."""
        if self.graph is None:
            return (stage + 1,) if stage + 1 < self.stages else ()
        return tuple(target for source, target in self.graph.edges if source == stage)

    def is_trained(self, stage: int) -> bool:
        """Return whether a stage has a backward."""
        return self.graph is None or stage not in self.graph.frozen

    def inputs(self, action: Action) -> tuple[int, ...]:
        """Return the stages whose results an action needs: outputs for F, gradients for B and I, () for other kinds."""
        if action.kind == "F":
            return self.before(action.stage)
        return self.after(action.stage) if action.kind in ("B", "I") else ()

    def messages(self, action: Action) -> tuple[Action, ...]:
        """Return the sends of the result of F, B or I, one per stage that needs it; () for other kinds.

        Stages on the same rank are included, although they need no transfer.
        """
        kind = _SENDS.get(action.kind)
        if kind is None:
            return ()
        s = action.stage
        others = self.after(s) if kind == "SEND_F" else filter(self.is_trained, self.before(s))
        return tuple(message(s, kind, action.microbatch, other) for other in others)

    def rounds(self) -> dict[Action, tuple[tuple[Action, int], ...]]:
        """Return the groups of computations that run at the same time, because a sharded stage has collectives.

        Returns:
            Dict from a computation of a sharded stage to its group, itself included, as (action, rank) pairs. Group n
            is the n-th computation of every replica. If a replica has fewer computations, the dict has no later groups.
        """
        rounds: dict[Action, tuple[tuple[Action, int], ...]] = {}
        for stage in self.graph.sharded if self.graph else ():
            rows: dict[int, list[tuple[Action, int]]] = {}
            for rank, _, leaf in self.leaves():
                if leaf.stage == stage and leaf.kind in COMPUTE:
                    rows.setdefault(rank, []).append((leaf, rank))
            for together in zip(*rows.values(), strict=False):
                rounds |= dict.fromkeys((action for action, _ in together), together)
        return rounds

    @property
    def has_communication(self) -> bool:
        """True if the schedule contains a send or a receive, as in torch's `compute_comms` form."""
        return any(a.kind.startswith(("SEND", "RECV")) for rank in self.ranks for a in rank)

    def leaves(self) -> Iterator[tuple[int, int, Action]]:
        """Yield (rank, position, action) for every action; the computations of an OVERLAP_F_B share its position."""
        for rank, actions in enumerate(self.ranks):
            for position, action in enumerate(actions):
                for leaf in action.leaves:
                    yield rank, position, leaf

    def homes(self) -> dict[tuple[int, int | None], int]:
        """Return a dict from (stage, microbatch) to the rank that computes it.

        Raises:
            ScheduleError: HP320 if a stage is on no rank, a stage outside `StageGraph.copied` on two ranks, or if two
                replicas of a stage compute one microbatch.
        """
        copied = self.graph.copied if self.graph else frozenset()
        place: dict[int, int] = {}
        homes: dict[tuple[int, int | None], int] = {}
        for rank, position, leaf in self.leaves():
            if leaf.kind not in COMPUTE:
                continue
            s, i = leaf.stage, leaf.microbatch
            first = place.setdefault(s, rank) if s not in copied else rank
            home = homes.setdefault((s, i), rank)
            if rank != (first if s not in copied else home):
                name, other = (f"microbatch {i} of ", home) if s in copied else ("", first)
                raise ScheduleError(
                    f"{name}stage {s} is computed on rank {other} and on rank {rank}, but must be on one rank",
                    where=at(self, rank, position),
                )
        used = sorted({s for s, _ in homes})
        if lost := sorted(set(range(self.stages)).difference(used)):
            raise ScheduleError(f"stage {lost[0]} has no computation", got=f"stages {used}")
        return homes

    def placement(self) -> dict[int, int]:
        """Return a dict from stage to rank, without the stages in `StageGraph.copied`; errors as for `homes`."""
        copied = self.graph.copied if self.graph else frozenset()
        return {s: rank for (s, _), rank in self.homes().items() if s not in copied}

    def compute_only(self) -> Schedule:
        """Return the schedule without communication and sharding actions."""
        ranks = tuple(tuple(a for a in rank if a.kind in COMPUTE) for rank in self.ranks)
        return replace(self, ranks=ranks)

    def to_csv(self, *, extended: bool = False) -> str:
        """Return the CSV form, one row per rank; torch reads it with `_load_csv`.

        Args:
            extended: Whether to write a last row with the graph, which torch does not read.

        Raises:
            ScheduleError: HP320 for a graph when not `extended`.
        """
        if self.graph and not extended:
            raise ScheduleError(
                "torch.distributed.pipelining supports only a chain of stages",
                where=self.name,
                got=str(self.graph),
                hint="schedule.to_csv(extended=True)",
            )
        rows = [",".join(map(str, rank)) for rank in self.ranks]
        rows += [f"graph,{self.graph}"] if self.graph else []
        return "".join(f"{row}\n" for row in rows)

    @staticmethod
    def from_csv(text: str, name: str = "csv") -> Schedule:
        """Return the schedule in a CSV text as written by `to_csv`, extended or not; empty cells are idle time.

        Raises:
            ScheduleError: HP320 for invalid CSV, a bad graph, no actions, or a cell that is no action (with its place).
        """
        ranks: list[list[Action]] = []
        graph = None
        try:
            rows = [*csv.reader(text.splitlines())]
        except csv.Error as error:
            raise ScheduleError("the schedule is not in CSV format", where=name, got=str(error)) from error
        for row, cells in enumerate(rows, start=1):
            if cells and cells[0].strip() == "graph":
                try:
                    graph = StageGraph.parse(cells[1:])
                except ScheduleError as error:
                    error.where = f"{name}: row {row}"
                    raise
                continue
            ranks.append([])
            for column, cell in enumerate(cells, start=1):
                try:
                    ranks[-1] += [Action.parse(cell)] if cell.strip() else []
                except ScheduleError as error:
                    error.where = f"{name}: row {row}, column {column}"
                    raise
        leaves = [leaf for rank in ranks for a in rank for leaf in a.leaves]
        if not leaves:
            raise ScheduleError(
                "the schedule has no actions",
                where=name,
                hint="write one row per pipeline rank, with actions such as 0F0,0F1,0B0,0B1",
            )
        stages = 1 + max(leaf.stage for leaf in leaves)
        numbers = [leaf.microbatch for leaf in leaves if leaf.microbatch is not None]
        return Schedule(name, stages, 1 + max(numbers, default=-1), tuple(map(tuple, ranks)), graph)


def grid(
    schedule: Schedule,
    *,
    rows: Literal["slots", "ranks"] = "slots",
    starts: Sequence[Sequence[int]] | None = None,
    mark: tuple[int, int] | None = None,
    around: int | None = None,
) -> str:
    """Return the schedule as a text table.

    Args:
        schedule: Schedule to print.
        rows: `slots`: one row per time slot and one column per rank, as torch prints; `ranks`: transposed.
        starts: Start slot of every action of every rank, from `mpmd.unit_starts`. Bubbles are then empty cells, and
            `..` marks later slots of an action. None: every action has one slot, and there are no gaps.
        mark: (rank, position) of an action to print between `>` and `<`.
        around: Number of slots to show before and after the marked action; all slots if `around` or `mark` is None.
    """
    cells: dict[tuple[int, int], str] = {}
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            slot = starts[rank][position] if starts else position
            text = f">{action}<" if mark == (rank, position) else str(action)
            cells[slot, rank] = f"{cells[slot, rank]} {text}" if (slot, rank) in cells else text
            for later in range(slot + 1, slot + action.slots) if starts else ():
                cells[later, rank] = ".."
    first, last = 0, max((slot for slot, _ in cells), default=-1)
    if mark and around is not None:
        centre = starts[mark[0]][mark[1]] if starts else mark[1]
        first, last = max(first, centre - around), min(last, centre + around)
    ranks, slots = range(len(schedule.ranks)), range(first, last + 1)
    if rows == "slots":
        table = [["slot", *(f"rank {r}" for r in ranks)]]
        table += [[str(s), *(cells.get((s, r), "") for r in ranks)] for s in slots]
    else:
        table = [["rank", *map(str, slots)]]
        table += [[str(r), *(cells.get((s, r), "") for s in slots)] for r in ranks]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if rows == "ranks":
        # Time runs to the right, and every slot has equal width.
        widths[1:] = [max(widths[1:], default=0)] * len(widths[1:])
    return "\n".join(" ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in table)


def at(schedule: Schedule, rank: int, position: int) -> str:
    """Return text with the location of an action and the schedule around it, for `where` of a ScheduleError."""
    lines = grid(schedule, mark=(rank, position), around=4).splitlines()
    head = f"{schedule.name}: rank {rank}, action {position}: {schedule.ranks[rank][position]}"
    return "\n".join([head, *(f"      {line}" for line in lines)])
