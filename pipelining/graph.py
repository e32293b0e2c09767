"""The compiler's own program: a flat list of operations on named values.

A `Graph` is what every pass reads and writes.  It is smaller than a jaxpr on purpose: values are compared by identity,
an operation is either one of JAX's equations or a scan whose body is a graph again, and evaluating a graph under
`jax.jit` is the only way back to JAX.  Nothing here knows of stages.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from stagewright.pipelining import jax_seams


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One array of the traced program.  Two values are the same only if they are the same object."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        return self.size * int(getattr(self.dtype, "itemsize", 8))

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype in JAX's words."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """A constant that is written into the program: a scalar, or a small array of a nested jaxpr."""

    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the constant."""
        return tuple(np.shape(self.value))

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.size(self.value))


Atom: TypeAlias = Value | Literal


@dataclass(frozen=True, slots=True, eq=False)
class Apply:
    """Apply one of JAX's equations."""

    eqn: jax_seams.Equation

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return str(self.eqn.primitive.name)

    @property
    def source(self) -> str:
        """The user's source line."""
        return jax_seams.source_line(self.eqn)

    def run(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Evaluate on arrays or tracers."""
        return jax_seams.bind_equation(self.eqn, operands)


@dataclass(frozen=True, slots=True, eq=False)
class Scan:
    """Run a graph along the leading dim of some operands: consts, then carry, then scanned-over arrays."""

    body: "Graph"
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int
    source: str
    name: str = "scan"

    def run(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Evaluate on arrays or tracers."""
        consts = operands[: self.num_consts]
        split = self.num_consts + self.num_carry

        def step(carry: Any, xs: Any) -> tuple[Any, Any]:
            out = evaluate(self.body, [*consts, *carry, *xs])
            return tuple(out[: self.num_carry]), tuple(out[self.num_carry :])

        carry, ys = jax.lax.scan(
            step,
            tuple(operands[self.num_consts : split]),
            tuple(operands[split:]),
            length=self.length,
            reverse=self.reverse,
            unroll=self.unroll,
        )
        return (*carry, *ys)


Operator: TypeAlias = Apply | Scan


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One step of a graph: `outputs = operator(inputs)`."""

    operator: Operator
    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]

    @property
    def values_in(self) -> tuple[Value, ...]:
        """The inputs that are not literals."""
        return tuple(atom for atom in self.inputs if isinstance(atom, Value))

    @property
    def has_effects(self) -> bool:
        """Whether it does something beside making its outputs (`jax.debug.print`), so that it has to run once."""
        if isinstance(self.operator, Scan):
            return any(op.has_effects for op in self.operator.body.operations)
        return bool(self.operator.eqn.effects)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A function of arrays: operations in an order in which they can run."""

    inputs: tuple[Value, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Atom, ...]

    def __str__(self) -> str:
        """One line an operation, values numbered in order of appearance."""
        names: dict[Value, str] = {}

        def show(atom: Atom) -> str:
            if isinstance(atom, Literal):
                return str(atom.value)
            return names.setdefault(atom, f"v{len(names)}")

        lines = [f"in {' '.join(show(v) for v in self.inputs)}"]
        for op in self.operations:
            left = " ".join(
                f"{show(v)}:{np.dtype(v.dtype) if isinstance(v.dtype, np.dtype) else v.dtype}"
                f"{list(v.shape)}"
                for v in op.outputs
            )
            lines.append(f"{left} = {op.operator.name} {' '.join(show(a) for a in op.inputs)}")
        return "\n".join([*lines, f"out {' '.join(show(a) for a in self.outputs)}"])


def like(value: Value) -> Value:
    """A new value of the same shape and dtype."""
    return Value(value.shape, value.dtype)


def evaluate(graph: Graph, args: Sequence[Any]) -> list[Any]:
    """Run a graph on arrays or tracers; one result for each output."""
    env: dict[Value, Any] = dict(zip(graph.inputs, args, strict=True))

    def read(atom: Atom) -> Any:
        return atom.value if isinstance(atom, Literal) else env[atom]

    last_use = _last_uses(graph)
    for position, op in enumerate(graph.operations):
        results = op.operator.run([read(atom) for atom in op.inputs])
        env.update(zip(op.outputs, results, strict=True))
        for value in last_use.get(position, ()):
            del env[value]
    return [read(atom) for atom in graph.outputs]


def _last_uses(graph: Graph) -> Mapping[int, list[Value]]:
    last: dict[Value, int] = {}
    for position, op in enumerate(graph.operations):
        last.update(dict.fromkeys((*op.values_in, *op.outputs), position))
    for atom in graph.outputs:
        last.pop(atom, None)  # type: ignore[arg-type]
    by_position: dict[int, list[Value]] = {}
    for value, position in last.items():
        by_position.setdefault(position, []).append(value)
    return by_position


def prune(graph: Graph) -> Graph:
    """Drop the operations that no output needs and that have no effects."""
    read_by_effects = [v for op in graph.operations if op.has_effects for v in op.values_in]
    needed = set(ancestors(graph.operations, [*graph.outputs, *read_by_effects]))
    operations = tuple(op for op in graph.operations if op in needed or op.has_effects)
    return Graph(graph.inputs, operations, graph.outputs)


def ancestors(operations: Sequence[Operation], wanted: Iterable[Atom]) -> tuple[Operation, ...]:
    """The operations, in their order, that `wanted` needs."""
    needed = {atom for atom in wanted if isinstance(atom, Value)}
    kept: list[Operation] = []
    for op in reversed(operations):
        if any(value in needed for value in op.outputs):
            kept.append(op)
            needed.update(op.values_in)
    return tuple(reversed(kept))


def free_values(operations: Sequence[Operation], outputs: Iterable[Atom] = ()) -> tuple[Value, ...]:
    """Values that are read but not made by `operations`, in order of first use."""
    made: set[Value] = set()
    free: dict[Value, None] = {}
    for op in operations:
        free.update((v, None) for v in op.values_in if v not in made)
        made.update(op.outputs)
    free.update((a, None) for a in outputs if isinstance(a, Value) and a not in made)
    return tuple(free)


def sort_operations(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """The operations with each behind those that make what it reads; otherwise in their order."""
    maker = {value: op for op in operations for value in op.outputs}
    done: dict[Operation, None] = {}
    for root in operations:
        stack = [root]
        while stack:
            op = stack[-1]
            missing = [maker[v] for v in op.values_in if v in maker and maker[v] not in done]
            if missing:
                stack.extend(reversed(missing))
            else:
                done.setdefault(stack.pop())
    return tuple(done)


def substitute(op: Operation, replacement: Mapping[Value, Atom]) -> Operation:
    """The operation with some of its inputs replaced."""
    if not any(value in replacement for value in op.values_in):
        return op
    return Operation(op.operator, tuple(resolve(a, replacement) for a in op.inputs), op.outputs)


def resolve(atom: Atom, replacement: Mapping[Value, Atom]) -> Atom:
    """Follow the replacements of an atom to their end."""
    while isinstance(atom, Value) and atom in replacement:
        atom = replacement[atom]
    return atom


def clone(op: Operation, replacement: Mapping[Value, Atom]) -> tuple[Operation, dict[Value, Atom]]:
    """A copy of the operation with fresh outputs; also which new output stands for which old one."""
    outputs = tuple(like(value) for value in op.outputs)
    copy = Operation(op.operator, tuple(resolve(a, replacement) for a in op.inputs), outputs)
    return copy, dict(zip(op.outputs, outputs, strict=True))


def inline(graph: Graph, args: Sequence[Atom]) -> tuple[list[Operation], list[Atom]]:
    """The operations of a graph applied to `args`, with fresh values, and its outputs."""
    replacement: dict[Value, Atom] = dict(zip(graph.inputs, args, strict=True))
    operations = []
    for op in graph.operations:
        copy, new = clone(op, replacement)
        replacement.update(new)
        operations.append(copy)
    return operations, [resolve(atom, replacement) for atom in graph.outputs]
