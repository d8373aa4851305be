"""Schedule: the ordered list of actions of every pipeline rank, each on a stage and a microbatch.

The text form is that of torch.distributed.pipelining, so schedules can be exchanged in both directions: `2F0` is the
forward of stage 2 on microbatch 0, `1RECV_B3` receives the gradient of microbatch 3 for stage 1, `0UNSHARD` gathers the
parameters of stage 0, `(0F4;3B1)OVERLAP_F_B` runs a forward and a backward together. One CSV row per rank. OFFLOAD and
RELOAD are extensions that torch does not read.

A schedule defines an order, not times. It may be illegal; `hyper_parallel.mpmd.verify` checks it.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, TypeAlias, get_args

from hyper_parallel.errors import ScheduleError

ActionKind: TypeAlias = Literal[
    "F",
    "I",
    "W",
    "B",
    "SEND_F",
    "RECV_F",
    "SEND_B",
    "RECV_B",
    "UNSHARD",
    "RESHARD",
    "REDUCE_GRAD",
    "OVERLAP_F_B",
    "OFFLOAD",
    "RELOAD",
]
"""F forward, I input gradient, W weight gradient, B full backward (I and W); other names are self-explanatory."""

COMPUTE: Final = frozenset({"F", "I", "W", "B", "OVERLAP_F_B"})
_PER_STAGE: Final = frozenset({"UNSHARD", "RESHARD", "REDUCE_GRAD"})
_OURS: Final = frozenset({"OFFLOAD", "RELOAD"})
_TEXT: Final = re.compile(
    rf"(\d+)({'|'.join(k for k in get_args(ActionKind) if k != 'OVERLAP_F_B')})(\d*)"
)
_SLOTS: Final = {"F": 1, "I": 1, "W": 1, "B": 2}
_SENDS: Final[dict[str, ActionKind]] = {"F": "SEND_F", "B": "SEND_B", "I": "SEND_B"}
PEERS: Final[dict[str, tuple[int, ActionKind]]] = {
    "SEND_F": (1, "RECV_F"),
    "RECV_F": (-1, "SEND_F"),
    "SEND_B": (-1, "RECV_B"),
    "RECV_B": (1, "SEND_B"),
}
"""Stage offset of the peer, and its action, for each send or receive."""
_OVERLAP: Final = re.compile(r"\((.+)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Action:
    """Entry of a schedule.

    Attributes:
        stage: Virtual stage, counted from the start of the model; -1 for OVERLAP_F_B, whose parts each have a stage.
        kind: Kind of action.
        microbatch: Index of the microbatch; None for UNSHARD, RESHARD, REDUCE_GRAD and OVERLAP_F_B.
        parts: Actions of an OVERLAP_F_B.
    """

    stage: int
    kind: ActionKind
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    @property
    def leaves(self) -> tuple[Action, ...]:
        """The parts of an OVERLAP_F_B, else the action itself."""
        return self.parts or (self,)

    @property
    def peer(self) -> Action:
        """The receive of a send, the send of a receive."""
        step, kind = PEERS[self.kind]
        return Action(self.stage + step, kind, self.microbatch)

    @property
    def send(self) -> Action | None:
        """Send action for the result of a computation; None for W and other kinds."""
        kind = _SENDS.get(self.kind)
        return Action(self.stage, kind, self.microbatch) if kind else None

    @property
    def slots(self) -> int:
        """Length in a grid with bubbles: one slot for F, I and W, two for B, none for other kinds."""
        return sum(_SLOTS.get(leaf.kind, 0) for leaf in self.leaves)

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(str(part) for part in self.parts)}){self.kind}"
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """Read the text form.

        Raises:
            ScheduleError: HP320 when the text is no action.
        """
        return _parse(text.strip())


@lru_cache(maxsize=65536)
def _parse(text: str) -> Action:
    if overlap := _OVERLAP.fullmatch(text):
        parts = tuple(_parse(part.strip()) for part in overlap[1].split(";"))
        if all(part.kind in COMPUTE and not part.parts for part in parts):
            return Action(-1, "OVERLAP_F_B", None, parts)
    elif match := _TEXT.fullmatch(text):
        stage, kind, microbatch = match.groups()
        if (kind in _PER_STAGE) != bool(microbatch):
            number = int(microbatch) if microbatch else None
            return Action(int(stage), kind, number)  # type: ignore[arg-type]
    raise ScheduleError(
        f"`{text}` is not a schedule action",
        got=text,
        allowed="stage, kind, microbatch: 2F0, 1RECV_B3, 0UNSHARD, (0F4;3B1)OVERLAP_F_B",
    )


@dataclass(frozen=True, slots=True)
class Schedule:
    """Ordered actions per pipeline rank.

    Attributes:
        name: How it was made: `1f1b`, `zbv`, `csv`.
        stages: Virtual stages of the whole pipeline.
        microbatches: Microbatches of one step.
        ranks: Actions of each rank, in order. Idle steps are not stored: time comes from a simulation.
    """

    name: str
    stages: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def has_communication(self) -> bool:
        """True when sends and receives are written out (torch's `compute_comms` form)."""
        return any(a.kind.startswith(("SEND", "RECV")) for rank in self.ranks for a in rank)

    def leaves(self) -> Iterator[tuple[int, int, Action]]:
        """Every action as (rank, position, action); an OVERLAP_F_B gives its parts with one position."""
        for rank, actions in enumerate(self.ranks):
            for position, action in enumerate(actions):
                for leaf in action.leaves:
                    yield rank, position, leaf

    def placement(self) -> dict[int, int]:
        """Stage to rank, from where a stage computes.

        Raises:
            ScheduleError: HP320 when a stage computes on two ranks, or on none.
        """
        place: dict[int, int] = {}
        for rank, position, leaf in self.leaves():
            if leaf.kind in COMPUTE and place.setdefault(leaf.stage, rank) != rank:
                raise ScheduleError(
                    f"stage {leaf.stage} computes on rank {place[leaf.stage]} and on rank {rank}",
                    where=at(self, rank, position),
                )
        lost = sorted(set(range(self.stages)) - set(place))
        if lost:
            raise ScheduleError(f"stage {lost[0]} never computes", got=f"stages {sorted(place)}")
        return place

    def compute_only(self) -> Schedule:
        """Return the schedule without communication, sharding and offload actions."""
        ranks = tuple(tuple(a for a in rank if a.kind in COMPUTE) for rank in self.ranks)
        return Schedule(self.name, self.stages, self.microbatches, ranks)

    def to_csv(self, *, extended: bool = False) -> str:
        """Return the CSV form, one row per rank; torch reads it with `_load_csv`.

        Args:
            extended: Also write OFFLOAD and RELOAD, which torch does not read.

        Raises:
            ScheduleError: HP320 for an OFFLOAD or RELOAD when not `extended`.
        """
        for rank, position, leaf in self.leaves():
            if leaf.kind in _OURS and not extended:
                raise ScheduleError(
                    f"torch.distributed.pipelining has no action {leaf.kind}",
                    where=at(self, rank, position),
                    hint="schedule.to_csv(extended=True)",
                )
        return "".join(",".join(map(str, rank)) + "\n" for rank in self.ranks)

    @staticmethod
    def from_csv(text: str, name: str = "csv") -> Schedule:
        """Read either CSV form; empty cells are idle steps and are dropped.

        Raises:
            ScheduleError: HP320 for a cell that is no action, with its row and column, or a file without actions.
        """
        ranks: list[list[Action]] = []
        for row, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
            ranks.append([])
            for column, cell in enumerate(cells, start=1):
                try:
                    ranks[-1] += [Action.parse(cell)] if cell.strip() else []
                except ScheduleError as error:
                    error.where = f"{name}: row {row}, column {column}"
                    raise
        leaves = [leaf for rank in ranks for a in rank for leaf in a.leaves]
        if not leaves:
            raise ScheduleError("the schedule has no actions", where=name)
        stages = 1 + max(leaf.stage for leaf in leaves)
        numbers = [leaf.microbatch for leaf in leaves if leaf.microbatch is not None]
        return Schedule(name, stages, 1 + max(numbers, default=-1), tuple(map(tuple, ranks)))


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
        rows: `slots`: one row per slot and one column per rank, as torch prints; `ranks`: transposed.
        starts: Start slot of each action per rank (see `mpmd.unit_starts`). Bubbles become visible, and `..` marks
            further slots of an action. None: the position of the action.
        mark: Rank and position of an action to mark with `>` and `<`.
        around: Show only this many slots before and after the marked one.
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
        # Time runs to the right: every slot is equally wide.
        widths[1:] = [max(widths[1:], default=0)] * len(widths[1:])
    return "\n".join(
        " ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in table
    )


def at(schedule: Schedule, rank: int, position: int) -> str:
    """Return the location of an action and the grid around it, as `where` of a ScheduleError."""
    lines = grid(schedule, mark=(rank, position), around=4).splitlines()
    head = f"{schedule.name}: rank {rank}, action {position}: {schedule.ranks[rank][position]}"
    return "\n".join([head, *(f"      {line}" for line in lines)])
