"""Batches of text: which bytes stand in which example of which step.

In: the bytes of a text.  Out: batches `{"inputs", "targets"}` of int32[batch, length], where
targets are the inputs shifted by one.  Batch number i is a function of (seed, i) and nothing else:
no position to keep or to lose, so that resuming at step i is asking for batch i.

Plain NumPy does this in microseconds, where importing Grain takes half a second; reading from many
files by worker processes is what Grain is for, and comes with the data sources that need it.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int32, UInt8

Batch = dict[str, Int32[np.ndarray, "batch length"]]


class TextBatches:
    """Endless shuffled batches of fixed-length windows of a text.

    The text is cut into windows that follow each other without overlap.  In each epoch every window
    comes once, in an order drawn anew from (seed, epoch); a batch may span two epochs.

    Example:
      >>> batches = TextBatches(np.arange(9, dtype=np.uint8), batch=2, length=4, seed=0)
      >>> sorted(batches[0]["inputs"].tolist())
      [[0, 1, 2, 3], [4, 5, 6, 7]]
    """

    def __init__(
        self, text: UInt8[np.ndarray, "bytes"], *, batch: int, length: int, seed: int
    ) -> None:
        """Set up.

        Args:
          text: the bytes.
          batch: examples a batch.
          length: tokens an example.
          seed: seed of the order.

        Raises:
          ValueError: if a size is not positive, or the text is too short for one batch.
        """
        if batch < 1 or length < 1:
            raise ValueError(f"batch and length must be at least 1, got {batch} and {length}")
        self._num_windows = max(0, (len(text) - 1) // length)
        if self._num_windows < batch:
            raise ValueError(
                f"the text has {len(text)} bytes, which is too short for a batch of {batch} "
                f"examples of {length} bytes: it takes {batch * length + 1}"
            )
        self._text, self._batch, self._length, self._seed = text, batch, length, seed
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def __getitem__(self, index: int) -> Batch:
        """Batch number `index`, from 0."""
        first = index * self._batch
        windows = [self._window(example) for example in range(first, first + self._batch)]
        starts = np.array(windows) * self._length
        tokens = self._text[starts[:, None] + np.arange(self._length + 1)].astype(np.int32)
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def __iter__(self) -> Iterator[Batch]:
        """All batches from number 0 on, without end."""
        return self.starting_at(0)

    def starting_at(self, index: int) -> Iterator[Batch]:
        """All batches from number `index` on, without end."""
        while True:
            yield self[index]
            index += 1

    def _window(self, example: int) -> int:
        epoch, place = divmod(example, self._num_windows)
        if epoch != self._order[0]:
            generator = np.random.Generator(np.random.Philox(key=[self._seed % 2**64, epoch]))
            self._order = (epoch, generator.permutation(self._num_windows))
        return int(self._order[1][place])


def heldout_batches(
    text: UInt8[np.ndarray, "bytes"], *, batch: int, length: int, limit: int
) -> Iterator[Batch]:
    """The windows of a held-out text in their order; the last batch may be smaller.

    Args:
      text: the bytes.
      batch: examples a batch, at most.
      length: tokens an example.
      limit: batches, at most.
    """
    num_windows = min(max(0, (len(text) - 1) // length), batch * limit)
    for first in range(0, num_windows, batch):
        starts = np.arange(first, min(first + batch, num_windows)) * length
        tokens = text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
        yield {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
