"""What every test file shares: type checking, eight virtual devices, and the implementations that a test goes over."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
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


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def implementations(op: str) -> list:
    """pytest params: the implementations of `op`. On a CPU "xla" and the interpreted "portable"."""
    import dsa_jax  # noqa: F401  registers the ops
    from dsa_jax import dispatch

    names = dispatch.op_named(op).implementations()
    return [name for name in names if on_gpu() or name != "hopper"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A test marked needs_gpu belongs to the GPU suite, and is skipped elsewhere."""
    for item in items:
        if "needs_gpu" in item.keywords:
            item.add_marker(pytest.mark.gpu)
            if not on_gpu():
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
