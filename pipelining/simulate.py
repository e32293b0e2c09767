"""How long a program takes, and what its ranks hold, before it runs.

In comes the very ``Program`` that the runtime runs, and what its tasks and links cost; out goes a
``Timeline`` in seconds, with transfers and live bytes. Each rank walks its instructions as an actor
does: a receive keeps nobody waiting until something reads what it brings. Not here: the times of an
``Order`` without a program (timeline.py), where costs come from (calibrate.py), why ranks wait
(bubbles.py).
"""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax

from stagewright.pipelining.actions import Action, Kind
from stagewright.pipelining.errors import CommunicationError
from stagewright.pipelining.program import Free, Instruction, Program, RankProgram, Recv, Run, Send
from stagewright.pipelining.timeline import OuterSpan, Span, Time, Timeline, Transfer


@dataclass(frozen=True, slots=True)
class ProgramCosts:
    """What a program's parts cost: numbers in one unit, seconds if ``unit`` is ``s``.

    Args:
        tasks: duration of a task, by kind and virtual stage. Every task of the program needs one.
        outer: duration of a run outside the loop, by its label; 0 where there is none.
        latency: of a transfer, from its start to its arrival; values behind it on the same link do
            not wait for it.
        bandwidth: bytes that a link carries in a unit of time, each pair of ranks and direction
            being a link of its own; None for any number at once.
        overlap: whether a rank goes on while it sends. If not, a send waits until the receiver is
            at its receive, and both are busy until the values are there.
        overhead: what an instruction costs its rank beside its work.
        slowdown: factor on all work of a rank, by rank; 1 where there is none.
        single: duration of single tasks that take another time than their kind does on their stage:
            a longer micro-batch, or all tasks of a step that is to be run again as it was measured.
        unit: ``s`` for seconds, nothing for an abstract unit.
    """

    tasks: Mapping[tuple[Kind, int], Time]
    outer: Mapping[str, Time] = field(default_factory=dict)
    latency: Time = 0
    bandwidth: float | None = None
    overlap: bool = True
    overhead: Time = 0
    slowdown: Mapping[int, Time] = field(default_factory=dict)
    single: Mapping[Action, Time] = field(default_factory=dict)
    unit: str = "s"

    def with_slower_links(self, factor: Time) -> "ProgramCosts":
        """What if every link had ``factor`` times the latency, and that much less bandwidth?"""
        bandwidth = None if self.bandwidth is None else self.bandwidth / float(factor)
        return dataclasses.replace(self, latency=self.latency * factor, bandwidth=bandwidth)

    def with_straggler(self, rank: int, factor: Time) -> "ProgramCosts":
        """What if one rank took ``factor`` times as long for its work?"""
        return dataclasses.replace(self, slowdown={**self.slowdown, rank: factor})

    def with_stage(self, stage: int, tasks: Mapping[Kind, Time]) -> "ProgramCosts":
        """What if one stage's tasks took other times: with a layer more, say, or rematerialised?

        Example:
            >>> costs = ProgramCosts({(Kind.F, 0): 1, (Kind.B, 0): 2, (Kind.F, 1): 1})
            >>> costs.with_stage(0, {Kind.B: 3}).tasks[Kind.B, 0]
            3
        """
        changed = {(kind, stage): duration for kind, duration in tasks.items()}
        return dataclasses.replace(self, tasks={**self.tasks, **changed})

    def duration(self, run: Run, rank: int) -> Time:
        """How long a run takes.

        Raises:
            ValueError: there is no cost for its task.
        """
        if run.action is None:
            return self.outer.get(run.label, 0) * self.slowdown.get(rank, 1)
        if run.action in self.single:
            return self.single[run.action] * self.slowdown.get(rank, 1)
        key = (run.action.kind, run.action.stage)
        if key not in self.tasks:
            raise ValueError(
                f"no cost for {run.action.kind} of stage {run.action.stage}; there are costs for "
                f"{', '.join(f'{kind} of stage {stage}' for kind, stage in self.tasks)}"
            )
        return self.tasks[key] * self.slowdown.get(rank, 1)


