"""Without an accelerator enough CPU devices are asked for; what the user set stays."""

import pytest

from stagewright.trainer.platform import has_accelerator, simulated_devices

COUNT = "--xla_force_host_platform_device_count"
THREADS = "--xla_cpu_multi_thread_eigen"
CPU = {"JAX_PLATFORMS": "cpu"}


def test_a_mesh_of_several_devices_is_simulated() -> None:
    assert simulated_devices(4, CPU) == {"XLA_FLAGS": f"{COUNT}=4 {THREADS}=false"}


def test_one_device_needs_nothing() -> None:
    assert simulated_devices(1, CPU) == {}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (f"{COUNT}=8", f"{COUNT}=8 {THREADS}=false"),
        (f"{THREADS}=true --xla_foo=1", f"{THREADS}=true --xla_foo=1 {COUNT}=2"),
    ],
)
def test_what_the_user_set_stays(given: str, wanted: str) -> None:
    assert simulated_devices(2, {**CPU, "XLA_FLAGS": given}) == {"XLA_FLAGS": wanted}


def test_nothing_is_changed_if_all_is_set() -> None:
    flags = f"{COUNT}=8 {THREADS}=true"
    assert simulated_devices(2, {**CPU, "XLA_FLAGS": flags}) == {}


def test_an_accelerator_needs_nothing() -> None:
    for platforms in ("cuda", "tpu,cpu", "gpu"):
        assert has_accelerator({"JAX_PLATFORMS": platforms})
        assert simulated_devices(4, {"JAX_PLATFORMS": platforms}) == {}
    assert not has_accelerator({"JAX_PLATFORMS": "cpu"})
