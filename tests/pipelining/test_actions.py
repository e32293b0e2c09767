"""Claim: actions and orders print and parse back to the same value; tasks' inputs are right."""

import doctest
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.pipelining import actions, errors
from stagewright.pipelining.actions import (
    Action,
    Kind,
    Order,
    dependencies,
    dependency_map,
    parse_action,
    parse_order,
    run_order,
)

ACTIONS = st.builds(Action, st.integers(0, 99), st.sampled_from(Kind), st.integers(0, 999))
ORDERS = st.builds(
    Order,
    st.lists(st.lists(ACTIONS, max_size=8).map(tuple), max_size=5).map(tuple),
    st.lists(st.integers(0, 12), max_size=5).map(tuple),
    st.integers(0, 999),
)


@given(ACTIONS)
def test_action_round_trip(action: Action) -> None:
    assert parse_action(str(action)) == action


@given(ORDERS)
def test_order_round_trip(order: Order) -> None:
    assert parse_order(str(order)) == order


def test_action_prints_as_pytorch_does() -> None:
    assert str(Action(2, Kind.F, 0)) == "2F0"
    assert str(Action(11, Kind.W, 10)) == "11W10"


@pytest.mark.parametrize(
    "text", ["", "2F", "F0", "2X0", "2F0 ", "2f0", "-1F0", "2F0.5", "2FB0", "٢F0"]
)
def test_parse_action_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="expected an action as '2F0'"):
        parse_action(text)


def test_action_refuses_negative_numbers() -> None:
    with pytest.raises(ValueError, match="from 0, got -1 and 0"):
        Action(-1, Kind.F, 0)


def test_actions_sort_by_stage_kind_microbatch() -> None:
    texts = ["1B0", "0F1", "0F0", "0B2"]
    assert [str(action) for action in sorted(map(parse_action, texts))] == [
        "0B2",
        "0F0",
        "0F1",
        "1B0",
    ]


def test_order_prints_a_grid() -> None:
    order = Order(
        (
            (Action(0, Kind.F, 0), Action(0, Kind.B, 0), Action(10, Kind.F, 0)),
            (Action(1, Kind.F, 0),),
        ),
        (0, 1),
        1,
    )
    assert str(order) == "1 micro-batch, stages on ranks 0 1\nrank 0: 0F0  0B0  10F0\nrank 1: 1F0"


def test_parse_order_skips_empty_cells_and_blank_lines() -> None:
    order = parse_order("\n  2 micro-batches, stages on ranks 0\n\n  rank 0: . 0F0 . . 0B0\n")
    assert order.actions == ((Action(0, Kind.F, 0), Action(0, Kind.B, 0)),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a first line as .*, got ''"),
        ("rank 0: 0F0", "expected a first line as .*, got 'rank 0: 0F0'"),
        ("1 micro-batch, stages on ranks 0\n0F0", "expected a line as 'rank 0: .*, got '0F0'"),
        (
            "1 micro-batch, stages on ranks 0\nrank 1: 0F0",
            "expected a line as 'rank 0: .*, got 'rank 1: 0F0'",
        ),
        (
            "1 micro-batch, stages on ranks 0\nrank 0: 0F0 0Q0",
            "rank 0: expected an action as '2F0' .*, got '0Q0'",
        ),
    ],
)
def test_parse_order_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_order(text)


@pytest.mark.parametrize(
    ("action", "splits", "expected"),
    [
        ("0F3", False, []),
        ("2F3", False, ["1F3"]),
        ("1B3", False, ["1F3", "2B3"]),
        ("1B3", True, ["1F3", "2I3"]),
        ("1I3", True, ["1F3", "2I3"]),
        ("1I3", False, ["1F3", "2B3"]),
        ("2B3", False, ["2F3"]),
        ("2I3", True, ["2F3"]),
        ("1W3", True, ["1I3"]),
        ("2W3", False, ["2I3"]),
    ],
)
def test_dependencies(action: str, splits: bool, expected: list[str]) -> None:
    got = dependencies(parse_action(action), num_stages=3, splits=splits)
    assert [str(needed) for needed in got] == expected


MIXED = parse_order(
    """
    2 micro-batches, stages on ranks 0 1 2
    rank 0: 0F0 0F1 0B0 0I1 0W1
    rank 1: 1F0 1F1 1I0 1B1 1W0
    rank 2: 2F0 2B0 2F1 2I1 2W1
    """
)


def test_dependency_map_follows_the_split_of_each_task() -> None:
    needs = {
        str(action): [str(needed) for needed in texts]
        for action, texts in dependency_map(MIXED).items()
    }
    assert needs["1I0"] == ["1F0", "2B0"]
    assert needs["1B1"] == ["1F1", "2I1"]
    assert needs["0B0"] == ["0F0", "1I0"]
    assert needs["0I1"] == ["0F1", "1B1"]


def test_run_order_runs_everything_after_what_it_needs() -> None:
    needs = dependency_map(MIXED)
    done: set[Action] = set()
    for _, action in run_order(MIXED, needs):
        assert done.issuperset(needs[action])
        done.add(action)
    assert done == set(needs)


def test_run_order_stops_where_ranks_wait_for_each_other() -> None:
    order = parse_order("1 micro-batch, stages on ranks 0 1\nrank 0: 0F0 0B0\nrank 1: 1B0 1F0")
    assert [str(action) for _, action in run_order(order, dependency_map(order))] == ["0F0"]


def test_splits_backward() -> None:
    assert MIXED.splits_backward
    assert not parse_order("1 micro-batch, stages on ranks 0\nrank 0: 0F0 0B0").splits_backward


def test_actor_error_survives_pickling() -> None:
    error = errors.ActorError(1, "RUN 3F0", 3, Kind.F, 0, "out of memory")
    copy = pickle.loads(pickle.dumps(error))
    assert (
        str(copy)
        == str(error)
        == "rank 1 failed at RUN 3F0 (stage 3, F, micro-batch 0): out of memory"
    )
    assert (copy.rank, copy.stage, copy.kind, copy.microbatch) == (1, 3, Kind.F, 0)
    assert str(errors.ActorError(0, "SEND x")) == "rank 0 failed at SEND x: no reason given"


def test_callers_mistakes_are_value_errors() -> None:
    assert issubclass(errors.ScheduleError, ValueError)
    assert issubclass(errors.StageError, ValueError)
    assert not issubclass(errors.ActorError, ValueError)


@pytest.mark.parametrize("module", [actions, errors])
def test_doctests(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]
