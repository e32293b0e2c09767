"""Whether an order can be run, and one global sequence in which it can.

In comes an ``Order``, from one of our schedules or from a user's. ``validate_order`` proves that
every task is there once, on the right rank, and that the ranks cannot end up waiting for each other
in a circle; otherwise it raises an error that shows the place. ``topological_order`` gives the one
sequence of all tasks by which the communication pass issues sends and receives. Not here: sends and
receives themselves and their own proof (communication, the program checker), times (timeline.py).
"""

from collections.abc import Iterator

from stagewright.pipelining.actions import Action, Kind, Order, dependency_map, run_order
from stagewright.pipelining.errors import ScheduleError
from stagewright.pipelining.timeline import Costs, simulate_order

_RANKS_SHOWN = 7
_CELLS_SHOWN = 9
_WAITS_SHOWN = 4
_WHOLE_BACKWARDS = ({Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W})


def validate_order(order: Order) -> None:
    """Prove that an order is legal: complete, rightly placed, and free of circles.

    1. Every rank holds at least one stage.
    2. Every action belongs to a stage and micro-batch that exist, on the rank that the placement
      says, once.
    3. Every stage and micro-batch has one ``F`` and either one ``B`` or one ``I`` and one ``W``;
       both ways may occur in one order.
    4. Running the lists from the top, no rank waits for a task that waits for it.

    Args:
        order: the order to check.

    Raises:
        ScheduleError: the order is not legal. The message shows the part of the grid around the
            offending action, marked ``<-- ERROR HERE``, in at most 15 lines.

    Example:
        >>> from stagewright.pipelining.actions import parse_order
        >>> validate_order(parse_order('''
        ...     1 micro-batch, stages on ranks 0 1
        ...     rank 0: 0B0 0F0
        ...     rank 1: 1F0 1B0
        ... '''))
        Traceback (most recent call last):
        ...
        stagewright.pipelining.errors.ScheduleError: the order cannot run: rank 0 is stuck at 0B0
          rank 0: [0B0] 0F0   <-- ERROR HERE
          rank 1: [1F0] 1B0
        0B0 (rank 0, position 0) waits for 0F0 (rank 0, position 1)
        Move the tasks waited for ahead of the tasks that wait.
    """
    _check_ranks(order)
    _check_actions(order)
    _check_complete(order)
    _check_runs(order)


def topological_order(order: Order, costs: Costs | None = None) -> tuple[tuple[int, Action], ...]:
    """All tasks of all ranks in one sequence: by simulated start, ties by rank.

    It keeps every rank's own list and puts each task after those it reads, whatever the costs:
    where times are equal (a task may cost 0), the start in unit time decides first.

    Args:
        order: a legal order.
        costs: durations; default, one unit for each of F, I and W.

    Returns:
        ``(rank, action)`` for every task.

    Example:
        >>> from stagewright.pipelining.schedules import OneFOneB
        >>> " ".join(str(action) for _, action in topological_order(OneFOneB().order(2, 2)))
        '0F0 0F1 1F0 1B0 0B0 1F1 1B1 0B1'
    """
    units = simulate_order(order).spans
    if costs is None:
        return tuple((span.rank, span.action) for span in units)
    start = {span.action: span.start for span in simulate_order(order, costs).spans}
    spans = sorted(units, key=lambda span: start[span.action])
    return tuple((span.rank, span.action) for span in spans)


def _check_ranks(order: Order) -> None:
    if order.num_microbatches < 1:
        raise ScheduleError(f"expected at least 1 micro-batch, got {order.num_microbatches}")
    if order.num_ranks < 1 or order.num_stages < 1:
        raise ScheduleError(
            f"expected ranks and stages, got {order.num_ranks} ranks and {order.num_stages} stages"
        )
    beyond = next(
        (stage for stage, rank in enumerate(order.placement) if not 0 <= rank < order.num_ranks),
        None,
    )
    if beyond is not None:
        raise ScheduleError(
            f"stage {beyond} is placed on rank {order.placement[beyond]}, "
            f"but the order has {order.num_ranks} ranks"
        )
    empty = sorted(set(range(order.num_ranks)) - set(order.placement))
    if empty:
        raise ScheduleError(
            f"the schedule does not fill its mesh: {order.num_ranks} ranks, but stages on only "
            f"{order.num_ranks - len(empty)} of them ({_listed('rank', empty)} without a stage). "
            "Use fewer pipeline ranks or a schedule with more stages."
        )


def _check_actions(order: Order) -> None:
    seen: set[Action] = set()
    for rank, actions in enumerate(order.actions):
        for position, action in enumerate(actions):
            problem = _misplaced(order, rank, action)
            if problem is None and action in seen:
                problem = f"{action} comes twice"
            if problem is not None:
                where = f"rank {rank}, position {position}: {problem}"
                raise ScheduleError("\n".join([where, *_excerpt(order, {rank: position}, rank)]))
            seen.add(action)


