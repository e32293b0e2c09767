"""The claim: names are kept, marked and bound as written, and change no number."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from stagewright import nn
from stagewright.nn.axes import bind_axes, leaf_axes, rebind_axes, shard_p
from stagewright.pipelining import jax_seams


def marks(jaxpr):
    return [eqn.params["names"] for eqn in jaxpr.eqns if eqn.primitive is shard_p]


def named(x):
    return jnp.sum(nn.shard(2.0 * x, ("batch", "embed")) ** 2)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.grad, jax.checkpoint])
def test_changes_no_number(transform):
    x = jnp.arange(6.0).reshape(2, 3)
    unnamed = transform(lambda x: jnp.sum((2.0 * x) ** 2))
    np.testing.assert_array_equal(transform(named)(x), unnamed(x))


def test_works_under_scan():
    def body(carry, x):
        return nn.shard(carry + x, ("embed",)), None

    total, _ = jax.lax.scan(body, jnp.zeros(3), jnp.ones((4, 3)))
    np.testing.assert_array_equal(total, 4 * np.ones(3))


def test_gradient_carries_the_same_names():
    jaxpr = jax.make_jaxpr(jax.grad(named))(jnp.ones((2, 3)))
    assert marks(jaxpr) == [("batch", "embed"), ("batch", "embed")]


@pytest.mark.parametrize(
    ("options", "added"),
    [({}, nn.VmappedDim()), ({"spmd_axis_name": "data"}, nn.VmappedDim(("data",)))],
)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_vmap_adds_its_dim(options, added, dim):
    batched = jax.vmap(lambda x: nn.shard(x, ("batch", "embed")), in_axes=dim, **options)
    names = ["batch", "embed"]
    names.insert(dim, added)
    assert marks(jax.make_jaxpr(batched)(jnp.ones((2, 2, 2)))) == [tuple(names)]


def test_decorates_functions():
    @nn.shard(("batch", None))
    def double(x):
        """Twice."""
        return 2 * x

    assert double.__doc__ == "Twice."
    assert marks(jax.make_jaxpr(double)(jnp.ones((2, 3)))) == [("batch", None)]


def test_refuses_another_number_of_names():
    with pytest.raises(ValueError, match=r"2 axis names \('batch', 'embed'\).* with 3 dims"):
        nn.shard(jnp.ones((2, 3, 4)), ("batch", "embed"))


@pytest.mark.parametrize("names", ["batch", ("batch", 3)])
def test_refuses_what_are_no_names(names):
    with pytest.raises(ValueError, match="expects a tuple of axis names"):
        nn.shard(jnp.ones((2, 3)), names)


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((2,), ("mlp",)),
        ((2, 2), ("batch", "mlp")),
        ((2, 2, 2), ("batch", "length", "mlp")),
        ((2, 2, 2, 2), ("batch", None, None, "mlp")),
    ],
)
def test_names_activations_of_any_rank(shape, names):
    jaxpr = jax.make_jaxpr(lambda x: nn.shard_activation(x, "mlp"))(jnp.ones(shape))
    assert marks(jaxpr) == [names]


def test_variables_keep_names_through_split_and_merge():
    layer = nn.Linear(2, 3, axes=("embed", "mlp"), rngs=nnx.Rngs(0))
    for linear in (layer, nnx.merge(*nnx.split(layer)), nnx.eval_shape(lambda: layer)):
        assert nn.axis_names(linear.kernel) == ("embed", "mlp")
        assert nn.axis_names(linear.bias) == ("mlp",)


def test_plain_flax_variables_are_unnamed():
    assert nn.axis_names(nnx.Linear(2, 3, rngs=nnx.Rngs(0)).kernel) == (None, None)


def test_refuses_names_that_do_not_fit_the_variable():
    with pytest.raises(ValueError, match=r"shape \(2,\) carries 2 axis names"):
        nn.axis_names(nnx.Param(jnp.ones(2), **nn.axes_metadata(("embed", "mlp"))))


def test_names_do_not_make_flax_shard_at_once():
    mesh = Mesh(np.array(jax.devices()[:2]), ("mlp",))  # a mesh axis of a logical name
    with jax.set_mesh(mesh):
        layer = nn.Linear(2, 4, axes=("embed", "mlp"), rngs=nnx.Rngs(0))
    assert layer.kernel.get_value().sharding.is_fully_replicated


def test_rules_bind_names():
    rules = nn.AxisRules({"batch": ("data", "expert"), "mlp": "tensor", "embed": None, "x": ()})
    names = ("batch", "embed", None, "x", "mlp", nn.VmappedDim())
    expected = PartitionSpec(
        ("data", "expert"), None, None, None, "tensor", PartitionSpec.UNCONSTRAINED
    )
    assert rules.spec(names) == expected
    assert rules.spec((nn.VmappedDim(("pipe",)), "mlp")) == PartitionSpec("pipe", "tensor")


def test_rules_are_values():
    table = {"batch": "data", "mlp": "tensor"}
    assert hash(nn.AxisRules(table)) == hash(nn.AxisRules(tuple(table.items())))
    assert nn.AxisRules(table).replace(mlp=None) == nn.AxisRules({"batch": "data", "mlp": None})


def test_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="axis 'head'; did you mean 'heads'"):
        nn.default_axis_rules().spec(("head",))


@pytest.mark.parametrize(
    ("names", "claimers"),
    [(("heads", "mlp"), "'heads' and by 'mlp'"), (("mlp", None, "mlp"), "'mlp' and by 'mlp'")],
)
def test_mesh_axis_claimed_twice_is_refused(names, claimers):
    with pytest.raises(ValueError, match=f"'tensor' is claimed twice .* by {claimers}"):
        nn.default_axis_rules().spec(names)


def test_vmapped_mesh_axis_claimed_twice_is_refused():
    with pytest.raises(ValueError, match="'data' is claimed twice"):
        nn.default_axis_rules().spec((nn.VmappedDim(("data",)), "batch"))


def test_within_bound_axes_a_mark_is_a_constraint() -> None:
    mesh = jax_seams.abstract_mesh(data=2, tensor=2)
    rules = nn.default_axis_rules()

    def f(x):
        return nn.shard(x, ("batch", "mlp"))

    with bind_axes(rules, mesh):
        (eqn,) = jax.make_jaxpr(f)(jnp.zeros((2, 4))).eqns
        with rebind_axes(batch=None):
            mapped = jax.vmap(f, spmd_axis_name="data")
            (inner,) = jax.make_jaxpr(mapped)(jnp.zeros((2, 3, 4))).eqns
    assert eqn.params["sharding"].spec == PartitionSpec("data", "tensor")
    assert inner.params["sharding"].spec == PartitionSpec("data", None, "tensor")
    assert marks(jax.make_jaxpr(f)(jnp.zeros((2, 4)))) == [("batch", "mlp")]


def test_rebinding_without_a_mesh_is_nothing() -> None:
    with rebind_axes(batch=None):
        assert marks(jax.make_jaxpr(lambda x: nn.shard(x, ("batch",)))(jnp.zeros(2))) == [
            ("batch",)
        ]


def test_optimizer_state_carries_its_parameters_names() -> None:
    linear = nn.Linear(4, 6, axes=("embed", "mlp"), rngs=nnx.Rngs(0))
    params = nnx.state(linear, nnx.Param)
    names = leaf_axes(params)
    assert set(names) == {("embed", "mlp"), ("mlp",)}
    adam = leaf_axes(jax.eval_shape(optax.adam(1e-3).init, params))
    assert adam == ((), *names, *names)
    factored = leaf_axes(jax.eval_shape(optax.adafactor(min_dim_size_to_factor=2).init, params))
    assert all(len(n) <= 2 for n in factored)
