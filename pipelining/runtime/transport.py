"""Move arrays between the devices of one process.

A `Channel` is one direction between two ranks: first in, first out.  An array arrives spread over the receiver's
devices as it was over the sender's.  `send` starts the copies (`jax.device_put`, all arrays of a task in one call) and
never waits for them; `receive` waits for the sender's call, up to a time-out, and stops at once when the step is
aborted.  A channel notes when each message was posted and had (see records.py).
"""

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from stagewright.pipelining.runtime.records import Message
from stagewright.pipelining.specs import sharding_on, spec_of, whole_on

_POLL = 0.05  # seconds between two looks at the abort flag


class Aborted(Exception):  # noqa: N818 - it is no error of the rank that raises it
    """Another rank failed, or the user interrupted: stop without an error of one's own."""


class Channel:
    """One direction between two ranks.

    Args:
      mesh: the receiver's devices.
      aborted: tells whether the step was aborted.
      timeout: seconds after which a receive gives up.
      blocking: receive arrays that are there, instead of perhaps still being copied.
    """

    def __init__(
        self, mesh: Mesh, aborted: Callable[[], bool], timeout: float, *, blocking: bool = False
    ) -> None:
        self._mesh = mesh
        self._whole = whole_on(mesh)
        self._aborted = aborted
        self._timeout = timeout
        self._blocking = blocking
        self._posted: list[float] = []
        self._had: list[float] = []
        self._sizes: list[int] = []
        self._queue: queue.SimpleQueue[Sequence[jax.Array]] = queue.SimpleQueue()

    def send(self, arrays: Sequence[jax.Array]) -> None:
        """Start copying `arrays` to the receiver."""
        self._posted.append(time.perf_counter())
        if len(self._sizes) < len(self._posted):  # the same in every step: looked at in the first
            self._sizes.append(sum(int(array.nbytes) for array in arrays))
        self._queue.put(jax.device_put(list(arrays), self._places(arrays)))

    def _places(self, arrays: Sequence[jax.Array]) -> Any:
        if self._mesh.size == 1:
            return self._whole
        return [sharding_on(self._mesh, spec_of(array.sharding)) for array in arrays]

    def receive(self) -> Sequence[jax.Array]:
        """The arrays of the next `send`, perhaps still being copied if the channel does not block.

        Raises:
          TimeoutError: if nothing came in time.
          Aborted: if the step was aborted meanwhile.
        """
        try:
            arrays = self._queue.get_nowait()
        except queue.Empty:
            arrays = self._wait()
        if self._blocking:
            jax.block_until_ready(arrays)
        self._had.append(time.perf_counter())
        return arrays

    def _wait(self) -> Sequence[jax.Array]:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return self._queue.get(timeout=_POLL)
            except queue.Empty:
                if self._aborted():
                    raise Aborted from None
                if time.monotonic() > deadline:
                    raise TimeoutError(f"nothing came for {self._timeout:.0f} s") from None

    def messages(self) -> tuple[Message, ...]:
        """The messages had in the latest step, in order."""
        return tuple(map(Message, self._posted, self._sizes, self._had))

    def start(self) -> None:
        """Begin a step: forget the messages of the one before."""
        self._posted.clear()
        self._had.clear()

    def clear(self) -> None:
        """Forget what an aborted step left."""
        while True:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                return
