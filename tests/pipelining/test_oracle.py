"""Claim: a pipeline computes what one device computes, for every schedule, stages, micro-batches and model.

The oracle is plain JAX on one device, twice: `jax.value_and_grad` of the whole batch's loss at once (micro-batches
under `jax.vmap`), and `accumulate_grads` outside `mpmd_jit`, a `lax.scan` over the micro-batches in order.  Against
both, losses, aux and gradients hold within rtol 1e-5 of each leaf's largest number in float32 and 2**-6 in bfloat16.

Against the scan the bits are compared too.  A stage's task runs the same operations on the same operands in the same
order as the scan's body, and accumulators add micro-batches up in the same order, so all bits are equal on one stage
under a schedule that does not split the backward pass.  Otherwise they are equal but for the leaves that
`Model.regrouped` (several stages) and `Model.contracted` (I and W apart) name:

- a parameter that several stages read (tied embeddings) has one accumulator a stage, added up after the loop: for
  stages a, b and micro-batches 0, 1 that is (a0 + a1) + (b0 + b1) instead of (a0 + b0) + (a1 + b1);
- inside one program XLA contracts a product and the sum behind it to one fused multiply-add, with one rounding; where
  the cut lies between the two (a cotangent that comes over a skip, a side loss that is added up on the way, a bias
  whose W sums what its I multiplied), both are rounded.

The full product is marked slow; `COVER` is the part of it that `make test` runs: every model under each of a core of
schedules, those on every number of ranks, every number of ranks with every number of micro-batches; and two models,
one of them with values that skip stages, under all other schedules.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagewright.nn.yields import pipeline_yield
from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.mesh import MeshSpec
from stagewright.pipelining.mpmd_jit import mpmd_jit
from stagewright.pipelining.schedules import (
    ZBH1,
    ZBH2,
    ZBV,
    DualPipeV,
    Eager1F1B,
    GPipe,
    HanayoWaves,
    Interleaved1F1B,
    LoopedBFS,
    LoopedDFS,
    OneFOneB,
    VHalf,
    VMin,
)

CORE = {
    "gpipe": GPipe(),
    "1f1b": OneFOneB(),
    "interleaved": Interleaved1F1B(2),
    "zbh1": ZBH1(),
}
SCHEDULES = CORE | {
    schedule.name: schedule
    for schedule in (
        Eager1F1B(),
        LoopedBFS(2),
        LoopedDFS(2),
        HanayoWaves(1),
        ZBH2(),
        ZBV(),
        VHalf(),
        VMin(),
        DualPipeV(),
    )
}
RANKS = (1, 2, 4)
MICROBATCHES = (1, 2, 4, 8)
SIZE = 3  # examples in a micro-batch
WIDTH = 4
DEPTH = 8  # as many as the most stages: 4 ranks, 2 stages each


@dataclass(frozen=True)
class Model:
    """A model under test.

    Attributes:
      params: its parameters.
      loss: (params, micro-batch, number of stages) -> (loss, aux).
      batch: number of micro-batches -> batch.
      regrouped: paths of results that need not have the oracle's bits on several stages (see above).
      contracted: paths of results that need not have them where I and W are apart.
      rtol: tolerance of every number, relative to the largest of its leaf.
    """

    params: Any
    loss: Callable[[Any, Any, int], tuple[Any, Any]]
    batch: Callable[[int], Any]
    regrouped: tuple[str, ...] = ()
    contracted: tuple[str, ...] = ()
    rtol: float = 1e-5


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def inputs(num_microbatches: int) -> Any:
    return normal(99, num_microbatches, SIZE, WIDTH)


def dense_params(seed: int = 0, width_in: int = WIDTH, width_out: int = WIDTH) -> Any:
    return {"w": normal(seed, width_in, width_out) / 2, "b": normal(seed + 1000, width_out) / 4}


def dense(layer: Any, x: Any) -> Any:
    return jnp.tanh(x @ layer["w"] + layer["b"][None])


STACK = [dense_params(i) for i in range(DEPTH)]


def mlp(params: Any, x: Any, stages: int) -> tuple[Any, Any]:
    del stages
    for i, layer in enumerate(params):
        x = dense(layer, x)
        if i < DEPTH - 1:
            x = pipeline_yield(x)
    return jnp.mean(x**2), {"out": x}


def skip(params: Any, x: Any, stages: int) -> tuple[Any, Any]:
    """The input and two hidden values are read again several stages later."""
    del stages
    seen = [x]
    for i, layer in enumerate(params):
        x = dense(layer, x)
        seen.append(x)
        if i == 5:
            x = x + 2 * seen[0] + seen[2]
        if i < DEPTH - 1:
            x = pipeline_yield(x)
    return jnp.mean((x + seen[1]) ** 2), None


def uneven(params: Any, x: Any, stages: int) -> tuple[Any, Any]:
    """Stages of no, one or three layers, of different widths."""
    del stages
    x = pipeline_yield(x * 0.5)
    for i, group in enumerate(params):
        for layer in group:
            x = dense(layer, x)
        if i < len(params) - 1:
            x = pipeline_yield(x)
    return jnp.mean(x**2), None


UNEVEN = [
    [dense_params(0, 4, 8), dense_params(1, 8, 8), dense_params(2, 8, 3)],
    [dense_params(3, 3, 5)],
    [dense_params(4, 5, 5), dense_params(5, 5, 2)],
    [dense_params(6, 2, 8)],
    [dense_params(7, 8, 8)],
    [dense_params(8, 8, 8), dense_params(9, 8, 4)],
    [dense_params(10, 4, 1)],
]


def dropout(params: Any, batch: Any, stages: int) -> tuple[Any, Any]:
    del stages
    x, key = batch["x"], batch["key"]
    for i, layer in enumerate(params):
        x = dense(layer, x)
        if i in (0, 7):
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, x.shape)
            x = jnp.where(keep, x / 0.8, 0.0)
        if i < DEPTH - 1:
            x = pipeline_yield(x)
    return jnp.mean(x**2), None


def with_keys(num_microbatches: int) -> Any:
    return {
        "x": inputs(num_microbatches),
        "key": jax.random.split(jax.random.key(7), num_microbatches),
    }


def aux_loss(params: Any, x: Any, stages: int) -> tuple[Any, Any]:
    """Two middle layers each add a loss of their own, as a router's balance does."""
    del stages
    side = jnp.float32(0)
    for i, layer in enumerate(params):
        x = dense(layer, x)
        if i in (2, 5):
            side = side + 0.1 * jnp.mean(jax.nn.softmax(x @ layer["w"], axis=-1) ** 2)
        if i < DEPTH - 1:
            x, side = pipeline_yield((x, side))
    return jnp.mean(x**2) + side, {"side": side}


