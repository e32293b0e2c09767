"""The adapter between the trial cases' neutral words and the project: schedules, and one pipelined gradient call."""

import jax
import pytest

from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.mpmd_jit import mpmd_jit
from stagewright.pipelining.schedules import ZBH1, GPipe, Interleaved1F1B, OneFOneB

SCHEDULES = {
    "gpipe": GPipe(),
    "1f1b": OneFOneB(),
    "interleaved": Interleaved1F1B(repeat=2),
    "zbh1": ZBH1(),
}


@pytest.fixture(params=SCHEDULES)
def schedule(request):
    """Each schedule of the field that exists."""
    return SCHEDULES[request.param]


@pytest.fixture
def ranks_for(schedule):
    """How many ranks give a number of stages under the schedule (None: it cannot)."""

    def ranks(num_stages):
        repeat = getattr(schedule, "repeat", 1)
        return num_stages // repeat if num_stages % repeat == 0 else None

    return ranks


def pipelined_grads(f, params, batch, *, schedule, ranks, ops=None, has_aux=False, in_axes=0):
    """`f(params, microbatch) -> loss | (loss, aux)` through a pipeline: the reduced (value, grads)."""

    @mpmd_jit(mesh=MeshSpec(pipe=ranks), schedule=schedule)
    def step(params, batch):
        return accumulate_grads(
            lambda mb: jax.value_and_grad(f, has_aux=has_aux)(params, mb),
            batch,
            ops,
            in_axes=in_axes,
        )

    return step(params, batch)


@pytest.fixture
def grads():
    """The adapter itself."""
    return pipelined_grads
