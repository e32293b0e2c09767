"""A timeline with everything in it: as one measured in seconds, two ranks, one micro-batch."""

import pytest

from stagewright.pipelining.actions import parse_action
from stagewright.pipelining.timeline import OuterSpan, Span, Timeline, Transfer


@pytest.fixture
def measured() -> Timeline:
    times = [
        (0, "0F0", 0.001, 0.003),
        (1, "1F0", 0.004, 0.006),
        (1, "1B0", 0.006, 0.010),
        (0, "0B0", 0.011, 0.015),
    ]
    return Timeline(
        spans=tuple(Span(rank, parse_action(task), *span) for rank, task, *span in times),
        num_ranks=2,
        outer=(OuterSpan(1, "norm", 0.015, 0.016), OuterSpan(0, "update <all>", 0.018, 0.020)),
        transfers=(
            Transfer(0, 1, "0F0", 4096, 0.003, 0.004),
            Transfer(1, 0, "1B0", 4096, 0.010, 0.011),
            Transfer(1, 0, "norm", 4, 0.016, 0.017),
        ),
        memory=(((0.0, 100), (0.001, 5000), (0.015, 100)), ((0.0, 50), (0.004, 4000))),
        unit="s",
    )
