"""`mpmd_jit`: run a train step as an MPMD pipeline.

The public door of this package.  A decorated function is traced and compiled when it is first called with arguments of
new shapes; after that a call only moves arrays and starts actors.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
from jax.sharding import PartitionSpec

from stagewright.nn.axes import AxisRules, default_axis_rules
from stagewright.nn.partition import Partition, Uniform
from stagewright.pipelining.arguments import Call, Results, Signature
from stagewright.pipelining.compile import Plan, compile_step
from stagewright.pipelining.layout import Layout
from stagewright.pipelining.mesh import MeshSpec, rank_meshes
from stagewright.pipelining.runtime.local import DEFAULT_TIMEOUT, LocalRuntime
from stagewright.pipelining.schedules import Schedule
from stagewright.pipelining.schedules.schedule import check_schedule
from stagewright.pipelining.specs import make_spec

Respec: TypeAlias = Callable[[Any, PartitionSpec, tuple[int, ...]], PartitionSpec]
"""From an argument's key path, spec and shape to the spec that it gets."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledFunction:
    """A step for arguments of one set of shapes.

    Attributes:
      plan: the compiler's plan: stages, order, program.
      runtime: what runs it.
      results: how flat results become the user's.
      compile_seconds: wall time of tracing and compiling, seconds.
    """

    plan: Plan
    runtime: LocalRuntime
    results: Results
    compile_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MpmdOptions:
    """How a function is pipelined: what `mpmd_jit` takes, and `respec`.

    Attributes:
      mesh, schedule, partition, timeout, post_validation, rules, axes: as `mpmd_jit`'s.
      donate_argnums, static_argnums, static_argnames: the same, always as tuples.
      respec: changes the spec of some arguments (ZeRO).
    """

    mesh: MeshSpec
    schedule: Schedule
    partition: Partition = field(default_factory=Uniform)
    donate_argnums: tuple[int, ...] = ()
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    timeout: float = DEFAULT_TIMEOUT
    post_validation: bool = False
    rules: AxisRules = field(default_factory=default_axis_rules)
    axes: Mapping[int, Any] = field(default_factory=dict)
    respec: Respec = lambda path, spec, shape: spec

    def __post_init__(self) -> None:
        _check_mesh(self.mesh, self.schedule)
        for name in ("donate_argnums", "static_argnums"):
            if any(number < 0 for number in getattr(self, name)):
                raise ValueError(
                    f"{name} counts arguments from 0, got {getattr(self, name)}; count from the front"
                )


class MpmdFunction:
    """A function that runs as a pipeline; made by `mpmd_jit`."""

    def __init__(self, function: Callable[..., Any], options: MpmdOptions) -> None:
        functools.update_wrapper(self, function)
        self._options = options
        self._signature = Signature(function, options.static_argnums, options.static_argnames)
        self._compiled: dict[Any, CompiledFunction] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step, compiling first if these shapes are new."""
        call, modules = self._signature.call(args, kwargs)
        compiled = self._find(call)
        return compiled.results.restore(compiled.runtime.step(call.leaves), modules)

    def compile(self, *args: Any, **kwargs: Any) -> CompiledFunction:
        """Compile for arguments like these (arrays, or `jax.ShapeDtypeStruct`s) without running anything."""
        call, _ = self._signature.call(args, kwargs)
        return self._find(call)

    def place(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The flat arguments where the compiled step reads them."""
        call, _ = self._signature.call(args, kwargs)
        return self._find(call).runtime.place(call.leaves)

    def _find(self, call: Call) -> CompiledFunction:
        if call.key not in self._compiled:
            self._compiled[call.key] = self._compile(call)
        return self._compiled[call.key]

    def _compile(self, call: Call) -> CompiledFunction:
        begin = time.perf_counter()
        options = self._options
        meshes = rank_meshes(options.mesh)
        donated = call.positions(options.donate_argnums)
        plan = compile_step(
            call.pure,
            [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in call.leaves],
            schedule=options.schedule,
            num_ranks=options.mesh.pipe,
            partition=options.partition,
            layout=self._layout(call),
            donated=donated,
            same_home=lambda: call.out.pairs,
            post_validation=options.post_validation,
        )
        runtime = LocalRuntime(plan.program, meshes, plan.specs, donated, options.timeout)
        return CompiledFunction(plan, runtime, call.out, time.perf_counter() - begin)

    def _layout(self, call: Call) -> Layout | None:
        """How the arguments are spread; None where a rank has one device."""
        mesh, rules = self._options.mesh, self._options.rules
        if mesh.data * mesh.tensor == 1:
            return None
        specs = []
        for argument in call.describe(self._options.axes):
            spec = make_spec(argument.name, argument.axes, argument.shape, rules, mesh)
            specs.append(self._options.respec(argument.path, spec, argument.shape))
        return Layout(mesh, rules, tuple(specs))


