"""What a run shows: the panel at its start, and one line for a step.

In: a `RunInfo`, and a step's values as Python numbers.  Out: Rich renderables and plain text.  Who
prints them, and when, is `loggers.ConsoleLogger`'s business.
"""

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stagewright.pipelining.bubbles import CAUSES
from stagewright.pipelining.engines.engine import StageRow
from stagewright.trainer.run_info import RunInfo


def startup_panel(info: RunInfo, *, framed: bool) -> RenderableType:
    """Draw mesh, engine, schedule, stages, planned bubble and compile time.

    Args:
      info: the run.
      framed: with a frame and colours, for a terminal; otherwise plain lines, for a pipe.
    """
    body = Group(Text(_facts(info)), _stage_table(info, framed=framed))
    return Panel(body, title="Stagewright", title_align="left", expand=False) if framed else body


def step_line(step: int, last_step: int, values: Mapping[str, float]) -> str:
    """One step in one line, such as `step 20/300  loss 2.6312  grad norm 0.81  12.3k tokens/s`.

    Args:
      step: number of the step, from 1.
      last_step: number of the run's last step.
      values: the step's values by name; those that are missing are left out.
    """
    width = len(str(last_step))
    parts = [f"step {step:>{width}}/{last_step}"]
    for name, form in _FORMS.items():
        if name in values:
            parts.append(form(values[name]))
    if "bubble" in values and "bubble_planned" in values:
        parts.append(_bubble(values))
    if values.get("skipped"):
        parts.append("skipped: no token")
    return "  ".join(parts)


def _bubble(values: Mapping[str, float]) -> str:
    """The bubble, the planned one, and the causes that make up a hundredth of the time or more."""
    shares = {cause: values.get(f"bubble_{cause}", 0.0) for cause in CAUSES}
    causes = [f"{cause} {share:.0%}" for cause, share in shares.items() if share >= 0.01]
    text = f"bubble {values['bubble']:.0%} (planned {values['bubble_planned']:.0%})"
    return f"{text}: {' '.join(causes)}" if causes else text


def short_count(number: float) -> str:
    """Write a count in few characters: 950, 12.3k, 4.5M, 1.2G."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


_FORMS = {
    "loss": lambda x: f"loss {x:.4f}",
    "grad_norm": lambda x: f"grad norm {x:.3f}",
    "learning_rate": lambda x: f"lr {x:.2e}",
    "tokens_per_second": lambda x: f"{short_count(x)} tokens/s",
    "step_seconds": lambda x: f"{x:.3f} s",
}


def _facts(info: RunInfo) -> str:
    mesh, summary = info.mesh, info.summary
    devices = f"{mesh.size} device{'s' if mesh.size > 1 else ''}"
    layers = f", {sum(info.layers_per_stage)} layers" if info.layers_per_stage else ""
    schedule = f", schedule {summary.schedule}" if summary.schedule else ""
    return "\n".join(
        (
            f"mesh      pipe={mesh.pipe} data={mesh.data} tensor={mesh.tensor}: {devices}",
            f"engine    {summary.engine}{schedule}, {summary.num_microbatches} micro-batches",
            f"model     {info.num_parameters:,} parameters{layers}",
            f"bubble    {summary.planned_bubble:.1%} planned",
            f"compiled  in {summary.compile_seconds:.1f} s",
            f"steps     {info.first_step} to {info.last_step}",
        )
    )


def _stage_table(info: RunInfo, *, framed: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold" if framed else "")
    for name in ("stage", "rank", "layers", "parameters"):
        table.add_column(name, justify="right")
    table.add_column("tasks (equations)")
    table.add_column("devices")
    layers = info.layers_per_stage or ("-",) * len(info.summary.stages)
    for index, row in enumerate(info.summary.stages):
        table.add_row(*_stage_cells(row, layers[index] if index < len(layers) else "-"))
    return table


def _stage_cells(row: StageRow, layers: int | str) -> tuple[str, ...]:
    tasks = " ".join(f"{kind} {count}" for kind, count in row.tasks)
    devices = ", ".join(row.devices)
    return str(row.stage), str(row.rank), str(layers), f"{row.parameters:,}", tasks, devices
