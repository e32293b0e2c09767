"""Ctrl-C during training: the first one ends the run after the current step, the second at once."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class InterruptGuard:
    """Within `with`, remembers a Ctrl-C instead of raising it in the middle of a step.

    A step consumes the state it works on, so only between steps is there a state to save.  Outside
    the main thread, where Python lets nobody handle signals, it does nothing.

    Attributes:
      requested: whether Ctrl-C came.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: Any = None

    def __enter__(self) -> "InterruptGuard":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del kind, error, traceback
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.requested:
            self._restore()
            raise KeyboardInterrupt
        self.requested = True
        os.write(2, b"\nending after this step; Ctrl-C again ends at once\n")  # safe in a handler

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None
