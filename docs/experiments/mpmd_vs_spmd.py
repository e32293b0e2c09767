"""MPMD against the SPMD pipeline and one device: the same model, batch and optimizer, steps interleaved, medians.

Two pipeline ranks on two CPU devices.  The program of one device may use both cores, whatever the flags
say: compare pipelines with pipelines.

    python docs/experiments/mpmd_vs_spmd.py [ROUNDS]
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
from stagewright.recipes.gpt import GPT
from stagewright.recipes.gpt_config import GPTConfig

MODEL = GPTConfig(vocab=1024, context=128, width=256, depth=8, heads=4)
M = 8
PIPE = sw.MeshSpec(pipe=2)
CONTESTANTS = {
    "one device, no remat": (sw.MeshSpec(), sw.SingleProgramEngine(M), "none"),
    "one device, remat": (sw.MeshSpec(), sw.SingleProgramEngine(M), "full"),
    "SPMD pipeline, no remat": (PIPE, sw.SpmdEngine(microbatches=M), "none"),
    "SPMD pipeline, remat": (PIPE, sw.SpmdEngine(microbatches=M), "full"),
    "SPMD pipeline, 2 repeats, remat": (PIPE, sw.SpmdEngine(repeat=2, microbatches=M), "full"),
    "MPMD 1F1B": (PIPE, sw.MpmdEngine(sw.OneFOneB(), M), "none"),
    "MPMD ZB-H1": (PIPE, sw.MpmdEngine(sw.ZBH1(), M), "none"),
    "MPMD ZBV": (PIPE, sw.MpmdEngine(sw.ZBV(), M), "none"),
}


def main(rounds: int) -> None:
    """Run and print the table."""
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab, (4 * M, 129)).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    trainers, times = {}, {name: [] for name in CONTESTANTS}
    for name, (mesh, engine, remat) in CONTESTANTS.items():
        config = dataclasses.replace(MODEL, remat=remat)
        trainers[name] = sw.Trainer(
            model=lambda rngs, config=config: GPT(config, rngs=rngs),
            optimizer=optax.adamw(1e-3),
            mesh=mesh,
            engine=engine,
        )
    for number in range(rounds + 1):
        for name, trainer in trainers.items():
            began = time.perf_counter()
            loss = trainer.fit([batch], 1).losses[0]
            if number:
                times[name].append(time.perf_counter() - began)
            elif name:
                print(f"{name}: first loss {loss:.5f}", flush=True)
    best = min(statistics.median(t) for n, t in times.items() if n.startswith("one device"))
    print(f"load {os.getloadavg()[0]:.1f}, {rounds} rounds, medians")
    print("| contestant | step, ms | against the best on one device |\n|-|-|-|")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"| {name} | {median * 1e3:.0f} | {best / median:.2f} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
