"""One rank at work: a thread that walks its instructions, step after step.

Everything that can be known before the first step is resolved when the actor is made: which executable, which slots,
which channels, which receives a run has to wait for.  In the loop there are only lists and calls.

A `Recv` only says that something will come; the actor waits where the first instruction reads it, so a late receive
never keeps earlier work waiting.  On CPU an actor waits for each run to finish, so that it computes one thing at a
time as a device does, and knows how long each took; elsewhere the device's own queue does that.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from stagewright.pipelining.errors import ActorError
from stagewright.pipelining.executables import Executable
from stagewright.pipelining.program import Free, Instruction, RankProgram, Recv, Run, Send
from stagewright.pipelining.runtime.transport import Aborted, Channel

Slots: TypeAlias = list[Any]
Step: TypeAlias = Callable[[Slots], None]


class Abort:
    """A flag that all actors of a step share."""

    def __init__(self) -> None:
        self.raised = False

    def __call__(self) -> bool:
        """Whether the step was aborted."""
        return self.raised


class Actor:
    """A rank's thread.

    Args:
      rank: which one.
      program: what it does.
      executables: by code number.
      constants: its constant arrays, by slot.
      channels_in: by source rank.
      channels_out: by destination rank.
      done: where it reports (rank, error or None) after each step.
      abort: the flag that stops all actors.
      blocking: wait for each run to finish.
    """

    def __init__(
        self,
        rank: int,
        program: RankProgram,
        executables: Sequence[Executable],
        constants: Sequence[tuple[int, Any]],
        channels_in: dict[int, Channel],
        channels_out: dict[int, Channel],
        done: "queue.SimpleQueue[tuple[int, BaseException | None]]",
        abort: Abort,
        *,
        blocking: bool,
    ) -> None:
        self.rank = rank
        self.spans: list[tuple[int, float, float]] = []
        self.current = 0
        self.count_bytes = False
        self.held: list[tuple[float, int]] = []
        self._program = program
        self._executables = executables
        self._in = channels_in
        self._out = channels_out
        self._done = done
        self._abort = abort
        self._blocking = blocking
        self.slots: Slots = [None] * program.num_slots
        for slot, array in constants:
            self.slots[slot] = array
        self._kept = {slot for slot, _ in constants}
        self._posted: list[tuple[int, tuple[int, ...]]] = []
        self._steps: list[Step] = [
            self._resolve(i, ins) for i, ins in enumerate(program.instructions)
        ]
        rest = self._receives([slot for _, slots in self._posted for slot in slots], "results")
        self._steps += [rest] if rest else []
        self._inbox: queue.SimpleQueue[Sequence[tuple[int, Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._serve, name=f"stagewright-rank-{rank}", daemon=True
        )
        self._thread.start()

    # ---- called by the driver ----

    def start(self, inputs: Sequence[tuple[int, Any]]) -> None:
        """Begin a step with these (slot, array) inputs."""
        self._inbox.put(inputs)

    def stop(self) -> None:
        """End the thread."""
        self._inbox.put(None)

    def where(self) -> str:
        """What the actor is doing, for messages."""
        instructions = self._program.instructions
        if self.current >= len(instructions):
            return "idle"
        return _short(instructions[self.current])

    def forget(self) -> None:
        """Empty all slots but the constants; the actor must be at rest."""
        self._clear()

    def take_results(self) -> dict[int, Any]:
        """The step's results by index; all slots but the constants are empty afterwards."""
        results = {index: self.slots[slot] for index, slot in self._program.outputs}
        self._clear()
        return results

    # ---- the thread ----

    def _serve(self) -> None:
        while (inputs := self._inbox.get()) is not None:
            error: BaseException | None = None
            try:
                self._walk(inputs)
            except Aborted as aborted:
                error = aborted
            except BaseException as failure:
                self._abort.raised = True
                error = self._explain(failure)
            if error is not None:
                self._clear()
            del inputs
            self._done.put((self.rank, error))

    def _walk(self, inputs: Sequence[tuple[int, Any]]) -> None:
        slots, abort = self.slots, self._abort
        self.spans = []
        for slot, array in inputs:
            slots[slot] = array
        self.held = []
        if self.count_bytes:
            self._count()
        for position, step in enumerate(self._steps):
            self.current = position
            if abort.raised:
                raise Aborted
            step(slots)
            if self.count_bytes:
                self._count()
        self.current = len(self._steps)

    def _count(self) -> None:
        """Note the bytes of the arrays that the slots hold; one over several devices counts once, whole."""
        arrays = (array for array in self.slots if array is not None and not array.is_deleted())
        self.held.append((time.perf_counter(), sum(int(array.nbytes) for array in arrays)))

    def _clear(self) -> None:
        for slot in range(len(self.slots)):
            if slot not in self._kept:
                self.slots[slot] = None

    def _explain(self, failure: BaseException) -> ActorError:
        instructions = self._program.instructions
        instruction = instructions[min(self.current, len(instructions) - 1)]
        action = instruction.action if isinstance(instruction, Run) else None
        reason = f"{type(failure).__name__}: {_digest(str(failure))}"
        stage, kind, microbatch = (
            (action.stage, action.kind.value, action.microbatch) if action else (None, None, None)
        )
        error = ActorError(self.rank, _short(instruction), stage, kind, microbatch, reason)
        error.__cause__ = failure
        return error

    # ---- instructions, resolved ----

    def _resolve(self, position: int, instruction: Instruction) -> Step:
        return _RESOLVERS[type(instruction)](self, position, instruction)

    def _resolve_run(self, position: int, run: Run) -> Step:
        executable, inputs, outputs = self._executables[run.code], run.inputs, run.outputs
        receive = self._receives(inputs, run.label)
        block, spans = self._blocking, time.perf_counter

        def step(slots: Slots) -> None:
            if receive is not None:
                receive(slots)
            begin = spans()
            results = executable(*[slots[i] for i in inputs])
            if block:
                jax.block_until_ready(results)
            self.spans.append((position, begin, spans()))
            for slot, array in zip(outputs, results, strict=True):
                slots[slot] = array

        return step

    def _resolve_send(self, position: int, send: Send) -> Step:
        del position
        channel, sent = self._out[send.to], send.slots
        receive = self._receives(sent, send.tag)

        def step(slots: Slots) -> None:
            if receive is not None:
                receive(slots)
            channel.send([slots[i] for i in sent])

        return step

    def _resolve_recv(self, position: int, recv: Recv) -> Step:
        del position
        self._posted.append((recv.source, recv.slots))
        return _nothing

    def _resolve_free(self, position: int, free: Free) -> Step:
        del position
        freed = free.slots
        receive = self._receives(freed, "unread values")

        def step(slots: Slots) -> None:
            if receive is not None:
                receive(slots)
            for slot in freed:
                slots[slot] = None

        return step

    def _receives(self, read: Sequence[int], what: str) -> Step | None:
        """The posted receives to wait for before `read` is read: each channel's, up to the last that matters."""
        wanted = set(read)
        last = {
            source: i
            for i, (source, slots) in enumerate(self._posted)
            if wanted.intersection(slots)
        }
        if not last:
            return None
        due = [(s, slots) for i, (s, slots) in enumerate(self._posted) if i <= last.get(s, -1)]
        self._posted = [
            (s, slots) for i, (s, slots) in enumerate(self._posted) if i > last.get(s, -1)
        ]
        pulls = [(self._in[source], source, slots) for source, slots in due]

        def receive(slots: Slots) -> None:
            for channel, source, targets in pulls:
                try:
                    arrays = channel.receive()
                except TimeoutError as error:
                    raise TimeoutError(
                        f"waiting for {what}, to be sent by rank {source}: {error}"
                    ) from None
                for slot, array in zip(targets, arrays, strict=True):
                    slots[slot] = array

        return receive


_RESOLVERS: dict[type, Callable[[Actor, int, Any], Step]] = {
    Run: Actor._resolve_run,
    Send: Actor._resolve_send,
    Recv: Actor._resolve_recv,
    Free: Actor._resolve_free,
}


def _nothing(slots: Slots) -> None:
    del slots


def _short(instruction: Instruction) -> str:
    text = str(instruction)
    return text if len(text) <= 80 else text[:77] + "..."


def _digest(text: str) -> str:
    """The beginning and the end of a long message: XLA puts a callback's traceback between them."""
    lines = [line[:300] for line in text.strip().splitlines()]
    return "\n".join(lines if len(lines) <= 6 else [*lines[:2], "  ...", *lines[-3:]])
