"""Axis names become partitions that fit the mesh, or are refused with path, axis and sizes."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from stagewright.nn.axes import AxisRules, default_axis_rules
from stagewright.pipelining import jax_seams
from stagewright.pipelining.mesh import MeshSpec, rank_meshes
from stagewright.pipelining.specs import make_spec, sharding_on, spec_of, spread_over, trim

MESH = MeshSpec(pipe=1, data=2, tensor=4)
RULES = default_axis_rules()


def test_names_become_mesh_axes():
    spec = make_spec("w", ("embed", "mlp"), (6, 8), RULES, MESH)
    assert spec == P(None, "tensor")
    assert make_spec("x", ("batch", None), (2, 3), RULES, MESH) == P("data", None)


@pytest.mark.parametrize(
    ("names", "shape", "rules", "message"),
    [
        (
            ("embed", "mlp"),
            (6, 10),
            RULES,
            r"w of shape \(6, 10\): dim 1 \('mlp', size 10\).*tensor=4",
        ),
        (("mlp", "heads"), (8, 8), RULES, r"w with axes .*'tensor' is claimed twice"),
        (
            ("embed", "mpl"),
            (8, 8),
            RULES,
            r"w with axes .*no rule for the logical axis 'mpl'.*'mlp'",
        ),
        (("mlp",), (8,), AxisRules({"mlp": "model"}), r"w: the rule for 'mlp' names.*'model'"),
        (("mlp",), (4,), AxisRules({"mlp": ("data", "tensor")}), r"size 4.*data=2 x tensor=4"),
    ],
)
def test_what_does_not_fit_is_refused(names, shape, rules, message):
    with pytest.raises(ValueError, match=message):
        make_spec("w", names, shape, rules, MESH)


@pytest.mark.parametrize(
    ("spec", "shape", "spread"),
    [
        (P(None, "tensor"), (6, 8), P("data", "tensor")),
        (P(), (4, 10), P(None, "data")),  # the largest dim
        (P(), (3, 5), P()),  # nothing divides
        (P("data"), (4, 8), P("data")),  # split already
        (P(), (), P()),
    ],
)
def test_optimizer_state_is_spread_over_data(spec, shape, spread):
    assert spread_over(spec, shape, "data", 2) == spread


def test_without_replicas_nothing_is_spread():
    assert spread_over(P(), (4,), "data", 1) == P()


def test_one_device_needs_no_spec():
    (alone,) = rank_meshes(MeshSpec())
    assert sharding_on(alone, P("data")).device_set == {jax.devices()[0]}
    assert spec_of(sharding_on(alone, P("data"))) == P()


def test_shardings_come_back():
    (mesh,) = rank_meshes(MESH)
    array = jax.device_put(np.zeros((2, 8)), sharding_on(mesh, P(None, "tensor")))
    assert spec_of(array.sharding) == P(None, "tensor")
    assert array.addressable_shards[0].data.shape == (2, 2)


def test_trailing_whole_dims_do_not_count():
    assert trim(P(None, "data", None)) == P(None, "data")


def test_an_abstract_mesh_stands_for_any_ranks_mesh():
    def double(x):
        return jax.lax.with_sharding_constraint(
            2 * x, NamedSharding(jax_seams.abstract_mesh(data=2, tensor=2), P(None, "tensor"))
        )

    for mesh in rank_meshes(MeshSpec(pipe=2, data=2, tensor=2)):
        got = jax.jit(double)(jax.device_put(np.ones((2, 4)), sharding_on(mesh, P("data"))))
        assert got.devices() == set(mesh.devices.flat)
        assert got.sharding.is_equivalent_to(sharding_on(mesh, P(None, "tensor")), 2)
