"""Compile a program whose ranks have several devices each.

In: a program, a mesh for each rank, specs of the arguments.  Out: one executable for each code.  XLA's propagation
decides how results are spread, so the codes are compiled in the order in which they first run, each for the spread
that those before it have chosen.  Codes that lower to the same StableHLO are spread alike, whatever their rank: only
the first of them has to be waited for.
"""

import hashlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from stagewright.pipelining.errors import PipelineError
from stagewright.pipelining.executables import Executable, strongly_typed
from stagewright.pipelining.program import Code, Free, Instruction, Program, Recv, Run, Send
from stagewright.pipelining.specs import sharding_on, spec_of, trim

Specs = tuple[PartitionSpec, ...]


def compile_partitioned(
    program: Program, meshes: Sequence[Mesh], specs: Sequence[PartitionSpec]
) -> tuple[Executable, ...]:
    """Compile every code of the program for the devices of its rank.

    Args:
      program: what the ranks will run.
      meshes: one a rank.
      specs: one for each argument of the step.

    Raises:
      PipelineError: if a code would be run on values that are spread in two ways.
    """
    with ThreadPoolExecutor() as pool:
        return _Walk(program, meshes, specs, pool).executables()


class _Walk:
    """Runs the program on specs in place of arrays."""

    def __init__(
        self,
        program: Program,
        meshes: Sequence[Mesh],
        specs: Sequence[PartitionSpec],
        pool: ThreadPoolExecutor,
    ) -> None:
        self._program = program
        self._meshes = meshes
        self._pool = pool
        self._slots: list[dict[int, PartitionSpec]] = []
        for rank in program.ranks:
            slots = {slot: trim(specs[i]) for i, slot in rank.inputs}
            slots.update({slot: PartitionSpec() for _, slot in rank.constants})
            self._slots.append(slots)
        self._sent: dict[tuple[int, int], deque[Specs]] = {}
        self._read: dict[int, Specs] = {}
        self._made: dict[int, Specs] = {}
        self._known: dict[Any, Specs] = {}
        self._compiled: dict[int, Future[Any]] = {}

    def executables(self) -> tuple[Executable, ...]:
        walks = [iter(rank.instructions) for rank in self._program.ranks]
        heads: list[Instruction | None] = [next(walk, None) for walk in walks]
        while any(head is not None for head in heads):
            for rank, walk in enumerate(walks):
                while (head := heads[rank]) is not None and self._step(rank, head):
                    heads[rank] = next(walk, None)
        return tuple(self._compiled[i].result() for i in range(len(self._program.codes)))

    def _step(self, rank: int, instruction: Instruction) -> bool:
        """Do one instruction; False if it has to wait for another rank."""
        slots = self._slots[rank]
        match instruction:
            case Run(code, inputs, outputs, _, label):
                made = self._run(code, tuple(slots[slot] for slot in inputs), label)
                slots.update(zip(outputs, made, strict=True))
            case Send(sent, to, _):
                route = self._sent.setdefault((rank, to), deque())
                route.append(tuple(slots[slot] for slot in sent))
            case Recv(received, source, _):
                if not self._sent.get((source, rank)):
                    return False
                slots.update(zip(received, self._sent[source, rank].popleft(), strict=True))
            case Free():
                pass
        return True

    def _run(self, number: int, read: Specs, label: str) -> Specs:
        if number not in self._read:
            self._read[number] = read
            self._made[number] = self._compile(number, read)
        if self._read[number] != read:
            raise PipelineError(
                f"{label} is compiled for arguments spread as {self._read[number]}, but gets them as {read}"
            )
        return self._made[number]

    def _compile(self, number: int, read: Specs) -> Specs:
        code = self._program.codes[number]
        lowered = _lower(code, read, self._meshes[code.rank])
        key = (hashlib.sha256(lowered.as_text().encode()).hexdigest(), read, code.donate)
        future = self._compiled[number] = self._pool.submit(lowered.compile)
        if key not in self._known:
            self._known[key] = tuple(trim(spec_of(s)) for s in future.result().output_shardings)
        return self._known[key]


def _lower(code: Code, read: Specs, mesh: Mesh) -> Any:
    structs = [
        jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding_on(mesh, spec))
        for struct, spec in zip(code.inputs, read, strict=True)
    ]
    wanted = [None if spec is None else sharding_on(mesh, spec) for spec in code.out_specs]
    jitted = jax.jit(
        strongly_typed(code.function),
        donate_argnums=code.donate,
        out_shardings=wanted if any(s is not None for s in wanted) else None,
    )
    return jitted.lower(*structs)
