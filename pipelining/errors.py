"""The family of errors that the pipelining packages raise.

In comes what went wrong, out goes one exception type a caller can catch: ``PipelineError`` for all
of them, or the narrower type of the pass that refused. Mistakes in what the caller gave are
``ValueError`` too, so that code that knows nothing of pipelines still catches them. Not here:
broken invariants of our own, which are plain ``assert``.
"""


class PipelineError(Exception):
    """Base of every error that stagewright.pipelining raises on purpose."""


class StageError(PipelineError, ValueError):
    """The traced step cannot be cut into the stages that were asked for."""


class ScheduleError(PipelineError, ValueError):
    """An order of tasks is not legal: one is missing, misplaced, doubled, or waits for itself."""


class CommunicationError(PipelineError):
    """Sends and receives do not pair up, or would wait for each other for ever."""


class ActorError(PipelineError):
    """An actor failed while it ran a step: at which instruction, of which rank, for which task.

    All fields are positional arguments of the exception, so it survives pickling between processes.

    Args:
        rank: pipeline rank of the actor that failed.
        instruction: the instruction as its program prints it.
        stage: virtual stage of the task, if the instruction belongs to one.
        kind: task kind ("F", "B", "I" or "W"), if the instruction belongs to a task.
        microbatch: micro-batch of the task, if the instruction belongs to one.
        reason: what happened, in one line. Raise ``from`` the original exception as well.

    Example:
        >>> print(ActorError(1, "RUN 3F0", 3, "F", 0, "out of memory"))
        rank 1 failed at RUN 3F0 (stage 3, F, micro-batch 0): out of memory
    """

    def __init__(
        self,
        rank: int,
        instruction: str,
        stage: int | None = None,
        kind: str | None = None,
        microbatch: int | None = None,
        reason: str = "",
    ) -> None:
        Exception.__init__(self, rank, instruction, stage, kind, microbatch, reason)
        self.rank = rank
        self.instruction = instruction
        self.stage = stage
        self.kind = kind
        self.microbatch = microbatch
        self.reason = reason

    def __str__(self) -> str:
        named = (("stage ", self.stage), ("", self.kind), ("micro-batch ", self.microbatch))
        task = ", ".join(f"{label}{value}" for label, value in named if value is not None)
        where = f" ({task})" if task else ""
        reason = self.reason or "no reason given"
        return f"rank {self.rank} failed at {self.instruction}{where}: {reason}"