def integers(params: Any, batch: Any, stages: int) -> tuple[Any, Any]:
    """Token ids, positions, a mask and a random key cross every mark, and the last stage reads them."""
    del stages
    ids, key = batch["ids"], batch["key"]
    x = params["table"][ids]
    mask, position = ids > 2, jnp.arange(SIZE, dtype=jnp.int16)
    for layer in params["layers"]:
        x = jnp.where(mask[:, None], dense(layer, x), x)
        x, ids, mask, position, key = pipeline_yield((x, ids, mask, position, key))
    noise = jax.random.uniform(key, (SIZE,))
    score = (x * position[:, None].astype(x.dtype)).sum(-1) * noise
    loss = jnp.where(mask, score * ids.astype(x.dtype), score).mean()
    return loss, {"ids": ids, "mask": mask, "position": position}


def id_batch(num_microbatches: int) -> Any:
    ids = np.random.default_rng(5).integers(0, 6, (num_microbatches, SIZE)).astype(np.int32)
    return {"ids": ids, "key": jax.random.split(jax.random.key(3), num_microbatches)}


def no_parameters(params: Any, x: Any, stages: int) -> tuple[Any, Any]:
    """Every second stage has nothing to learn."""
    del stages
    for i, layer in enumerate(params):
        x = dense(layer, x) if i % 2 else jnp.sin(x) * 1.5
        if i < DEPTH - 1:
            x = pipeline_yield(x)
    return jnp.mean(x**2), None


def outside_the_loss(params: Any, x: Any, stages: int) -> tuple[Any, Any]:
    """A parameter nobody reads, and one that only an aux output reads."""
    loss, _ = mlp(params["layers"], x, stages)
    return loss, {"norm": jnp.sum(params["observed"] ** 2), "x": x}


def travelling(params: Any, x: Any, stages: int) -> tuple[Any, Any]:
    """A parameter goes through the marks with the activations, and two stages use it."""
    del stages
    shared = params["shared"]
    for i, layer in enumerate(params["layers"]):
        x = dense(layer, x)
        if i in (1, 6):
            x = x @ shared
        if i < DEPTH - 1:
            x, shared = pipeline_yield((x, shared))
    return jnp.mean((x @ params["shared"].T) ** 2), None


