"""Planned against measured: does the simulator tell the step time of a real pipeline?

Two pipeline ranks on two single-threaded CPU devices train a GPT; for each schedule the simulator
gets the task costs measured in the same run and predicts the step. Steps of all schedules are
interleaved, so that what else the machine does hits all alike; medians are compared. A machine with
two idle cores is needed: beside other work a rank that waits for a core is taken for a slow task.

    python docs/experiments/planned_vs_measured.py [ROUNDS]

In the table, ``measured`` is from the first run's begin to the last one's end. ``error`` is that of
the prediction; ``replayed`` is the median error of simulating each step with the very time that each
of its tasks took, and so what the simulator itself does wrong: order, links, overheads. What is
in ``error`` and not there comes from taking one cost for all tasks of a kind. ``driver`` is what
the trainer's step takes beyond ``measured``: batches placed, metrics fetched, lines logged.
"""

import dataclasses
import os
import statistics
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false "
    "intra_op_parallelism_threads=1"
)

import numpy as np
import optax

import stagewright as sw
from stagewright.pipelining.bubbles import bubble_shares
from stagewright.pipelining.calibrate import measured_costs
from stagewright.pipelining.program import Program
from stagewright.pipelining.schedules import by_name
from stagewright.pipelining.simulate import ProgramCosts, simulate_program
from stagewright.pipelining.timeline import Timeline, simulate_order
from stagewright.recipes.gpt import GPT
from stagewright.recipes.gpt_config import GPTConfig

NAMES = ("gpipe", "1f1b", "interleaved:2", "zbh1")
MODEL = GPTConfig(vocab=1024, context=128, width=256, depth=8, heads=4)
MICROBATCHES = 8
COLUMNS = (
    "schedule",
    "predicted, ms",
    "measured, ms",
    "error",
    "replayed",
    "bubble: unit costs",
    "predicted",
    "measured",
    "driver, ms",
)


class Contestant:
    """A trainer under one schedule."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.trainer = sw.Trainer(
            model=lambda rngs: GPT(MODEL, rngs=rngs),
            optimizer=optax.adamw(1e-3),
            mesh=sw.MeshSpec(pipe=2),
            engine=sw.MpmdEngine(schedule=by_name(name), microbatches=MICROBATCHES),
        )
        self.timelines: list[Timeline] = []
        self.walls: list[float] = []

    def step(self, batch: dict, *, keep: bool) -> None:
        """Take one step; the first ones are not kept."""
        began = time.perf_counter()
        self.trainer.fit([batch], 1)
        wall = time.perf_counter() - began
        if keep:
            self.walls.append(wall)
            self.timelines.append(self.compiled.last_timeline)

    @property
    def compiled(self):
        """The trainer's only step."""
        (compiled,) = self.trainer._steps.values()
        return compiled

    def row(self) -> tuple[str, ...]:
        """A line of the table."""
        plan = self.compiled._latest.plan
        costs = measured_costs(self.timelines)
        predicted = simulate_program(plan.program, costs)
        measured = statistics.median(float(t.makespan) for t in self.timelines)
        shares = (
            float(simulate_order(plan.order).bubble_fraction),
            float(predicted.bubble_fraction),
            statistics.median(sum(bubble_shares(t).values()) for t in self.timelines),
        )
        return (
            self.name,
            f"{float(predicted.makespan) * 1e3:.0f}",
            f"{measured * 1e3:.0f}",
            f"{float(predicted.makespan) / measured - 1:+.1%}",
            f"{replay_error(plan.program, self.timelines, costs):+.1%}",
            *(f"{share:.1%}" for share in shares),
            f"{(statistics.median(self.walls) - measured) * 1e3:.0f}",
        )


def replay_error(program: Program, timelines: list[Timeline], costs: ProgramCosts) -> float:
    """Simulate each step with its own times; the links' are those of all steps."""
    errors = []
    for timeline in timelines:
        own = dataclasses.replace(
            measured_costs([timeline]),
            latency=costs.latency,
            bandwidth=costs.bandwidth,
            single={span.action: span.end - span.start for span in timeline.spans},
        )
        errors.append(float(simulate_program(program, own).makespan / timeline.makespan) - 1)
    return statistics.median(errors)


def main(rounds: int) -> None:
    """Run and print the table."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, MODEL.vocab, (4 * MICROBATCHES, MODEL.context + 1)).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    contestants = [Contestant(name) for name in NAMES]
    for number in range(rounds + 1):
        for contestant in contestants:
            contestant.step(batch, keep=number > 0)
    links = measured_costs([t for contestant in contestants for t in contestant.timelines])
    speed = "any" if links.bandwidth is None else f"{links.bandwidth / 1e9:.1f} GB/s"
    print(f"load {os.getloadavg()[0]:.1f}, {rounds} rounds, medians; a link: ", end="")
    print(f"latency {float(links.latency) * 1e6:.0f} us, bandwidth {speed}\n")
    print("| " + " | ".join(COLUMNS) + " |\n" + "|-" * len(COLUMNS) + "|")
    for contestant in contestants:
        print("| " + " | ".join(contestant.row()) + " |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