def mpmd_jit(
    function: Callable[..., Any] | None = None,
    *,
    mesh: MeshSpec,
    schedule: Schedule,
    partition: Partition | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    timeout: float = DEFAULT_TIMEOUT,
    post_validation: bool = False,
    rules: AxisRules | None = None,
    axes: Mapping[int, Any] | None = None,
) -> Any:
    """Compile a train step into one program for each pipeline rank, and run them side by side.

    The function calls `accumulate_grads` once; what it does with the gradients afterwards (clipping, optimizer, moving
    averages, metrics) runs where the gradients are.  Its arguments and results are pytrees of arrays; NNX modules and
    optimizers among the arguments are updated in place, as under `nnx.jit`.  New shapes, another number of
    micro-batches or other static arguments compile anew, everything else runs what is there.

    Args:
      function: the step.  Without it, a decorator is returned.
      mesh: the devices; `mesh.pipe` is the number of pipeline ranks.
      schedule: decides in which order the ranks run their tasks, and how many stages there are.
      partition: groups the segments between `pipeline_yield` marks when there are more of them than stages; evenly
        by default.
      donate_argnums: positions of arguments whose buffers the step may take over.
      static_argnums: positions of arguments that are settings.
      static_argnames: names of such arguments.
      timeout: seconds that a rank waits for another one before the step fails.
      post_validation: let each rank update its parameters as if gradients were finite and need no clipping, before
        the other ranks' share of the norm is there; where that was wrong, the exact update is made from the old
        state.  Same numbers; one more copy of the state while a step ends.
      rules: binds logical axis names to the mesh axes `data` and `tensor`, if `mesh` has these; by default
        `nn.default_axis_rules()`.  NNX Variables among the arguments, also those in an optimizer's state, are spread
        by their own names.
      axes: names for the dims of other arguments, by position: a tuple for every leaf of the argument (dims beyond it
        are whole), or a function from the argument to a pytree of tuples; `{1: (None, "batch")}` for a batch.

    Returns:
      A function with the same signature, which also has `compile(*args)`.

    Raises:
      ValueError: if the mesh is impossible, there are fewer marks than stages (both numbers are given), or an
        argument is neither array nor static.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import stagewright as sw
      >>> @sw.mpmd_jit(mesh=sw.MeshSpec(pipe=2), schedule=sw.OneFOneB())
      ... def step(w, batch):
      ...     def loss(w, x):
      ...         return jnp.sum(sw.pipeline_yield(w[0] * x) * w[1])
      ...     losses, grads = sw.accumulate_grads(lambda x: jax.value_and_grad(loss)(w, x), batch)
      ...     return losses, grads
      >>> losses, grads = step((jnp.float32(2.0), jnp.float32(3.0)), jnp.ones((4, 5)))
      >>> losses.tolist(), [float(g) for g in grads]
      ([30.0, 30.0, 30.0, 30.0], [60.0, 40.0])

    Reference:
      Xhebraj et al., arXiv 2412.14374, sections 3 and 4.
    """
    options = MpmdOptions(
        mesh=mesh,
        schedule=schedule,
        partition=partition or Uniform(),
        donate_argnums=_sequence(donate_argnums),
        static_argnums=_sequence(static_argnums),
        static_argnames=_sequence(static_argnames),
        timeout=timeout,
        post_validation=post_validation,
        rules=rules or default_axis_rules(),
        axes=axes or {},
    )

    def decorate(function: Callable[..., Any]) -> MpmdFunction:
        return MpmdFunction(function, options)

    return decorate if function is None else decorate(function)


def _sequence(given: Any) -> tuple[Any, ...]:
    """One number or name stands for itself, as under `jax.jit`."""
    return (given,) if isinstance(given, (int, str)) else tuple(given)


def _check_mesh(mesh: MeshSpec, schedule: Schedule) -> None:
    if not isinstance(mesh, MeshSpec):
        raise ValueError(f"mesh must be a MeshSpec such as MeshSpec(pipe=2), got {mesh!r}")
    check_schedule(schedule)
    num_stages = schedule.num_stages(mesh.pipe)
    if num_stages < mesh.pipe:
        raise ValueError(
            f"{schedule.name} has {num_stages} stages on {mesh.pipe} ranks, so it would leave ranks idle; use "
            f"mesh.pipe={num_stages} or a schedule with more stages"
        )
