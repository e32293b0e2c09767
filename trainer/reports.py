"""From a step's arrays to the numbers that loggers get, one step late.

In: each step's metrics, as arrays that may not be computed yet.  Out: Python numbers, with times
and rates added, once the next step is under way; so nobody waits for a step but the next report.
"""

import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from stagewright.pipelining.bubbles import bubble_shares
from stagewright.pipelining.engines.engine import CompiledStep
from stagewright.pipelining.timeline import Timeline


class StepReporter:
    """Holds the latest step's metrics back until the next step has begun.

    Attributes:
      losses: loss of each reported step, in order.
      latest: the values of the latest reported step.
    """

    def __init__(self, log: Callable[[int, Mapping[str, float]], None]) -> None:
        """Set up; the first step's time counts from here.

        Args:
          log: takes the number of a step and its values.
        """
        self.losses: list[float] = []
        self.latest: dict[str, float] = {}
        self._log = log
        self._pending: _Pending | None = None
        self._warned = False
        self._ended = time.perf_counter()

    def submit(self, step: int, metrics: Mapping[str, Any], compiled: CompiledStep) -> None:
        """Take a step that has begun; report the one before it."""
        self.flush()
        # An engine that waits for its step leaves nothing to wait for: the step has ended.
        ended = time.perf_counter() if _are_ready(metrics) else None
        timeline = compiled.last_timeline if ended is not None else None
        self._pending = _Pending(step, metrics, compiled, ended, timeline)

    def flush(self) -> None:
        """Report the step that is held back, if any, waiting for it to end."""
        if (held := self._pending) is None:
            return
        self._pending = None
        values = to_numbers(held.metrics)
        values.update(self._rates(values, held))
        self._watch(held.step, values["loss"])
        self.losses.append(values["loss"])
        self.latest = values
        self._log(held.step, values)

    def _watch(self, step: int, loss: float) -> None:
        """Warn of the first loss that is no number: what follows cannot be trusted."""
        if math.isfinite(loss) or self._warned:
            return
        self._warned = True
        before = f"; the last good one was {self.losses[-1]:.4g}" if self.losses else ""
        message = (
            f"the loss of step {step} is {loss}{before}. Parameters from here on are not to be "
            "trusted: stop with Ctrl-C, and look at the data, the learning rate or the clipping"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=2)

    def restart_clock(self) -> None:
        """Leave the time up to now out of the next step's: something else than a step took it."""
        self._ended = time.perf_counter()

    def _rates(self, values: Mapping[str, float], held: "_Pending") -> dict[str, float]:
        ended = time.perf_counter() if held.ended is None else held.ended
        seconds, self._ended = ended - self._ended, ended
        rates = {"step_seconds": seconds, "tokens_per_second": values["tokens"] / seconds}
        rates["bubble_planned"] = held.compiled.summary.planned_bubble
        timeline = held.timeline or held.compiled.last_timeline
        if timeline is not None:
            shares = bubble_shares(timeline)
            rates["bubble"] = sum(shares.values())
            rates.update({f"bubble_{cause}": share for cause, share in shares.items()})
        return rates


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step that is not reported yet; `ended` and `timeline` are set if it had ended at once."""

    step: int
    metrics: Mapping[str, Any]
    compiled: CompiledStep
    ended: float | None
    timeline: Timeline | None


def _are_ready(metrics: Mapping[str, Any]) -> bool:
    arrays: list[Any] = [value for value in metrics.values() if isinstance(value, jax.Array)]
    return all(array.is_ready() for array in arrays)


def to_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Fetch scalars as Python numbers: integers as `int`, all else as `float`.

    Raises:
      ValueError: if a value is not a scalar; it is named.
    """
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        array = np.asarray(value)
        if array.shape != ():
            raise ValueError(f"the metric {name!r} must be a scalar, got shape {array.shape}")
        whole = array.dtype == np.bool_ or np.issubdtype(array.dtype, np.integer)
        numbers[name] = int(array) if whole else float(array)
    return numbers