def _misplaced(order: Order, rank: int, action: Action) -> str | None:
    stage, microbatch = action.stage, action.microbatch
    if stage >= order.num_stages:
        return f"{action} names stage {stage}, but there are only {order.num_stages} stages"
    if microbatch >= order.num_microbatches:
        return (
            f"{action} names micro-batch {microbatch}, but there are only {order.num_microbatches}"
        )
    if rank != order.placement[stage]:
        return f"{action} belongs on rank {order.placement[stage]}, which holds stage {stage}"
    return None


def _check_complete(order: Order) -> None:
    kinds: dict[tuple[int, int], set[Kind]] = {}
    for actions in order.actions:
        for action in actions:
            kinds.setdefault((action.stage, action.microbatch), set()).add(action.kind)
    for stage in range(order.num_stages):
        for microbatch in range(order.num_microbatches):
            got = kinds.get((stage, microbatch), set())
            if got not in _WHOLE_BACKWARDS:
                listed = " ".join(kind.value for kind in Kind if kind in got) or "none"
                raise ScheduleError(
                    f"stage {stage}, micro-batch {microbatch}, on rank {order.placement[stage]}: "
                    f"expected the tasks F B, or F I W, got {listed}"
                )


def _check_runs(order: Order) -> None:
    needs = dependency_map(order)
    done: set[Action] = set()
    stands = dict.fromkeys(range(order.num_ranks), 0)
    for rank, action in run_order(order, needs):
        done.add(action)
        stands[rank] += 1
    stuck = {rank: at for rank, at in stands.items() if at < len(order.actions[rank])}
    if stuck:
        raise ScheduleError(_describe_circle(order, stuck, _waits(order, needs, done, stuck)))


def _waits(
    order: Order, needs: dict[Action, tuple[Action, ...]], done: set[Action], stuck: dict[int, int]
) -> dict[int, Action]:
    heads = {rank: order.actions[rank][at] for rank, at in stuck.items()}
    return {rank: next(n for n in needs[head] if n not in done) for rank, head in heads.items()}


def _describe_circle(order: Order, stuck: dict[int, int], waits: dict[int, Action]) -> str:
    circle = _circle(order, min(stuck), waits)
    places = {rank: _place(order, waits[rank]) for rank in circle}
    ahead = {rank: position - stuck[there] for rank, (there, position) in places.items()}
    # Begin with the task that is most out of turn: what it waits for is furthest away.
    worst = circle.index(max(circle, key=lambda rank: (ahead[rank], -rank)))
    circle = circle[worst:] + circle[:worst]
    heads = {rank: order.actions[rank][stuck[rank]] for rank in circle}
    lines = [f"the order cannot run: rank {circle[0]} is stuck at {heads[circle[0]]}"]
    lines += _excerpt(order, stuck, circle[0])
    for rank in circle[:_WAITS_SHOWN]:
        there, position = places[rank]
        lines.append(
            f"{heads[rank]} (rank {rank}, position {stuck[rank]}) waits for "
            f"{waits[rank]} (rank {there}, position {position})"
        )
    if len(circle) > _WAITS_SHOWN:
        lines.append(f"and so on, in a circle of {len(circle)} ranks")
    return "\n".join([*lines, "Move the tasks waited for ahead of the tasks that wait."])


def _circle(order: Order, rank: int, waits: dict[int, Action]) -> list[int]:
    """The ranks that wait for each other in a circle, found from any rank that is stuck."""
    trail: list[int] = []
    while rank not in trail:
        trail.append(rank)
        rank = order.placement[waits[rank].stage]
    return trail[trail.index(rank) :]


def _place(order: Order, action: Action) -> tuple[int, int]:
    rank = order.placement[action.stage]
    return rank, order.actions[rank].index(action)


def _excerpt(order: Order, marks: dict[int, int], offender: int) -> Iterator[str]:
    """Lines of the grid near the offending rank; on each, the cells near the marked position."""
    first = max(0, min(offender - _RANKS_SHOWN // 2, order.num_ranks - _RANKS_SHOWN))
    last = min(order.num_ranks, first + _RANKS_SHOWN)
    for rank in range(first, last):
        cells = [str(action) for action in order.actions[rank]]
        at = marks.get(rank, -1)
        if at >= 0:
            cells[at] = f"[{cells[at]}]"
        start = max(0, min(at - _CELLS_SHOWN // 2, len(cells) - _CELLS_SHOWN))
        left = "... " if start else ""
        right = " ..." if start + _CELLS_SHOWN < len(cells) else ""
        error = "   <-- ERROR HERE" if rank == offender else ""
        yield f"  rank {rank}: {left}{' '.join(cells[start : start + _CELLS_SHOWN])}{right}{error}"


def _listed(noun: str, numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"{noun}{'s' if len(numbers) > 1 else ''} {shown}"
