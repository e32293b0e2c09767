"""The claim: every layer lands on one stage, and `Balanced` cannot be beaten."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.nn.partition import Balanced, Explicit, Uniform, group_segments

costs_lists = st.lists(st.floats(0.0, 10.0), min_size=1, max_size=8)
extras = st.sampled_from([0.0, 0.5, 3.0, 20.0])


def all_splits(num_items, num_groups, at_least):
    """Return every way to write `num_items` as `num_groups` ordered numbers."""
    sizes = itertools.product(range(num_items + 1), repeat=num_groups)
    return [
        size for size in sizes if sum(size) == num_items and all(map(int.__ge__, size, at_least))
    ]


def stage_costs(sizes, costs, before=0.0, after=0.0):
    ends = list(itertools.accumulate(sizes, initial=0))
    stages = [math.fsum(costs[start:stop]) for start, stop in itertools.pairwise(ends)]
    stages[0] += before
    stages[-1] += after
    return stages


@given(st.integers(1, 40), st.data())
def test_uniform_is_even(num_layers, data):
    num_stages = data.draw(st.integers(1, num_layers))
    sizes = Uniform().split(num_stages, num_layers)
    assert (len(sizes), sum(sizes)) == (num_stages, num_layers)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("num_stages", "num_layers", "sizes"),
    [(4, 10, (2, 3, 3, 2)), (3, 10, (3, 4, 3)), (4, 7, (2, 2, 2, 1)), (2, 5, (3, 2)), (1, 3, (3,))],
)
def test_uniform_keeps_the_ends_short(num_stages, num_layers, sizes):
    assert Uniform().split(num_stages, num_layers) == sizes


@given(costs_lists, st.integers(1, 4), extras, extras)
def test_balanced_is_optimal(costs, num_stages, before, after):
    at_least = [1] * num_stages
    at_least[0] -= before > 0
    at_least[-1] -= after > 0 and (num_stages > 1 or before == 0)
    possible = all_splits(len(costs), num_stages, at_least)
    if not possible:
        with pytest.raises(ValueError, match=f"{len(costs)} layers into {num_stages} stages"):
            Balanced().split(num_stages, len(costs), costs, before, after)
        return
    sizes = Balanced().split(num_stages, len(costs), costs, before, after)
    assert sizes in possible
    least = min(max(stage_costs(other, costs, before, after)) for other in possible)
    assert max(stage_costs(sizes, costs, before, after)) <= least + 1e-7


@given(costs_lists, st.data())
def test_segments_are_grouped_optimally(costs, data):
    num_groups = data.draw(st.integers(1, min(4, len(costs))))
    sizes = group_segments(costs, num_groups)
    possible = all_splits(len(costs), num_groups, [1] * num_groups)
    assert sizes in possible
    least = min(max(stage_costs(other, costs)) for other in possible)
    assert max(stage_costs(sizes, costs)) <= least + 1e-7


def test_balanced_evens_out_below_the_largest():
    assert group_segments((9.0, 1.0, 1.0, 1.0, 1.0), 3) == (1, 2, 2)


def test_balanced_without_costs_counts_layers_and_ends():
    assert Balanced().split(2, 6) == (3, 3)
    assert Balanced().split(2, 6, after=4.0) == (5, 1)
    assert Balanced().split(3, 4, after=2.0) == (2, 2, 0)


def test_own_costs_come_before_measured_ones():
    assert Balanced((1.0, 1.0, 2.0)).split(2, 3, costs=(2.0, 1.0, 1.0)) == (2, 1)


@pytest.mark.parametrize("sizes", [(2, 3), (0, 5), (5, 0), (0, 5, 0), (0, 0)])
def test_explicit_is_as_given(sizes):
    assert Explicit(sizes).split(len(sizes), sum(sizes)) == sizes


@pytest.mark.parametrize("sizes", [(2, 0, 3), (2, -1)])
def test_explicit_refuses_what_is_no_partition(sizes):
    with pytest.raises(ValueError, match="0 for the first or the last"):
        Explicit(sizes)


@pytest.mark.parametrize(("num_stages", "num_layers"), [(3, 5), (2, 6)])
def test_explicit_refuses_other_numbers(num_stages, num_layers):
    match = f"2 stages and 5 layers, .* {num_stages} stages and {num_layers} layers"
    with pytest.raises(ValueError, match=match):
        Explicit((2, 3)).split(num_stages, num_layers)


@pytest.mark.parametrize("partition", [Uniform(), Balanced()])
@pytest.mark.parametrize("num_stages", [0, 4])
def test_impossible_number_of_stages_is_refused(partition, num_stages):
    with pytest.raises(ValueError, match=f"3 layers into {num_stages} stages"):
        partition.split(num_stages, 3)


def test_wrong_costs_are_refused():
    with pytest.raises(ValueError, match="2 costs for 3 layers"):
        Balanced((1.0, 2.0)).split(2, 3)
    with pytest.raises(ValueError, match="none negative"):
        group_segments((1.0, -2.0), 2)
    with pytest.raises(ValueError, match="finite"):
        group_segments((1.0, math.nan), 2)
