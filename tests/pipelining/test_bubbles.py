"""Claim: the parts of a bubble add up to the idle time, and each cause shows up under its own name."""

import doctest
from fractions import Fraction

import pytest

from stagewright.pipelining import bubbles
from stagewright.pipelining.actions import parse_action
from stagewright.pipelining.bubbles import Bubble, add_bubbles, attribute_bubble, bubble_shares
from stagewright.pipelining.schedules import ZBH1, GPipe, Interleaved1F1B, OneFOneB
from stagewright.pipelining.timeline import Costs, OuterSpan, Span, Timeline, simulate_order

SCHEDULES = [GPipe(), OneFOneB(), Interleaved1F1B(2), ZBH1()]
COSTS = [
    Costs(),
    Costs(latency=Fraction(1, 3)),
    Costs(forward=Fraction(2), backward_weight=Fraction(1, 2), latency=5),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 5), (4, 2), (4, 9)])
def test_parts_add_up_exactly(schedule, costs, ranks, microbatches):
    timeline = simulate_order(schedule.order(ranks, microbatches), costs)
    for rank, bubble in enumerate(attribute_bubble(timeline)):
        assert bubble.total == timeline.makespan - timeline.busy(rank)
        assert min(getattr(bubble, cause) for cause in bubbles.CAUSES) >= 0


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB()], ids=lambda s: s.name)
def test_a_balanced_pipeline_only_fills_and_drains(schedule):
    whole = add_bubbles(attribute_bubble(simulate_order(schedule.order(4, 8))))
    assert whole.fill > 0
    assert whole.drain > 0
    assert whole.stall == whole.imbalance == whole.receive == whole.barrier == 0


def test_the_last_rank_never_drains_into_the_next_step_alone():
    timeline = simulate_order(GPipe().order(2, 2))  # rank 0: F F . . B B;  rank 1: . F F B B .
    first, last = attribute_bubble(timeline)
    assert (first.fill, first.drain) == (3, 0)
    assert (last.fill, last.drain) == (1, 2)


def test_latency_is_a_wait_for_a_receive():
    order = OneFOneB().order(2, 1)  # one micro-batch: forward, there, back
    first, last = attribute_bubble(simulate_order(order, Costs(latency=10)))
    assert (first.receive, last.receive) == (10, 10)
    assert (first.fill, first.drain) == (1 + 2 + 10, 0)  # the way there is the other rank's wait
    assert (last.fill, last.drain) == (1, 2 + 10)


def test_imbalance_is_what_a_rank_has_less_to_do():
    costs = Costs(forward=(1, 2), backward_input=(1, 2), backward_weight=(1, 2))
    first, last = attribute_bubble(simulate_order(OneFOneB().order(2, 6), costs))
    assert first.imbalance == 6 * 3
    assert last.imbalance == 0


def test_waiting_behind_the_last_task_is_a_barrier():
    spans = (Span(0, parse_action("0F0"), 0, 2), Span(1, parse_action("1F0"), 2, 4))
    outer = (OuterSpan(0, "norm", 2, 3), OuterSpan(0, "update", 7, 8), OuterSpan(1, "update", 7, 8))
    first, last = attribute_bubble(Timeline(spans, 2, outer=outer))
    assert first.barrier == 3  # 4 to 7; 3 to 4 it waits for 1F0
    assert last.barrier == 3
    assert (last.fill, last.imbalance) == (1, 1)  # waited 2, and had 1 less to do than rank 0
    assert first.total == 8 - 4


def test_shares_add_up_to_the_bubble_fraction():
    timeline = simulate_order(ZBH1().order(4, 6), Costs(latency=1))
    assert sum(bubble_shares(timeline).values()) == pytest.approx(float(timeline.bubble_fraction))
    assert set(bubble_shares(Timeline((), 1)).values()) == {0.0}


def test_floats_are_attributed_too():
    timeline = simulate_order(OneFOneB().order(2, 4), Costs(forward=(0.25, 0.5), latency=0.125))
    for rank, bubble in enumerate(attribute_bubble(timeline)):
        assert bubble.total == pytest.approx(timeline.makespan - timeline.busy(rank))


def test_sums():
    assert add_bubbles([Bubble(fill=1, barrier=2), Bubble(fill=3)]) == Bubble(fill=4, barrier=2)


def test_examples():
    assert doctest.testmod(bubbles).failed == 0


def test_a_task_that_reads_nothing_from_elsewhere_waits_for_no_link():
    spans = (Span(0, parse_action("0F0"), 2, 3), Span(0, parse_action("1F0"), 5, 6))
    (bubble,) = attribute_bubble(Timeline(spans, 1))
    assert bubble == Bubble(fill=4)
