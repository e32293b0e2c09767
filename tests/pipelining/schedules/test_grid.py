"""Claim: what is written is read back, in PyTorch's form and in ours; what is neither is refused with its place."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.pipelining.actions import Action, Kind, Order
from stagewright.pipelining.errors import ScheduleError
from stagewright.pipelining.orders import validate_order
from stagewright.pipelining.schedules import grid
from stagewright.pipelining.schedules.grid import GridSchedule, read_csv, read_order, write_csv
from stagewright.pipelining.schedules.names import all_names, by_name
from stagewright.pipelining.schedules.schedule import Schedule


@pytest.mark.parametrize("name", all_names())
def test_named_orders_come_back(name: str) -> None:
    order = by_name(name).order(4, 8)
    assert read_csv(write_csv(order)) == order
    assert read_order(write_csv(order)) == read_order(str(order)) == order
    assert write_csv(read_csv(write_csv(order))) == write_csv(order)


ROWS = st.lists(
    st.lists(st.tuples(st.sampled_from(list(Kind)), st.integers(0, 4)), min_size=1, max_size=6),
    min_size=1,
    max_size=4,
)


@given(ROWS)
def test_any_order_comes_back_legal_or_not(rows: list) -> None:
    actions = tuple(tuple(Action(r, kind, m) for kind, m in row) for r, row in enumerate(rows))
    count = 1 + max(m for row in rows for _, m in row)
    order = Order(actions, tuple(range(len(rows))), count)
    assert read_csv(write_csv(order)).actions == actions


def test_what_pytorch_writes_of_communication_is_skipped() -> None:
    text = "0UNSHARD,0F0,0SEND_F0,,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    order = read_csv(text)
    assert str(order).splitlines()[1:] == ["rank 0: 0F0 0B0", "rank 1: 1F0 1B0"]
    validate_order(order)


def test_an_overlapped_pair_is_its_two_tasks() -> None:
    (row,) = read_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1").actions
    assert list(map(str, row)) == ["0F0", "0F1", "0B0", "0B1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0", r"line 1 \(rank 0\), column 2: expected an action as '2F0'.*got '0X0'"),
        ("0F0\n,0B0", "stage 0 has tasks on rank 0 and, with 0B0, on rank 1"),
        ("", "expected tasks as 0F0, one line per rank, got none"),
        ("0F0\n2F0", "tasks of stage 2, but none of stage 1"),
        ("0F0,(0F1;0Q0)OVERLAP_F_B", "column 2: expected an action"),
    ],
)
def test_what_is_no_schedule_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_csv(text)


def test_a_grid_is_a_schedule_of_its_own_size(tmp_path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(write_csv(by_name("zbv").order(4, 8)))
    schedule = GridSchedule.from_file(path)
    assert isinstance(schedule, Schedule)
    assert schedule.name == f"csv:{path}"
    assert schedule.num_stages(4) == 8
    assert schedule.order(4, 8) == by_name("zbv").order(4, 8)
    with pytest.raises(ScheduleError, match="for 4 ranks and 8 micro-batches, got 4 ranks and 9"):
        schedule.order(4, 9)
    with pytest.raises(ScheduleError, match="got 2 ranks"):
        schedule.num_stages(2)
    assert by_name(f"csv:{path}") == schedule


def test_a_file_that_holds_something_else_is_named(tmp_path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(ValueError, match=r"notes\.txt is no schedule: line 1.*got 'hello'"):
        GridSchedule.from_file(path)


def test_examples() -> None:
    assert doctest.testmod(grid).failed == 0
