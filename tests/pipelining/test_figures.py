"""Claim: figures read off a timeline are those counted on its order, by hand or by the schedules."""

import doctest
from fractions import Fraction

import pytest

from stagewright.pipelining import figures as module
from stagewright.pipelining.actions import Order, parse_action, parse_order
from stagewright.pipelining.figures import activation_curves, figures, links, order_of
from stagewright.pipelining.schedules import by_name
from stagewright.pipelining.timeline import (
    Costs,
    OuterSpan,
    Span,
    Timeline,
    Transfer,
    peak_activations,
    simulate_order,
)

SIZES = [(1, 1), (2, 5), (4, 8), (3, 12)]


def orders() -> list[tuple[str, Order]]:
    return [
        (f"{name}-{size[0]}x{size[1]}", by_name(name).order(*size))
        for name in ("gpipe", "1f1b", "interleaved:3", "zbh1")
        for size in SIZES
    ]


ORDERS = pytest.mark.parametrize("order", [o for _, o in orders()], ids=[i for i, _ in orders()])


@ORDERS
def test_order_comes_back_from_its_timeline(order: Order) -> None:
    assert order_of(simulate_order(order)) == order


@ORDERS
def test_curves_begin_and_end_with_nothing_and_peak_as_counted(order: Order) -> None:
    curves = activation_curves(simulate_order(order))
    assert tuple(max(value for _, value in curve) for curve in curves) == peak_activations(order)
    for curve in curves:
        assert curve[0][0] == 0
        assert curve[-1][1] == 0
        assert [time for time, _ in curve] == sorted({time for time, _ in curve})


@ORDERS
def test_every_value_that_crosses_ranks_is_one_transfer(order: Order) -> None:
    borders = sum(a != b for a, b in zip(order.placement, order.placement[1:], strict=False))
    timeline = simulate_order(order)
    assert figures(timeline).transfers == 2 * borders * order.num_microbatches
    for link in links(timeline):
        assert link.source.rank != link.to.rank
        assert link.source.end <= link.to.start
        assert link.transfer is None


def test_stages_of_one_rank_in_a_row_send_nothing() -> None:
    order = parse_order(
        """
        1 micro-batch, stages on ranks 0 1 1 0
        rank 0: 0F0 3F0 3B0 0B0
        rank 1: 1F0 2F0 2B0 1B0
        """
    )
    assert figures(simulate_order(order)).transfers == 4


def test_activations_are_in_units_of_one_ranks_layers() -> None:
    got = figures(simulate_order(by_name("interleaved:2").order(8, 24)))
    assert (got.activations, got.bubble) == (Fraction(23, 2), Fraction(7, 55))


def test_known_transfers_are_counted_and_found() -> None:
    spans = (Span(0, parse_action("0F0"), 0, 1), Span(1, parse_action("1F0"), 2, 3))
    value = Transfer(0, 1, "0F0", 10, 1, 2)
    norm = Transfer(1, 0, "norm", 4, 3, 4)
    timeline = Timeline(spans, 2, (OuterSpan(0, "norm", 4, 5),), (value, norm))
    assert figures(timeline).transfers == 2
    assert [link.transfer for link in links(timeline)] == [value]


def test_holes_are_the_waits_within_a_ranks_own_work() -> None:
    order = parse_order("1 micro-batch, stages on ranks 0 1\nrank 0: 0F0 0B0\nrank 1: 1F0 1B0")
    got = figures(simulate_order(order))  # rank 0 waits 3 of 6 between its tasks, rank 1 around its
    assert (got.holes, got.bubble) == (Fraction(3, 12), Fraction(6, 12))


def test_nothing_has_figures_too() -> None:
    got = figures(Timeline((), 2))
    assert (got.bubble, got.activations, got.transfers, got.makespan) == (0, 0, 0, 0)


def test_costs_change_times_alone() -> None:
    order = by_name("1f1b").order(4, 8)
    plain, slow = figures(simulate_order(order)), figures(simulate_order(order, Costs(latency=2)))
    assert slow.makespan > plain.makespan
    assert (slow.activations, slow.transfers) == (plain.activations, plain.transfers)


def test_doctests() -> None:
    assert doctest.testmod(module).failed == 0
