"""Claim: a generator per rank is a schedule; what it yields wrongly is told with rank and position."""

import doctest

import pytest

from stagewright.pipelining.actions import Action, Kind
from stagewright.pipelining.errors import ScheduleError
from stagewright.pipelining.orders import validate_order
from stagewright.pipelining.schedules import OneFOneB, Schedule, generated
from stagewright.pipelining.schedules.generated import schedule
from stagewright.pipelining.schedules.schedule import v_placement


@schedule()
def mine(rank, num_ranks, num_microbatches):
    """1F1B once more."""
    warmup = min(num_ranks - rank - 1, num_microbatches)
    yield from (Action(rank, Kind.F, m) for m in range(warmup))
    for m in range(num_microbatches):
        if m + warmup < num_microbatches:
            yield f"{rank}F{m + warmup}"
        yield Action(rank, Kind.B, m)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 5), (4, 8), (4, 2)])
def test_a_generator_is_a_schedule(ranks: int, microbatches: int) -> None:
    assert isinstance(mine, Schedule)
    assert mine.name == "mine"
    assert mine.order(ranks, microbatches) == OneFOneB().order(ranks, microbatches)


def test_placement_may_be_given() -> None:
    @schedule(stages_per_rank=2, placement=v_placement)
    def down_and_up(rank, num_ranks, num_microbatches):
        stages = (rank, 2 * num_ranks - 1 - rank)
        for m in range(num_microbatches):
            yield from (Action(s, Kind.F, m) for s in stages)
            yield from (Action(s, Kind.B, m) for s in reversed(stages))

    order = down_and_up.order(3, 2)
    assert order.placement == (0, 1, 2, 2, 1, 0)
    assert down_and_up.num_stages(3) == 6
    validate_order(order)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["0F0", "1Q1"], r"'bad' failed for 1 ranks and 2 micro-batches, on rank 0 after 1 tasks"),
        (["0F0", 3], "after 1 tasks: TypeError"),
    ],
)
def test_what_is_no_task_is_told_with_its_place(items: list, message: str) -> None:
    @schedule()
    def bad(rank, num_ranks, num_microbatches):
        yield from items

    with pytest.raises(ScheduleError, match=message):
        bad.order(1, 2)


def test_a_generator_that_fails_is_named() -> None:
    @schedule()
    def broken(rank, num_ranks, num_microbatches):
        yield "0F0"
        raise KeyError("oh")

    with pytest.raises(ScheduleError, match=r"'broken' failed.*on rank 0 after 1 tasks: KeyError"):
        broken.order(1, 1)


def test_no_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="1 or more, got 0"):
        schedule(stages_per_rank=0)


def test_examples() -> None:
    assert doctest.testmod(generated).failed == 0
