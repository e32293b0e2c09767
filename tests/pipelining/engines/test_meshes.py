"""Replicas and tensor-parallel devices change no number, and bring only the collectives that Megatron's split needs."""

import functools
import re

import jax
import numpy as np
import optax
import pytest

import stagewright as sw
from stagewright.pipelining.program import Run
from stagewright.recipes.gpt import GPT
from stagewright.recipes.gpt_config import GPTConfig

CONFIG = GPTConfig(vocab=256, context=16, width=32, depth=4, heads=4)
MICROBATCHES, STEPS = 2, 2
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5, momentum=0.9))
SLOW = pytest.mark.slow
MESHES = [
    pytest.param(1, 2, 1, marks=SLOW),
    pytest.param(2, 2, 1, marks=SLOW),
    pytest.param(2, 1, 2, marks=SLOW),
    (2, 2, 2),
    pytest.param(4, 1, 2, marks=SLOW),
    pytest.param(4, 2, 1, marks=SLOW),
]
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, CONFIG.vocab, (STEPS, 16, CONFIG.context + 1)).astype(np.int32)
DATA = [{"inputs": t[:, :-1], "targets": t[:, 1:]} for t in TOKENS]


def make(mesh, engine):
    return sw.Trainer(
        model=lambda rngs: GPT(CONFIG, rngs=rngs), optimizer=OPTIMIZER, mesh=mesh, engine=engine
    )


@functools.cache
def one_device():
    trainer = make(sw.MeshSpec(), sw.SingleProgramEngine(microbatches=MICROBATCHES))
    return trainer.fit(DATA, STEPS), trainer.params


def assert_same(trainer):
    result = trainer.fit(DATA, STEPS)
    wanted, params = one_device()
    np.testing.assert_allclose(result.losses, wanted.losses, rtol=1e-5)
    assert result.metrics["grad_norm"] == pytest.approx(wanted.metrics["grad_norm"], rel=1e-5)
    for ours, theirs in zip(jax.tree.leaves(trainer.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("pipe", "data", "tensor"), MESHES)
def test_every_mesh_gives_the_numbers_of_one_device(pipe, data, tensor):
    mesh = sw.MeshSpec(pipe=pipe, data=data, tensor=tensor)
    assert_same(make(mesh, sw.MpmdEngine(sw.OneFOneB(), MICROBATCHES)))


@pytest.mark.parametrize(
    ("data", "tensor", "fsdp"), [(2, 2, True), pytest.param(4, 2, False, marks=SLOW)]
)
def test_one_program_on_a_mesh_gives_the_numbers_of_one_device(data, tensor, fsdp):
    mesh = sw.MeshSpec(data=data, tensor=tensor)
    trainer = make(mesh, sw.SingleProgramEngine(MICROBATCHES, fsdp=fsdp))
    assert_same(trainer)
    held = sum(
        leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(trainer.state.params)
    )
    total = sum(leaf.size for leaf in jax.tree.leaves(trainer.state.params))
    assert (held < 0.3 * total) == fsdp  # all but what divides over no axis


@pytest.mark.parametrize(
    ("sizes", "repeat", "microbatches"),
    [((2, 1, 1), 1, 4), ((2, 2, 2), 2, 2), pytest.param((4, 1, 2), 1, 8, marks=SLOW)],
)
def test_an_spmd_pipeline_gives_the_numbers_of_one_device(sizes, repeat, microbatches):
    pipe, data, tensor = sizes
    mesh = sw.MeshSpec(pipe=pipe, data=data, tensor=tensor)
    trainer = make(mesh, sw.SpmdEngine(repeat=repeat, microbatches=microbatches))
    assert_same(trainer)
    (step,) = trainer._steps.values()
    (executable,) = step.executables
    assert "collective-permute" in executable.as_text()


@SLOW
def test_zero_bubble_zero_redundancy_and_post_validation_together():
    engine = sw.MpmdEngine(sw.ZBH1(), MICROBATCHES, post_validation=True, zero=1)
    assert_same(make(sw.MeshSpec(pipe=2, data=2, tensor=2), engine))


# ---- where things lie, and what is sent ------------------------------------------------------------------------------


@functools.cache
def compiled(data, tensor, *, zero=0, sequence=False):
    rules = sw.nn.default_axis_rules()
    rules = rules.replace(norm_length="tensor") if sequence else rules
    engine = sw.MpmdEngine(sw.OneFOneB(), MICROBATCHES, zero=zero, rules=rules)
    trainer = make(sw.MeshSpec(pipe=2, data=data, tensor=tensor), engine)
    result = trainer.fit(DATA, 1)
    (step,) = trainer._steps.values()
    return result.state, step._latest


_COLLECTIVE = re.compile(
    r" = (\S+|\(.*?\)) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def collectives(function, *, loop):
    """(code's name, kind, types) of each collective in the programs of the loop, or around it."""
    program = function.plan.program
    in_loop = {
        i.code for r in program.ranks for i in r.instructions if isinstance(i, Run) and i.action
    }
    found = []
    for number, executable in enumerate(function.runtime.executables):
        if (number in in_loop) == loop:
            for line in executable.as_text().splitlines():
                if match := _COLLECTIVE.search(line):
                    found.append((program.codes[number].name, match[2], match[1]))
    return found


def test_no_gradient_is_summed_over_data_within_the_loop():
    _, function = compiled(2, 1)
    assert collectives(function, loop=True) == []
    around = collectives(function, loop=False)
    assert {kind for _, kind, _ in around} <= {"all-reduce", "reduce-scatter"}
    assert around


def test_parameters_lie_split_over_tensor_devices():
    state, _ = compiled(1, 2)
    kernels = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
        if "kernel" in jax.tree_util.keystr(path)
    }
    assert len(kernels) >= 6
    assert all(
        2 * kernel.addressable_shards[0].data.size == kernel.size for kernel in kernels.values()
    )


def test_a_block_takes_two_all_reduces_each_way():
    """Both stages hold two scanned layers, whose collectives stand once in the program."""
    _, function = compiled(1, 2)
    found = collectives(function, loop=True)
    blocks = [name for name, kind, types in found if kind == "all-reduce" and ",32]" in types]
    assert (
        blocks.count("F of stage 0") == 2 + 1
    )  # the embedding's rows lie on one device or the other
    assert blocks.count("F of stage 1") == 2
    assert blocks.count("B of stage 0") == 2
    assert blocks.count("B of stage 1") == 2 + 1  # the head's product
    table = CONFIG.vocab * CONFIG.width
    assert all(size(types) < table for _, _, types in found)


def size(types):
    """The most elements of one array of a collective."""
    shapes = re.findall(r"\[([0-9,]*)\]", types)
    return max(int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes)


def test_zero_spreads_the_optimizers_state_over_data():
    state, _ = compiled(2, 1, zero=1)
    plain, _ = compiled(2, 1)
    share = lambda tree: sum(  # noqa: E731
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree)
    )
    assert share(state.opt_state) < 0.55 * share(plain.opt_state)
    assert share(state.params) == share(plain.params)
