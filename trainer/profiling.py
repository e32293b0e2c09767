"""Pictures of real steps: what the pipeline planned, above what it did.

In: the timelines of a few steps, as the engine measured them.  Out: a folder with an interactive
page, an SVG and a trace for Perfetto.  The plan is simulated with the costs measured in the same
steps, so that the two pictures differ by what the runtime adds and not by a guess of costs.
"""

import os
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field

from stagewright.pipelining.engines.engine import CompiledStep
from stagewright.pipelining.pictures.html import to_html
from stagewright.pipelining.pictures.perfetto import to_perfetto
from stagewright.pipelining.pictures.svg import to_svg
from stagewright.pipelining.timeline import Timeline


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Which steps to draw, and where to.

    Attributes:
      first: first step, from 1.
      stop: the step before which to end.
      folder: where the pictures go; made when they are written.

    Raises:
      ValueError: if there is no step between the two.
    """

    first: int
    stop: int
    folder: str | os.PathLike[str]

    def __post_init__(self) -> None:
        if not 1 <= self.first < self.stop:
            raise ValueError(
                f"profiled steps are first:stop with 1 <= first < stop, got {self.first}:{self.stop}"
            )

    @classmethod
    def parse(cls, text: str, folder: str | os.PathLike[str]) -> "StepProfile":
        """Read "10:13": steps 10, 11 and 12.

        Raises:
          ValueError: if the text is something else.
        """
        first, colon, stop = text.partition(":")
        if not (colon and first.strip().isdecimal() and stop.strip().isdecimal()):
            raise ValueError(f"expected steps as 10:13 (10, 11 and 12), got {text!r}")
        return cls(int(first), int(stop), folder)


@dataclass(slots=True)
class StepProfiler:
    """Collects the steps of a profile, and draws them once the last is over."""

    profile: StepProfile
    say: Callable[[str], None] = print
    _measured: list[tuple[int, Timeline]] = field(default_factory=list)
    _compiled: CompiledStep | None = None

    def take(self, step: int, compiled: CompiledStep) -> None:
        """Look at a step that has been taken."""
        if not self.profile.first <= step < self.profile.stop:
            return
        timeline = compiled.last_timeline
        if timeline is not None:
            if compiled is not self._compiled:
                self._measured.clear()  # a batch of another shape: another program
            self._compiled = compiled
            self._measured.append((step, timeline))
        if step == self.profile.stop - 1:
            self.write()

    def write(self) -> None:
        """Draw what there is; says where, or why there is nothing."""
        if not self._measured or self._compiled is None:
            self.say("profile   nothing to draw: this engine does not measure its tasks")
            return
        planned = self._compiled.plan_timeline([timeline for _, timeline in self._measured])
        titled = [("planned, with the measured costs", planned)] if planned is not None else []
        titled += [(f"step {step}, measured", timeline) for step, timeline in self._measured]
        folder = pathlib.Path(self.profile.folder).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "timeline.html").write_text(to_html(titled), encoding="utf-8")
        (folder / "trace.json").write_text(to_perfetto(titled), encoding="utf-8")
        (title, above), *rest = titled
        svg = to_svg(above, title, below=rest[0] if rest else None)
        (folder / "timeline.svg").write_text(svg, encoding="utf-8")
        self.say(
            f"profile   {folder / 'timeline.html'} (also timeline.svg, trace.json for Perfetto)"
        )
        self._measured.clear()
