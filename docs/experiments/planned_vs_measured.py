"""Planned against measured: does the simulator tell the step time of a real pipeline?

Two pipeline ranks on two single-threaded CPU devices train a GPT; for each schedule the simulator
gets the task costs measured in the same run and predicts the step. Steps of all schedules are
interleaved, so that what else the machine does hits all alike; medians are compared.

    python docs/experiments/planned_vs_measured.py [ROUNDS]
"""

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
from stagewright.pipelining.schedules import by_name
from stagewright.pipelining.simulate import simulate_program
from stagewright.pipelining.timeline import simulate_order
from stagewright.recipes.gpt import GPT
from stagewright.recipes.gpt_config import GPTConfig

NAMES = ("gpipe", "1f1b", "interleaved:2", "zbh1")
MODEL = GPTConfig(vocab=1024, context=128, width=256, depth=8, heads=4)
MICROBATCHES = 8


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
        self.timelines = []
        self.walls = []

    def step(self, batch: dict, *, keep: bool) -> None:
        """Take one step; the first ones are not kept."""
        began = time.perf_counter()
        self.trainer.fit([batch], 1)
        wall = time.perf_counter() - began
        if keep:
            (compiled,) = self.trainer._steps.values()
            self.walls.append(wall)
            self.timelines.append(compiled.last_timeline)

    def row(self) -> tuple:
        """Name, predicted and measured step, error, bubbles."""
        (compiled,) = self.trainer._steps.values()
        plan = compiled._latest.plan
        predicted = simulate_program(plan.program, measured_costs(self.timelines))
        measured = statistics.median(float(t.makespan) for t in self.timelines)
        bubble = statistics.median(sum(bubble_shares(t).values()) for t in self.timelines)
        unit = float(simulate_order(plan.order).bubble_fraction)
        return (
            self.name,
            float(predicted.makespan),
            measured,
            float(predicted.makespan) / measured - 1,
            unit,
            float(predicted.bubble_fraction),
            bubble,
        )


def main(rounds: int) -> None:
    """Run and print the table."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, MODEL.vocab, (4 * MICROBATCHES, MODEL.context + 1)).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    contestants = [Contestant(name) for name in NAMES]
    for number in range(rounds + 1):
        for contestant in contestants:
            contestant.step(batch, keep=number > 0)
    print(f"load {os.getloadavg()[0]:.1f}, {rounds} rounds, medians")
    print(
        "| schedule | predicted, ms | measured, ms | error | bubble: unit costs | predicted | measured |"
    )
    print("|-|-|-|-|-|-|-|")
    for contestant in contestants:
        name, predicted, measured, error, unit, planned, bubble = contestant.row()
        print(
            f"| {name} | {predicted * 1e3:.0f} | {measured * 1e3:.0f} | {error:+.1%} | {unit:.1%} "
            f"| {planned:.1%} | {bubble:.1%} |"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
