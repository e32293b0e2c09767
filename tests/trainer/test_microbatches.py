"""A batch is cut along the axis that each leaf names, in order, or refused by name."""

import jax
import numpy as np
import pytest

from stagewright.trainer.microbatches import MicrobatchSplit


def test_examples_keep_their_order() -> None:
    cut = MicrobatchSplit(microbatches=3)({"x": np.arange(12).reshape(6, 2)})
    assert cut["x"].shape == (3, 2, 2)
    np.testing.assert_array_equal(cut["x"].reshape(6, 2), np.arange(12).reshape(6, 2))


@pytest.mark.parametrize("axis", [1, -2])
def test_another_axis_stays_where_it_was_within_the_microbatch(axis: int) -> None:
    x = np.arange(24).reshape(3, 4, 2)
    cut = MicrobatchSplit(microbatches=2, axes={"x": axis})({"x": x})
    assert cut["x"].shape == (2, 3, 2, 2)
    np.testing.assert_array_equal(cut["x"][1], x[:, 2:])


def test_shared_leaves_are_left_alone() -> None:
    split = MicrobatchSplit(microbatches=2, axes={"n": None, "pos": None})
    batch = {"n": 2, "pos": np.zeros((1, 4), np.float32), "x": np.zeros((4, 4))}
    cut = split(batch)
    assert cut["pos"].shape == (1, 4)
    assert cut["n"].shape == ()
    assert split.in_axes(batch) == {"n": None, "pos": None, "x": 0}


def test_dtypes_are_those_that_jax_computes_in() -> None:
    cut = MicrobatchSplit(microbatches=1)({"x": np.zeros((2, 2)), "y": np.zeros(2, np.int64)})
    assert cut["x"].dtype == np.float32
    assert cut["y"].dtype == np.int32


def test_device_arrays_are_cut_too() -> None:
    cut = MicrobatchSplit(microbatches=2, axes={"0": 1})((jax.numpy.zeros((3, 4)),))
    assert cut[0].shape == (2, 3, 2)


@pytest.mark.parametrize(
    ("batch", "split", "message"),
    [
        (
            {"x": np.zeros((8, 2))},
            {"microbatches": 3},
            r"'x' holds 8 examples.*3 micro-batches.*multiple of 3",
        ),
        (
            {"x": np.zeros((8, 2))},
            {"microbatches": 4, "data_size": 4},
            r"'x' holds 8.*4 micro-batches.*data=4.*of 16",
        ),
        ({"x": np.zeros((0, 2))}, {"microbatches": 1}, r"'x' holds 0 examples"),
        (
            {"x": np.zeros((8, 2)), "y": np.zeros(7)},
            {"microbatches": 1},
            r"'x' has 8 .*'y' of shape \(7,\) has 7",
        ),
        (
            {"n": 2, "x": np.zeros((8, 2))},
            {"microbatches": 2},
            r"'n' of shape \(\) has no axis 0.*\{'n': None\}",
        ),
        (
            {"x": np.zeros(8)},
            {"microbatches": 2, "axes": {"y": 0}},
            r"names \['y'\].*it has \['x'\]",
        ),
        (
            {"x": np.zeros(8)},
            {"microbatches": 2, "axes": {"x": None}},
            r"no leaf of the batch has a batch axis",
        ),
        ({}, {"microbatches": 2}, r"no leaf"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(batch: dict, split: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MicrobatchSplit(**split)(batch)


def test_shares_hold_the_examples_in_order() -> None:
    split = MicrobatchSplit(microbatches=1, axes={"y": -1, "z": None}, data_size=2)
    batch = {"x": np.arange(8).reshape(4, 2), "y": np.arange(12).reshape(3, 4), "z": np.ones(5)}
    shares, axes = split.shares(batch)
    assert axes == {"x": 0, "y": 0, "z": None}
    np.testing.assert_array_equal(shares["x"], np.arange(8).reshape(2, 2, 2))
    np.testing.assert_array_equal(shares["y"][1], np.arange(12).reshape(3, 4)[:, 2:])
    np.testing.assert_array_equal(shares["z"], np.ones(5))