def simulate_program(program: Program, costs: ProgramCosts) -> Timeline:
    """Run a program against a clock.

    Live bytes are those of all full slots after each instruction: arguments and constants from the
    start, a received value from when the rank first needs what its message brings, a result from
    the end of its run, until it is freed or its buffer given away. A buffer that a result takes
    over counts once: the slot it was given from is empty from then on. An array over several
    devices counts once, whole. Not counted: what has arrived and was not asked for yet, and what
    XLA needs besides within a run.

    Args:
        program: a program that the checker accepts.
        costs: of its tasks and links.

    Returns:
        Every task, outer run and transfer in time, and each rank's live bytes.

    Raises:
        CommunicationError: the ranks wait for each other for ever.
        ValueError: a task has no cost.
    """
    walkers = [_Walker(rank, part, program, costs) for rank, part in enumerate(program.ranks)]
    links: dict[tuple[int, int], _Link] = defaultdict(_Link)
    ready = deque(walkers)
    waiting: set[int] = set()
    while ready:
        walker = ready.popleft()
        waiting.discard(walker.rank)
        moved = walker.walk(links)
        if not walker.done:
            waiting.add(walker.rank)
        for rank in moved & waiting:
            waiting.discard(rank)
            ready.append(walkers[rank])
    stuck = [w for w in walkers if not w.done]
    if stuck:
        told = "; ".join(f"rank {w.rank} at {w.head}" for w in stuck[:4])
        raise CommunicationError(f"the program cannot run to its end: {told}")
    return Timeline(
        spans=tuple(sorted((s for w in walkers for s in w.spans), key=lambda s: (s.start, s.rank))),
        num_ranks=len(walkers),
        outer=tuple(s for w in walkers for s in w.outer),
        transfers=tuple(sorted((t for w in walkers for t in w.sent), key=lambda t: t.start)),
        memory=tuple(tuple(w.memory.curve) for w in walkers),
        unit=costs.unit,
    )


@dataclass(slots=True)
class _Link:
    """One direction between two ranks."""

    free: Time = 0
    arrivals: deque[Time] = field(default_factory=deque)
    sizes: deque[tuple[int, ...]] = field(default_factory=deque)
    receiver_at: Time | None = None


class _Memory:
    """Live bytes of one rank."""

    def __init__(self, full: Mapping[int, int]) -> None:
        self.sizes = dict(full)
        self.live = sum(full.values())
        self.curve: list[tuple[Time, int]] = [(0, self.live)]

    def fill(self, slot: int, num_bytes: int) -> None:
        self.empty(slot)
        self.sizes[slot] = num_bytes
        self.live += num_bytes

    def empty(self, slot: int) -> None:
        self.live -= self.sizes.pop(slot, 0)

    def note(self, instant: Time) -> None:
        if self.curve[-1][1] != self.live:
            self.curve.append((instant, self.live))