def remat_mlp(params: Any, x: Any, stages: int) -> tuple[Any, Any]:
    """Layers under `jax.checkpoint`, one by one."""
    del stages
    for i, layer in enumerate(params):
        x = jax.checkpoint(dense)(layer, x)
        if i < DEPTH - 1:
            x = pipeline_yield(x)
    return jnp.mean(x**2), None


# ---- a small GPT ----------------------------------------------------------------------------------------------------

VOCAB, SEQ = 11, 5


def block_params(seed: int) -> Any:
    return {
        "qkv": normal(seed, WIDTH, 3 * WIDTH) / 2,
        "out": normal(seed + 100, WIDTH, WIDTH) / 2,
        "scale": np.full(WIDTH, 0.9, np.float32),
    }


GPT_PARAMS = {
    "embed": normal(50, VOCAB, WIDTH),
    "position": normal(51, SEQ, WIDTH),
    "blocks": [block_params(i) for i in range(DEPTH)],
}


def block(p: Any, x: Any) -> Any:
    """Causal attention with one head, then a gate; no more, for XLA's time to compile is this file's time to run."""
    q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
    scores = jnp.einsum("blh,bmh->blm", q, k)
    causal = jnp.tril(jnp.ones((SEQ, SEQ), bool))[None]
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
    x = x + jnp.einsum("blm,bmh->blh", weights, v) @ p["out"]
    return jnp.tanh(x * p["scale"][None, None])


def loop_blocks(blocks: Any, x: Any) -> Any:
    for p in blocks:
        x = block(p, x)
    return x


def scan_blocks(blocks: Any, x: Any, *, body: Any = block) -> Any:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    return jax.lax.scan(lambda x, p: (body(p, x), None), x, stacked)[0]


def gpt(
    params: Any, batch: Any, stages: int, *, depth: int = 4, run: Any = loop_blocks
) -> tuple[Any, Any]:
    """Tied embeddings, `depth` blocks (one a stage at least; blocks that are not used are parameters without use)."""
    tokens = batch[:, :-1]
    x = params["embed"][tokens] + params["position"][None]
    size = max(depth // stages, 1)
    for stage in range(stages):
        x = run(params["blocks"][stage * size : (stage + 1) * size], x)
        if stage < stages - 1:
            x = pipeline_yield(x)
    logits = x @ params["embed"].T
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch[:, 1:, None], axis=-1)
    return -chosen.mean(), {"accuracy": (logits.argmax(-1) == batch[:, 1:]).mean()}


def tokens(num_microbatches: int) -> Any:
    shape = (num_microbatches, SIZE, SEQ + 1)
    return np.random.default_rng(6).integers(0, VOCAB, shape).astype(np.int32)


def to_bfloat16(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), tree)


def bfloat16_mlp(params: Any, x: Any, stages: int) -> tuple[Any, Any]:
    loss, _ = mlp(params, x.astype(jnp.bfloat16), stages)
    return loss.astype(jnp.float32), None


MODELS = {
    "mlp": Model(STACK, mlp, inputs),
    "skip": Model(STACK, skip, inputs, regrouped=("[1][0]['w']", "[1][0]['b']")),
    "uneven": Model(
        UNEVEN, uneven, inputs, contracted=("[1][6][0]['b']",)
    ),  # differs from JAX 0.12 on
    "dropout": Model(STACK, dropout, with_keys),
    "aux_loss": Model(STACK, aux_loss, inputs, regrouped=("[0][0]", "[0][1]['side']")),
    "integers": Model({"table": normal(60, 6, WIDTH), "layers": STACK}, integers, id_batch),
    "no_parameters": Model(STACK, no_parameters, inputs),
    "outside_the_loss": Model(
        {"layers": STACK, "unused": normal(61, 3, 2), "observed": normal(62, 5)},
        outside_the_loss,
        inputs,
    ),
    "travelling": Model(
        {"layers": STACK, "shared": normal(63, WIDTH, WIDTH) / 2},
        travelling,
        inputs,
        regrouped=("[1]['shared']",),
    ),
    "remat_mlp": Model(STACK, remat_mlp, inputs),
    "bfloat16": Model(to_bfloat16(STACK), bfloat16_mlp, inputs, rtol=2**-6),
    "gpt": Model(GPT_PARAMS, gpt, tokens, regrouped=("[1]['embed']",)),
    "gpt_scan": Model(
        GPT_PARAMS,
        functools.partial(gpt, depth=DEPTH, run=scan_blocks),
        tokens,
        regrouped=("[1]['embed']",),
    ),
    "gpt_scan_remat": Model(
        GPT_PARAMS,
        functools.partial(
            gpt, depth=DEPTH, run=functools.partial(scan_blocks, body=jax.checkpoint(block))
        ),
        tokens,
        regrouped=("[1]['embed']",),
    ),
}

