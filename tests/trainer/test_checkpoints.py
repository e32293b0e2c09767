"""What is saved comes back, to the bit, wherever its leaves lie; what does not fit is named."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from stagewright.trainer.checkpoints import Checkpoints, restore
from stagewright.trainer.state import TrainState


class Two(nnx.Module):
    """Layers with integer keys, a narrow dtype, and a random stream."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Param(jnp.full(3, float(i))) for i in range(2)])
        self.narrow = nnx.Param(jnp.bfloat16(1.5))
        self.rngs = rngs.fork()


def make_state(step: int = 3) -> TrainState:
    _, params, rest = nnx.split(Two(nnx.Rngs(5)), nnx.Param, ...)
    opt_state = optax.adam(0.1).init(params)
    return TrainState(params=params, rest=rest, opt_state=opt_state, step=jnp.int32(step))


def shapes(state: TrainState) -> TrainState:
    return jax.eval_shape(lambda: state)


def assert_same(ours, theirs, bits) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert [leaf.dtype for leaf in jax.tree.leaves(ours)] == [
        leaf.dtype for leaf in jax.tree.leaves(theirs)
    ]
    assert bits(ours) == bits(theirs)


def test_a_round_trip_keeps_bits_dtypes_and_keys(tmp_path: pathlib.Path, bits) -> None:
    state = make_state()
    path = Checkpoints(tmp_path / "c").save(state)
    assert path == tmp_path / "c" / "3"
    assert_same(restore(tmp_path / "c", shapes(state)), state, bits)


def test_leaves_may_lie_on_different_devices(tmp_path: pathlib.Path, bits) -> None:
    state = make_state()
    devices = jax.devices()
    both = NamedSharding(Mesh(np.array(devices[1:3]), ("copies",)), PartitionSpec())
    homes = [both, *(SingleDeviceSharding(device) for device in devices[:3])]
    leaves, treedef = jax.tree.flatten(state)
    spread = [jax.device_put(leaf, homes[i % 4]) for i, leaf in enumerate(leaves)]
    Checkpoints(tmp_path / "c").save(jax.tree.unflatten(treedef, spread))
    assert_same(restore(tmp_path / "c", shapes(state)), state, bits)


def test_the_latest_step_is_read_unless_another_is_named(tmp_path: pathlib.Path) -> None:
    for step in (2, 11):
        Checkpoints(tmp_path).save(make_state(step))
    like = shapes(make_state())
    assert int(restore(tmp_path, like).step) == 11
    assert int(restore(tmp_path, like, step=2).step) == 2
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 3; it has steps \[2, 11\]"):
        restore(tmp_path, like, step=3)


def test_a_missing_directory_is_told(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        restore(tmp_path / "nowhere", shapes(make_state()))
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        restore(tmp_path, shapes(make_state()))
    assert not (tmp_path / "nowhere").exists()


def test_what_does_not_fit_is_named(tmp_path: pathlib.Path) -> None:
    state = make_state()
    Checkpoints(tmp_path).save(state)
    params = nnx.state(nnx.List([nnx.Param(jnp.zeros(4)), nnx.Param(jnp.zeros(3))]))
    other = dataclasses.replace(state, params=nnx.State({"layers": params, "new": params[0]}))
    with pytest.raises(ValueError, match="does not fit") as refusal:
        restore(tmp_path, shapes(other))
    message = str(refusal.value)
    assert "missing params.new" in message
    assert "left over params.narrow" in message
    assert "params.layers.0 is float32[3], wanted float32[4]" in message


def test_a_relative_directory_is_under_the_current_one(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Checkpoints("out/c").save(make_state())
    assert (tmp_path / "out" / "c" / "3").is_dir()
    assert int(restore("out/c", shapes(make_state())).step) == 3


def test_a_directory_in_use_is_refused_unless_said(tmp_path: pathlib.Path) -> None:
    Checkpoints(tmp_path).save(make_state(2))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        Checkpoints(tmp_path).prepare()
    Checkpoints(tmp_path, overwrite=True).prepare()
    assert not (tmp_path / "2").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"
