"""Batch i is a function of (seed, i); each window comes once an epoch; targets follow inputs."""

import itertools

import numpy as np
import pytest

from stagewright.trainer.data import TextBatches, heldout_batches

TEXT = np.arange(101, dtype=np.uint8)


def test_targets_are_the_inputs_shifted_by_one() -> None:
    batch = TextBatches(TEXT, batch=3, length=5, seed=0)[4]
    assert batch["inputs"].shape == (3, 5)
    assert batch["inputs"].dtype == np.int32
    np.testing.assert_array_equal(batch["targets"], batch["inputs"] + 1)


def test_every_window_comes_once_an_epoch_in_an_order_of_its_own() -> None:
    batches = TextBatches(TEXT, batch=4, length=10, seed=1)  # 10 windows: batches cross epochs
    starts = np.concatenate([batches[i]["inputs"][:, 0] for i in range(5)])
    first, second = starts[:10], starts[10:]
    assert sorted(first) == sorted(second) == list(range(0, 100, 10))
    assert list(first) != list(second)


def test_any_batch_can_be_asked_for_in_any_order() -> None:
    batches = TextBatches(TEXT, batch=4, length=10, seed=1)
    forward = [batches[i]["inputs"] for i in range(6)]
    again = TextBatches(TEXT, batch=4, length=10, seed=1)
    for i in (5, 0, 3):
        np.testing.assert_array_equal(again[i]["inputs"], forward[i])
    late = next(again.starting_at(3))
    np.testing.assert_array_equal(late["inputs"], forward[3])
    listed = itertools.islice(batches, 6)
    assert all(np.array_equal(a["inputs"], b) for a, b in zip(listed, forward, strict=True))


def test_another_seed_is_another_order() -> None:
    first = TextBatches(TEXT, batch=8, length=10, seed=1)[0]["inputs"]
    assert not np.array_equal(first, TextBatches(TEXT, batch=8, length=10, seed=2)[0]["inputs"])


def test_heldout_windows_come_in_order_and_the_last_batch_may_be_small() -> None:
    batches = list(heldout_batches(TEXT, batch=4, length=10, limit=9))
    assert [len(batch["inputs"]) for batch in batches] == [4, 4, 2]
    assert len(list(heldout_batches(TEXT, batch=4, length=10, limit=1))) == 1
    assert not list(heldout_batches(TEXT[:5], batch=4, length=10, limit=1))


@pytest.mark.parametrize(("size", "batch", "length"), [(0, 1, 1), (40, 4, 10), (9, 1, 10)])
def test_a_text_too_short_is_refused_with_the_numbers(size: int, batch: int, length: int) -> None:
    with pytest.raises(ValueError, match=rf"{size} bytes.*it takes {batch * length + 1}"):
        TextBatches(TEXT[:size], batch=batch, length=length, seed=0)