class _Walker:
    """One rank: walks until it has to wait for another one."""

    def __init__(self, rank: int, part: RankProgram, program: Program, costs: ProgramCosts) -> None:
        self.rank = rank
        self.spans: list[Span] = []
        self.outer: list[OuterSpan] = []
        self.sent: list[Transfer] = []
        self.memory = _Memory(_full_at_start(part, program))
        self._codes = program.codes
        self._costs = costs
        self._instructions = part.instructions
        self._position = 0
        self._clock: Time = 0
        self._posted: list[Recv] = []

    @property
    def done(self) -> bool:
        return self._position == len(self._instructions) and not self._posted

    @property
    def head(self) -> Instruction | str:
        if self._position < len(self._instructions):
            return self._instructions[self._position]
        return "its end"

    def walk(self, links: Mapping[tuple[int, int], _Link]) -> set[int]:
        """Go as far as possible; returns the ranks that may go on because of it."""
        moved: set[int] = set()
        while self._position < len(self._instructions):
            instruction = self._instructions[self._position]
            if not self._receive(_read(instruction), links):
                return moved
            if not self._do(instruction, links, moved):
                return moved
            self.memory.note(self._clock)
            self._position += 1
        self._receive({slot for recv in self._posted for slot in recv.slots}, links)
        self.memory.note(self._clock)
        return moved

    def _do(
        self, instruction: Instruction, links: Mapping[tuple[int, int], _Link], moved: set[int]
    ) -> bool:
        match instruction:
            case Run():
                self._run(instruction)
            case Send():
                if not self._send(instruction, links[self.rank, instruction.to]):
                    return False
                moved.add(instruction.to)
            case Recv():
                if not self._costs.overlap and not self._meet(instruction, links, moved):
                    return False
                self._posted.append(instruction)
                if not self._costs.overlap:
                    self._receive(set(instruction.slots), links)
            case Free():
                for slot in instruction.slots:
                    self.memory.empty(slot)
        self._clock += self._costs.overhead
        return True

    def _run(self, run: Run) -> None:
        code = self._codes[run.code]
        start, self._clock = self._clock, self._clock + self._costs.duration(run, self.rank)
        if run.action is None:
            self.outer.append(OuterSpan(self.rank, run.label, start, self._clock))
        else:
            self.spans.append(Span(self.rank, run.action, start, self._clock))
        for position in code.donate:
            self.memory.empty(run.inputs[position])
        for slot, struct in zip(run.outputs, code.outputs, strict=True):
            self.memory.fill(slot, num_bytes(struct))

    def _send(self, send: Send, link: _Link) -> bool:
        sizes = tuple(self.memory.sizes[slot] for slot in send.slots)
        total = sum(sizes)
        start = max(self._clock, link.free)
        if not self._costs.overlap:
            if link.receiver_at is None:
                return False
            start = max(self._clock, link.receiver_at)
            link.receiver_at = None
        carried: Time = 0 if self._costs.bandwidth is None else total / self._costs.bandwidth
        link.free = start + carried
        end = start + carried + self._costs.latency
        if not self._costs.overlap:
            self._clock = end
        link.arrivals.append(end)
        link.sizes.append(sizes)
        self.sent.append(Transfer(self.rank, send.to, send.tag, total, start, end))
        return True

    def _meet(self, recv: Recv, links: Mapping[tuple[int, int], _Link], moved: set[int]) -> bool:
        """Be there for a sender that waits; True once it has sent."""
        link = links[recv.source, self.rank]
        if link.arrivals:
            self._clock = max(self._clock, link.arrivals[0])
            return True
        if link.receiver_at is None:  # once: two ranks that wait would wake each other for ever
            link.receiver_at = self._clock
            moved.add(recv.source)
        return False

    def _receive(self, wanted: set[int], links: Mapping[tuple[int, int], _Link]) -> bool:
        """Take what has to be there before ``wanted`` is read; False if it was not sent yet."""
        last = {
            recv.source: i for i, recv in enumerate(self._posted) if wanted.intersection(recv.slots)
        }
        while last:
            due = next(i for i, recv in enumerate(self._posted) if i <= last.get(recv.source, -1))
            recv = self._posted[due]
            link = links[recv.source, self.rank]
            if not link.arrivals:
                return False
            self._clock = max(self._clock, link.arrivals.popleft())
            for slot, size in zip(recv.slots, link.sizes.popleft(), strict=True):
                self.memory.fill(slot, size)
            del self._posted[due]
            last = {source: i - (i >= due) for source, i in last.items() if i != due}
        return True


def _read(instruction: Instruction) -> set[int]:
    """Slots whose value an instruction needs."""
    match instruction:
        case Run():
            return set(instruction.inputs)
        case Send() | Free():
            return set(instruction.slots)
        case Recv():
            return set()


def _full_at_start(part: RankProgram, program: Program) -> dict[int, int]:
    """Bytes of arguments and constants, by slot."""
    arguments = {slot: num_bytes(program.arguments[i]) for i, slot in part.inputs}
    constants = {slot: int(program.constants[i].nbytes) for i, slot in part.constants}
    return {**arguments, **constants}


def num_bytes(struct: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array of this shape and dtype, all of its devices' parts together."""
    return int(struct.size) * int(struct.dtype.itemsize)
