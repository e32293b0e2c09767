"""The program of a step: one list of instructions for each rank.

This is what the checker proves, the simulator times and the runtime runs.  An instruction names slots, numbered per
rank; a slot holds one array.  `str(program)` prints what a person can read; nothing in it depends on JAX but the
functions of its `Code`s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax.sharding import PartitionSpec

from stagewright.pipelining.actions import Action


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """One function that will be compiled for one rank.

    Attributes:
      name: what messages call it.
      rank: the rank that runs it.
      function: flat arrays to flat arrays; pure.
      inputs: shapes and dtypes of the arguments.
      outputs: shapes and dtypes of the results.
      donate: positions of arguments whose buffers the results may take.
      num_operations: operations of the task, for the stage table.
      out_specs: how results are to be spread over the rank's devices, None where XLA may choose; empty for all None.
    """

    name: str
    rank: int
    function: Callable[..., Sequence[Any]]
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    donate: tuple[int, ...] = ()
    num_operations: int = 0
    out_specs: tuple[PartitionSpec | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """Run code number `code` on `inputs`; the slots at the code's donated positions are empty afterwards.

    `action` is the task of the schedule, or None for what runs before and after the loop (then `label` names it).
    """

    code: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    action: Action | None
    label: str

    def __str__(self) -> str:
        return f"RUN {self.label} {_slots(self.inputs)} -> {_slots(self.outputs)}"


@dataclass(frozen=True, slots=True)
class Send:
    """Send the arrays in `slots` to rank `to`.  The slots keep them until they are freed."""

    slots: tuple[int, ...]
    to: int
    tag: str

    def __str__(self) -> str:
        return f"SEND {self.tag} {_slots(self.slots)} to {self.to}"


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive into `slots` what rank `source` sends with the matching `Send`, in order."""

    slots: tuple[int, ...]
    source: int
    tag: str

    def __str__(self) -> str:
        return f"RECV {self.tag} {_slots(self.slots)} from {self.source}"


@dataclass(frozen=True, slots=True)
class Free:
    """Empty the slots."""

    slots: tuple[int, ...]

    def __str__(self) -> str:
        return f"FREE {_slots(self.slots)}"


Instruction: TypeAlias = Run | Send | Recv | Free


@dataclass(frozen=True, slots=True, eq=False)
class RankProgram:
    """What one rank does in a step.

    Attributes:
      instructions: in order.
      num_slots: how many slots it uses.
      inputs: (argument index, slot): where the step's arguments are put.
      constants: (constant index, slot): arrays that stay from step to step.
      outputs: (result index, slot): where the step's results are found.
      donated: slots of arguments that the caller gave away.
    """

    instructions: tuple[Instruction, ...]
    num_slots: int
    inputs: tuple[tuple[int, int], ...]
    constants: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]
    donated: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A step.

    Attributes:
      ranks: one program a rank.
      codes: the functions that they run.
      arguments: shape and dtype of each argument.
      constants: arrays that the step closes over (and micro-batch indices), by constant index.
      passed: results that are arguments unchanged, as (result index, argument index).
      literals: results that are constants, as (result index, value).
      structs: shape and dtype of each result.
    """

    ranks: tuple[RankProgram, ...]
    codes: tuple[Code, ...]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    constants: tuple[Any, ...]
    passed: tuple[tuple[int, int], ...]
    literals: tuple[tuple[int, Any], ...]
    structs: tuple[jax.ShapeDtypeStruct, ...]

    def __str__(self) -> str:
        lines = []
        for rank, program in enumerate(self.ranks):
            lines.append(f"rank {rank}:")
            lines += [f"  {instruction}" for instruction in program.instructions]
        return "\n".join(lines)


def _slots(slots: Sequence[int]) -> str:
    return "[" + " ".join(map(str, slots)) + "]"
