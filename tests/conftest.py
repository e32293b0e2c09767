"""The ground that every test stands on: eight simulated CPU devices, fixed seeds, no silent luck.

Here is only what holds for all tests, set before JAX starts (pytest-xdist imports this file in
each worker). Fixtures of one part live in a `conftest.py` beside its tests.

Both variables below are inherited by subprocesses. A test that runs the command line as a user
would takes them out of the child's environment.
"""

import os

_DEVICE_COUNT = "--xla_force_host_platform_device_count"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if _DEVICE_COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICE_COUNT}=8".strip()

import hypothesis  # noqa: E402
import jax  # noqa: E402

# A missing axis is an error, not a broadcast. Dtype promotion stays standard: under "strict"
# optax.adamw itself fails (it multiplies a Python float by an int32 count), and so do Flax's
# norms and attention in bfloat16, on JAX 0.10 and 0.12 alike.
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples in every run, however slow the machine. HYPOTHESIS_PROFILE=search looks for
# new ones.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("search", deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
