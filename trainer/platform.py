"""The machine, before JAX starts: without an accelerator, a mesh is simulated on the CPU.

XLA reads its flags once, when JAX first asks for devices; so this only looks at what is installed
and at device files, and never imports JAX.  The caller owns the environment: it is passed in, and
what to change comes back.
"""

import importlib.metadata
import importlib.util
import pathlib
from collections.abc import Mapping

_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel0", "/dev/vfio/0")


def simulated_devices(num_devices: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Say what to set so that JAX sees enough devices on a machine that has only CPUs.

    Args:
      num_devices: devices that the mesh needs.
      environ: the environment as it is.  Flags that it sets stay as they are.

    Returns:
      Variables to set before JAX starts; empty if nothing is needed.
    """
    if num_devices < 2 or has_accelerator(environ):
        return {}
    flags = environ.get("XLA_FLAGS", "")
    wanted = {
        "--xla_force_host_platform_device_count": str(num_devices),
        # One thread for each device: they run side by side, and would share the cores badly.
        "--xla_cpu_multi_thread_eigen": "false",
    }
    added = [f"{name}={value}" for name, value in wanted.items() if name not in flags]
    return {"XLA_FLAGS": " ".join([*flags.split(), *added])} if added else {}


def has_accelerator(environ: Mapping[str, str]) -> bool:
    """Whether JAX will most likely run on a GPU or TPU.

    Being wrong does no harm: the flags above concern CPU devices alone.

    Args:
      environ: the environment; `JAX_PLATFORMS` decides if it is set.
    """
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms:
        return platforms.split(",")[0].strip().lower() != "cpu"
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    installed = bool(plugins) or importlib.util.find_spec("libtpu") is not None
    return installed and any(pathlib.Path(name).exists() for name in _DEVICE_FILES)
