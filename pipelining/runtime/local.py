"""The local runtime: all ranks in one process, a thread each.

In: a plan's program and one mesh a rank.  Out: a `LocalRuntime`, whose `step` takes and gives flat arrays.  A step
is one message to each actor; the driver waits for all of them, with an ear for Ctrl-C and for failures, and puts the
results together.
"""

import queue
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from stagewright.pipelining.executables import Executable, compile_codes
from stagewright.pipelining.partitioned import compile_partitioned
from stagewright.pipelining.program import Program
from stagewright.pipelining.runtime.actor import Abort, Actor
from stagewright.pipelining.runtime.records import RunSpan, make_timeline
from stagewright.pipelining.runtime.transport import Aborted, Channel
from stagewright.pipelining.specs import sharding_on, spec_of, whole_on
from stagewright.pipelining.timeline import Timeline

DEFAULT_TIMEOUT = 1800.0  # seconds that a rank waits for another one's message
_STOP_SECONDS = 30.0  # how long actors may take to notice an abort
_POLL = 0.1


class LocalRuntime:
    """Runs a program on the devices of this process.

    Args:
      program: what to run.
      meshes: one a rank.
      specs: how each argument is spread over the devices of a rank.
      donated: arguments whose buffers the step may take.
      timeout: seconds after which a rank that waits for another one gives up.
    """

    def __init__(
        self,
        program: Program,
        meshes: Sequence[Mesh],
        specs: Sequence[PartitionSpec],
        donated: frozenset[int],
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self.program = program
        self.shardings = input_shardings(program, meshes, specs)
        self._meshes = tuple(meshes)
        self._donated = donated
        self._timeout = timeout
        self._result_homes = _homes(r.outputs for r in program.ranks)
        self._abort = Abort()
        self._lock = threading.Lock()  # two callers' steps take turns
        self._waiting = 0  # actors whose report of the latest step has not come yet
        self._done: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
        self._channels: dict[tuple[int, int], Channel] = {}
        self.executables = _compile(program, meshes, specs)
        self._actors = self._make_actors(self.executables)
        self._spans: tuple[RunSpan, ...] | None = None
        self._timeline: Timeline | None = None
        self._made: frozenset[int] = frozenset()
        weakref.finalize(self, _stop_all, self._actors)

    def _make_actors(self, executables: Sequence[Any]) -> list[Actor]:
        num_ranks = len(self.program.ranks)
        pairs = [(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b]
        blocking = self._meshes[0].devices.flat[0].platform == "cpu"
        self._channels = {
            (a, b): Channel(self._meshes[b], self._abort, self._timeout, blocking=blocking)
            for a, b in pairs
        }
        actors = []
        for rank, program in enumerate(self.program.ranks):
            constants = [
                (slot, jax.device_put(self.program.constants[i], whole_on(self._meshes[rank])))
                for i, slot in program.constants
            ]
            channels_in = {a: c for (a, b), c in self._channels.items() if b == rank}
            channels_out = {b: c for (a, b), c in self._channels.items() if a == rank}
            actors.append(
                Actor(
                    rank,
                    program,
                    executables,
                    constants,
                    channels_in,
                    channels_out,
                    self._done,
                    self._abort,
                    blocking=blocking,
                )
            )
        return actors

    def step(self, args: Sequence[Any]) -> list[Any]:
        """Run the program once.

        Raises:
          ActorError: if a rank failed: which one, at which instruction, stage and micro-batch.
        """
        with self._lock:
            return self._step(args)

    def _step(self, args: Sequence[Any]) -> list[Any]:
        self._settle()
        placed = self.place(args)
        for channel in self._channels.values():
            channel.start()
        self._waiting = len(self._actors)
        for rank, (actor, program) in enumerate(zip(self._actors, self.program.ranks, strict=True)):
            actor.start(
                [(slot, _copy_on(placed[i], self._meshes[rank])) for i, slot in program.inputs]
            )
        self._wait()
        results = self._collect(placed)
        self._made = frozenset(map(id, results))
        self._spans = self._timeline = None
        return results

    def place(self, args: Sequence[Any]) -> list[Any]:
        """The arguments where the program reads them; donated ones have a buffer of their own."""
        buffers = _Buffers(self._made)
        placed = []
        for i, arg in enumerate(args):
            sharding = self.shardings.get(i)
            if sharding is not None and not (
                isinstance(arg, jax.Array) and arg.sharding == sharding
            ):
                arg = jax.device_put(arg, sharding)
            if i in self._donated and isinstance(arg, jax.Array):
                arg = buffers.own(arg)
            placed.append(arg)
        return placed

    @property
    def spans(self) -> tuple[RunSpan, ...]:
        """The runs of the latest step, by rank, in order."""
        if self._spans is None:
            self._spans = tuple(
                RunSpan(rank, self.program.ranks[rank].instructions[position], begin, end)  # type: ignore[arg-type]
                for rank, actor in enumerate(self._actors)
                for position, begin, end in actor.spans
            )
        return self._spans

    @property
    def timeline(self) -> Timeline | None:
        """What the latest step did, in seconds: runs, transfers, and bytes held if they were counted; None before it.

        A transfer starts when its sender posts it. It ends when its receiver, who looks only when it needs the
        values, has them; on accelerators they may still be being copied then.
        """
        if self._timeline is None:
            messages = {pair: channel.messages() for pair, channel in self._channels.items()}
            held = [actor.held for actor in self._actors]
            self._timeline = make_timeline(self.program, self.spans, messages, held)
        return self._timeline

    @property
    def count_bytes(self) -> bool:
        """Whether ranks count the bytes that they hold; costs a look at every slot after every instruction."""
        return self._actors[0].count_bytes

    @count_bytes.setter
    def count_bytes(self, on: bool) -> None:
        for actor in self._actors:
            actor.count_bytes = on

    @property
    def live_bytes(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, the bytes held at the start of the latest step and after each instruction, if counted."""
        return tuple(tuple(size for _, size in actor.held) for actor in self._actors)

    def close(self) -> None:
        """End the actors' threads."""
        _stop_all(self._actors)

    def _wait(self) -> None:
        """Until all actors are done; the first failure, or Ctrl-C, ends all of them."""
        errors: list[BaseException] = []
        try:
            while self._waiting:
                self._hear(errors)
        except BaseException as interrupt:
            places = [f"rank {actor.rank} at {actor.where()}" for actor in self._actors]
            self._abort.raised = True
            self._drain()
            interrupt.add_note("the pipeline step was interrupted: " + "; ".join(places[:8]))
            raise
        if errors:
            self._reset()
            raise next((e for e in errors if not isinstance(e, Aborted)), errors[0])

    def _hear(self, errors: list[BaseException]) -> None:
        try:
            _, error = self._done.get(timeout=_POLL)
        except queue.Empty:
            return
        self._waiting -= 1
        if error is not None:
            errors.append(error)

    def _drain(self) -> None:
        """Let interrupted actors come to rest; the next step waits for one that is still in a computation."""
        deadline = time.monotonic() + _STOP_SECONDS
        while self._waiting and time.monotonic() < deadline:
            self._hear([])
        if not self._waiting:
            self._reset()

    def _settle(self) -> None:
        """See to it that nothing of an interrupted step is left."""
        if not (self._waiting or self._abort.raised):
            return
        self._drain()
        if self._waiting:
            busy = [f"rank {a.rank} at {a.where()}" for a in self._actors if a.where() != "idle"]
            raise RuntimeError(
                "the step before was interrupted, and its ranks have not come to rest: "
                f"{'; '.join(busy[:8])}; wait for them, or start anew"
            )
        self._reset()

    def _reset(self) -> None:
        for actor in self._actors:
            actor.forget()
        for channel in self._channels.values():
            channel.clear()
        self._abort.raised = False

    def _collect(self, placed: Sequence[Any]) -> list[Any]:
        by_rank = [actor.take_results() for actor in self._actors]
        results: list[Any] = [None] * len(self.program.structs)
        for i, ranks in self._result_homes.items():
            copies = [by_rank[rank][i] for rank in ranks]
            results[i] = copies[0] if len(copies) == 1 else self._join(ranks, copies)
        for i, argument in self.program.passed:
            results[i] = placed[argument]
        for i, value in self.program.literals:
            results[i] = jax.device_put(value)
        return results

    def _join(self, ranks: Sequence[int], copies: Sequence[Any]) -> Any:
        """One array of the copies on several ranks."""
        sharding = _sharding([self._meshes[rank] for rank in ranks], spec_of(copies[0].sharding))
        parts = [shard.data for copy in copies for shard in copy.addressable_shards]
        return jax.make_array_from_single_device_arrays(copies[0].shape, sharding, parts)


def _compile(
    program: Program, meshes: Sequence[Mesh], specs: Sequence[PartitionSpec]
) -> tuple[Executable, ...]:
    if all(mesh.size == 1 for mesh in meshes):
        return compile_codes(program.codes, [mesh.devices.flat[0] for mesh in meshes])
    return compile_partitioned(program, meshes, specs)


def input_shardings(
    program: Program, meshes: Sequence[Mesh], specs: Sequence[PartitionSpec]
) -> dict[int, Sharding]:
    """Where each argument lies: on one rank, or copied to several."""
    homes = _homes(rank.inputs for rank in program.ranks)
    return {i: _sharding([meshes[rank] for rank in ranks], specs[i]) for i, ranks in homes.items()}


def _homes(tables: Any) -> dict[int, list[int]]:
    homes: dict[int, list[int]] = {}
    for rank, table in enumerate(tables):
        for i, _ in table:
            homes.setdefault(i, []).append(rank)
    return homes


def _sharding(meshes: Sequence[Mesh], spec: PartitionSpec) -> Sharding:
    if len(meshes) == 1:
        return sharding_on(meshes[0], spec)
    grid = np.stack([mesh.devices for mesh in meshes])
    return NamedSharding(Mesh(grid, ("copies", "data", "tensor")), spec)


def _copy_on(array: Any, mesh: Mesh) -> Any:
    """The copy of an argument on one rank."""
    if len(array.sharding.device_set) == mesh.size:
        return array
    devices = set(mesh.devices.flat)
    parts = [shard.data for shard in array.addressable_shards if shard.device in devices]
    if mesh.size == 1:
        return parts[0]
    sharding = sharding_on(mesh, spec_of(array.sharding))
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


class _Buffers:
    """Sees to it that no two donated arguments share a buffer.

    Args:
      made: ids of the arrays that the latest step made: they share none, unless one is given twice.
    """

    def __init__(self, made: frozenset[int]) -> None:
        self._made = made
        self._ids: set[int] = set()
        self._pointers: set[int] = set()

    def own(self, array: jax.Array) -> jax.Array:
        """The array, or a copy if an earlier one has the same buffer."""
        again = id(array) in self._ids
        self._ids.add(id(array))
        if not again and id(array) not in self._made:
            pointers = _pointers(array)
            again = bool(pointers & self._pointers)
            self._pointers |= pointers
        return _copy(array) if again else array


def _pointers(array: jax.Array) -> set[int]:
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        array = jax.random.key_data(array)
    return (
        {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
        if array.size
        else set()
    )


def _copy(array: jax.Array) -> jax.Array:
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        data = _copy(jax.random.key_data(array))
        keys: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
        return keys
    copy: jax.Array = jax.device_put(np.array(array), array.sharding)
    return copy


def _stop_all(actors: Sequence[Actor]) -> None:
    for actor in actors:
        actor.stop()
