"""Claim: a way is repeated as its steps say, and weight gradients fill what is left, within a limit."""

import pytest

from stagewright.pipelining.actions import Kind, Order
from stagewright.pipelining.orders import validate_order
from stagewright.pipelining.schedules.schedule import round_sizes, v_placement
from stagewright.pipelining.schedules.v_shape import fill_weights, repeat_way
from stagewright.pipelining.timeline import peak_activations


def test_v_placement_goes_down_and_up() -> None:
    assert v_placement(3) == (0, 1, 2, 2, 1, 0)
    assert v_placement(2, waves=2) == (0, 1, 1, 0, 0, 1, 1, 0)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "sizes"),
    [(4, 8, (4, 4)), (4, 3, (3,)), (4, 7, (7,)), (4, 11, (6, 5)), (1, 3, (1, 1, 1))],
)
def test_round_sizes(ranks: int, microbatches: int, sizes: tuple[int, ...]) -> None:
    assert round_sizes(ranks, microbatches) == sizes


def test_longer_steps_let_more_micro_batches_in() -> None:
    """Rank 0 of 4: a way of 1 unit a step takes 15 units to come back, one of 3 units takes 39."""

    def before_the_last_gradient(plan: Order) -> int:
        names = [str(action) for action in plan.actions[0]]
        return sum(name.startswith("0F") for name in names[: names.index("0I0")])

    assert before_the_last_gradient(repeat_way(4, 12, (1, 1, 1, 1))) == 3
    assert before_the_last_gradient(repeat_way(4, 12, (3, 3, 3, 3))) == 7


def test_a_plan_has_no_weight_gradients_and_the_filled_one_all() -> None:
    plan = repeat_way(3, 5, (3, 3, 3, 3))
    filled = fill_weights(plan, limit=6)
    validate_order(filled)
    kept = [[a for a in actions if a.kind is not Kind.W] for actions in filled.actions]
    assert kept == [list(actions) for actions in plan.actions]
    assert not plan.splits_backward
    assert filled.splits_backward


@pytest.mark.parametrize("limit", [6, 8])
def test_the_limit_holds(limit: int) -> None:
    filled = fill_weights(repeat_way(3, 15, (3, 3, 3, 3)), limit)
    assert max(peak_activations(filled)) <= limit


def test_a_limit_that_no_order_keeps_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="cannot go on within 1 activations"):
        fill_weights(repeat_way(3, 5, (3, 3, 3, 3)), limit=1)
