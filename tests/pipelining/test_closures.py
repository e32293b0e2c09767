"""NNX modules are found and replaced wherever a function of the micro-batch reaches them, and only they change."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stagewright.pipelining.accumulate import accumulate_grads
from stagewright.pipelining.closures import find_modules, rebind


class Scale(nnx.Module):
    def __init__(self, value):
        self.value = nnx.Param(jnp.float32(value))

    def times(self, x):
        return float(self.value[...]) * x

    def __call__(self, x):
        return self.times(x)


GLOBAL = Scale(5)


def reads_a_global(x):
    return GLOBAL(x)


def calls_a_function_that_reads_a_global(x):
    return reads_a_global(x) + 1


def counts_down(x):
    return GLOBAL(1) + counts_down(x - 1) if x else 0


def closure(module):
    return lambda x: module(x)


def nested(module):
    def inner(x):
        return module(x)

    return lambda x: inner(x)


def in_containers(module):
    parts = {"models": [module, (module,)], "other": 3}
    return lambda x: parts["models"][1][0](x) + parts["models"][0](0)


def default(module):
    return lambda x, module=module: module(x)


def keyword_default(module):
    return lambda x, *, module=module: module(x)


def partial(module):
    return functools.partial(lambda module, x, *, again: module(x) + again(0), module, again=module)


def bound_method(module):
    return module.times


def module_itself(module):
    return module


def comprehension(module):
    return lambda x: sum([module(part) for part in (x, 0)])


def recursive(module):
    def down(x, depth=2):
        return module(x) if depth == 0 else down(x, depth - 1)

    return down


def decorated(module):
    def call(x):
        return module(x)

    @functools.wraps(call)
    def wrapper(x):
        return call(x)

    return wrapper


WAYS = [
    closure, nested, in_containers, default, keyword_default, partial, bound_method, module_itself,
    comprehension, recursive, decorated,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_module_is_found_and_replaced(way):
    old, new = Scale(2), Scale(3)
    function = way(old)
    assert [id(module) for module in find_modules(function)] == [id(old)]
    replaced = rebind(function, {id(old): new})
    assert replaced(10) == 30
    assert function(10) == 20  # the original is as it was


@pytest.mark.parametrize(
    ("function", "wanted"), [(reads_a_global, 30), (calls_a_function_that_reads_a_global, 31)]
)
def test_a_module_that_is_a_global_is_replaced(function, wanted):
    assert [id(module) for module in find_modules(function)] == [id(GLOBAL)]
    assert rebind(function, {id(GLOBAL): Scale(3)})(10) == wanted
    assert reads_a_global(10) == 50


def test_several_modules_and_each_once():
    first, second = Scale(2), Scale(3)
    function = lambda x: first(x) + second(x) + first(x)  # noqa: E731
    assert {id(m) for m in find_modules(function)} == {id(first), id(second)}
    assert len(find_modules(function)) == 2
    assert rebind(function, {id(first): Scale(10)})(1) == 23


def test_optimizers_and_random_streams_count_as_modules():
    rngs = nnx.Rngs(0)
    assert find_modules(lambda: rngs()) == (rngs,)


def test_a_function_without_modules_is_the_same_object():
    table = np.arange(3)
    function = lambda x: table[x]  # noqa: E731
    assert find_modules(function) == ()
    assert rebind(function, {}) is function


def test_names_that_are_not_bound_yet_do_no_harm():
    def function(x):
        return later(x)

    assert find_modules(function) == ()
    later = Scale(2)
    assert find_modules(function) == (later,)


def test_what_leads_to_no_module_is_shared_with_the_original():
    module, calls = Scale(2), 0

    def function(x):
        nonlocal calls
        calls += 1
        return module(x)

    assert rebind(function, {id(module): Scale(3)})(10) == 30
    assert calls == 1


def test_a_global_function_that_calls_itself():
    assert rebind(counts_down, {id(GLOBAL): Scale(3)})(2) == 3 + 3
    assert counts_down(2) == 5 + 5


def test_a_rebound_function_keeps_its_name_and_attributes():
    module = Scale(2)

    def function(x):
        """Say something."""
        return module(x)

    function.note = "kept"
    replaced = rebind(function, {id(module): Scale(3)})
    assert (replaced.__name__, replaced.__doc__, replaced.note) == (
        "function",
        "Say something.",
        "kept",
    )


def test_a_submodule_that_is_captured_by_itself_stays_a_part_of_the_whole():
    class Pair(nnx.Module):
        def __init__(self):
            self.left = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
            self.right = nnx.Linear(2, 2, rngs=nnx.Rngs(1))

    pair = Pair()
    left = pair.left

    def f(x):
        def loss(pair):
            return (pair.right(left(x)) ** 2).sum()

        return nnx.value_and_grad(loss)(pair)

    batch = np.ones((2, 3, 2), np.float32)
    _, grads = accumulate_grads(f, batch)
    expected = nnx.grad(lambda pair: sum((pair.right(pair.left(x)) ** 2).sum() for x in batch))(
        pair
    )
    np.testing.assert_allclose(
        grads["right"]["kernel"][...], expected["right"]["kernel"][...], rtol=1e-5
    )