# ---- the claim ------------------------------------------------------------------------------------------------------

PAIRS = tuple(itertools.product(RANKS, MICROBATCHES))
FULL = [
    (model, schedule, ranks, num_microbatches)
    for model in MODELS
    for schedule in SCHEDULES
    for ranks, num_microbatches in PAIRS
    if schedule != "dualpipev" or num_microbatches >= 2 * ranks  # it refuses fewer
]
HEAVY = [model for model in MODELS if model.startswith("gpt")]  # XLA compiles these longest
LIGHT = [model for model in MODELS if model not in HEAVY]
COVER = (
    [  # each model with few numbers of micro-batches, for its oracles are compiled for each of them
        (
            model,
            schedule,
            RANKS[(i + j) % len(RANKS)],
            MICROBATCHES[(i + j // 2) % len(MICROBATCHES)],
        )
        for i, model in enumerate(LIGHT)
        for j, schedule in enumerate(CORE)
    ]
    + [
        (model, schedule, 1 + (i + j) % 2, 2)
        for i, model in enumerate(HEAVY)
        for j, schedule in enumerate(CORE)
    ]
    + [
        (model, schedule, *size)
        for model, size in (("mlp", (2, 4)), ("skip", (4, 8)))
        for schedule in SCHEDULES
        if schedule not in CORE
    ]
)


def make_step(model: Model, stages: int) -> Callable[[Any, Any], Any]:
    def step(params: Any, batch: Any) -> Any:
        def microbatch_grads(microbatch: Any) -> Any:
            loss = lambda p: model.loss(p, microbatch, stages)  # noqa: E731
            return jax.value_and_grad(loss, has_aux=True)(params)

        return accumulate_grads(microbatch_grads, batch)

    return step


@functools.cache
def oracle(name: str, num_microbatches: int, stages: int) -> tuple[Any, Any]:
    """((losses, aux), grads) of the scan, and grads of the whole batch at once."""
    model = MODELS[name]
    batch = model.batch(num_microbatches)

    def whole(params: Any) -> Any:
        return jnp.sum(jax.vmap(lambda mb: model.loss(params, mb, stages)[0])(batch))

    scanned = jax.jit(make_step(model, stages))(model.params, batch)
    return scanned, jax.jit(jax.grad(whole))(model.params)


def numbers(leaf: Any) -> np.ndarray:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_close(got: Any, wanted: Any, rtol: float) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(got)]
    for path, a, b in zip(paths, jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        x, y = numbers(a).astype(np.float64), numbers(b).astype(np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * np.abs(y).max(), err_msg=path)


def different_bits(got: Any, wanted: Any) -> set[str]:
    leaves = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True)
    return {
        jax.tree_util.keystr(path)
        for (path, a), b in leaves
        if numbers(a).tobytes() != numbers(b).tobytes()
    }


def check(name: str, schedule: str, ranks: int, num_microbatches: int) -> None:
    model, order = MODELS[name], SCHEDULES[schedule]
    stages = order.num_stages(ranks)
    scanned, whole = oracle(name, num_microbatches, stages if name.startswith("gpt") else 0)
    step = mpmd_jit(make_step(model, stages), mesh=MeshSpec(pipe=ranks), schedule=order)
    got = step(model.params, model.batch(num_microbatches))
    assert_close(got, scanned, model.rtol)
    assert_close(got[1], whole, model.rtol)
    allowed = set(model.regrouped) if stages > 1 else set()
    split = order.order(ranks, num_microbatches).splits_backward
    allowed |= set(model.contracted) if split else set()
    assert different_bits(got, scanned) <= allowed


@pytest.mark.parametrize(("name", "schedule", "ranks", "num_microbatches"), COVER)
def test_as_one_device(name: str, schedule: str, ranks: int, num_microbatches: int) -> None:
    check(name, schedule, ranks, num_microbatches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "ranks", "num_microbatches"), [c for c in FULL if c not in set(COVER)]
)
def test_as_one_device_full(name: str, schedule: str, ranks: int, num_microbatches: int) -> None:
    check(name, schedule, ranks, num_microbatches)


def test_the_cover_is_a_cover() -> None:
    assert {(m, s) for m, s, _, _ in COVER if s in CORE} == set(itertools.product(MODELS, CORE))
    assert {(s, r) for _, s, r, _ in COVER if s in CORE} == set(itertools.product(CORE, RANKS))
    assert {s for _, s, _, _ in COVER} == set(SCHEDULES)
    assert {(r, n) for _, _, r, n in COVER} == set(PAIRS)
