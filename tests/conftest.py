"""What every test file shares: type checking, eight virtual devices, and the implementations that a test goes over."""

import collections
import os
from pathlib import Path

# Most of the suite's time on a CPU is compilation, a third of which is spent on making code fast that runs once.
_ON_GPU_MACHINE = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
_QUICK_COMPILES = "" if _ON_GPU_MACHINE else " --xla_backend_optimization_level=0"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8" + _QUICK_COMPILES)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from jaxtyping import install_import_hook

install_import_hook(["dsa_jax", "pallas_kernels"], "beartype.beartype")

import jax
import jaxtyping
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def as_user():
    """Turns the run-time type checks off: bad input meets the library's own ValueError, as it does for a user."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


SETTINGS = ("jax_default_prng_impl", "jax_default_matmul_precision", "jax_enable_x64", "jax_threefry_partitionable")


@pytest.fixture(autouse=True)
def settings_stay():
    """What decides later tests' numbers is as a test found it."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    yield
    assert {name: getattr(jax.config, name) for name in SETTINGS} == before


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def implementations(op: str) -> list:
    """pytest params: the implementations of `op`. On a CPU "xla" and the interpreted "portable"."""
    import dsa_jax  # noqa: F401  registers the ops
    from dsa_jax import dispatch

    names = dispatch.op_named(op).implementations()
    return [name for name in names if on_gpu() or name != "hopper"]


def pytest_addoption(parser):
    parser.addoption(
        "--all-interpreted", action="store_true", help="interpret every kernel case on a CPU, not a sample"
    )


INTERPRETED_CASES = 1  # of each test function that goes over implementations


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """A needs_gpu test belongs to the GPU suite, and is skipped elsewhere.

    Interpreting a kernel takes seconds a case: a CPU runs the first case of each test function for "portable", the
    others on request.
    """
    interpreted = collections.Counter()
    for item in items:
        if "needs_gpu" in item.keywords:
            item.add_marker(pytest.mark.gpu)
            if not on_gpu():
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        elif not on_gpu() and "portable" in getattr(getattr(item, "callspec", None), "params", {}).values():
            interpreted[item.function] += 1
            if interpreted[item.function] > INTERPRETED_CASES and not config.getoption("--all-interpreted"):
                item.add_marker(pytest.mark.skip(reason="interpreted with --all-interpreted"))
