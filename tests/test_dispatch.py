"""What runs where, and that it says so (kinds S, T and U)."""

import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import dsa_jax
from dsa_jax import dispatch
from dsa_jax.dispatch import NAMES, Op, op_named
from pallas_kernels.target import target_of

ROOT = pathlib.Path(dsa_jax.__file__).parents[1]
SOURCES = sorted(path for folder in ("dsa_jax", "pallas_kernels") for path in (ROOT / folder).rglob("*.py"))
# Of GLM-5.2's ops at its own shapes and dtypes. Nothing falls to another path unsaid: a change here is a decision.
BACKENDS = {
    "sm_90": {"indexer_logits": "hopper", "topk_indices": "hopper", "sparse_mla": "hopper", "dense_mla": "hopper"},
    "sm_80": {
        "indexer_logits": "portable",
        "topk_indices": "portable",
        "sparse_mla": "portable",
        "dense_mla": "portable",
    },
    "gfx942": {
        "indexer_logits": "portable",
        "topk_indices": "portable",
        "sparse_mla": "portable",
        "dense_mla": "portable",
    },
    "gfx950": {
        "indexer_logits": "portable",
        "topk_indices": "portable",
        "sparse_mla": "portable",
        "dense_mla": "portable",
    },
    "cpu": {"indexer_logits": "xla", "topk_indices": "xla", "sparse_mla": "xla", "dense_mla": "xla"},
}


def _shape(dtype, *lengths):
    return jax.ShapeDtypeStruct(lengths, dtype)


def _calls():
    """GLM-5.2 prefill of 4096 rows over 16384 keys, as shapes."""
    rows, keys = 4096, 16384
    bound = _shape(jnp.int32, rows)
    fp8 = jnp.float8_e4m3fn
    return {
        "indexer_logits": (
            (_shape(fp8, rows, 32, 128), _shape(fp8, keys, 128), _shape(jnp.float32, rows, 32), bound, bound),
            {"k_scale": _shape(jnp.float32, keys)},
        ),
        "topk_indices": ((_shape(jnp.float32, rows, keys), 2048, bound, bound), {}),
        "sparse_mla": (
            (
                _shape(jnp.bfloat16, rows, 64, 576),
                _shape(jnp.bfloat16, keys, 576),
                _shape(jnp.int32, rows, 2048),
            ),
            {"sm_scale": 0.0625, "v_dim": 512},
        ),
        "dense_mla": (
            (
                _shape(jnp.bfloat16, 1024, 64, 256),
                _shape(jnp.bfloat16, 1024, 64, 256),
                _shape(jnp.bfloat16, 1024, 64, 256),
                _shape(jnp.int32, 1024),
                _shape(jnp.int32, 1024),
            ),
            {"sm_scale": 0.0625},
        ),
    }


@pytest.mark.parametrize("device", BACKENDS)
def test_backend_table(device):
    for op, (args, options) in _calls().items():
        told = dsa_jax.explain(op, *args, device=device, **options)
        assert told.implementation == BACKENDS[device][op], told
        assert set(told.refusals) == set(NAMES) - {told.implementation}
        assert all(reason for reason in told.refusals.values())


def test_a_named_implementation_runs_or_says_why():
    scores = jnp.ones((2, 8))
    with pytest.raises(NotImplementedError, match=r"topk_indices: hopper cannot run on cpu: .*sm_90"):
        dsa_jax.topk_indices(scores, 2, implementation="hopper")
    with pytest.raises(ValueError, match=r"implementation must be None or one of .*got 'cuda'"):
        dsa_jax.topk_indices(scores, 2, implementation="cuda")


def test_an_op_without_a_kernel_says_so(monkeypatch):
    monkeypatch.setattr(dispatch, "_OPS", dict(dispatch._OPS))
    op = Op("nothing", xla=lambda x: x)
    assert "nothing has no hopper kernel" in str(op.explain(jnp.ones(1), device="sm_90"))
    with pytest.raises(ValueError, match="op must be one of"):
        dsa_jax.explain("softmax")
    assert op_named("topk_indices").implementations() == NAMES


def test_targets():
    assert target_of("gfx950").platform == "rocm" and target_of("sm_90").compute_capability == 90
    assert target_of("sm_120").shared_memory < target_of("sm_90").shared_memory
    assert target_of("gfx942").native_fp8 == "e4m3fnuz" and target_of("sm_80").native_fp8 is None


@pytest.mark.parametrize(
    "banned",
    [
        pytest.param(r"pl\.num_programs", id="wrong-grid-sizes-in-jax-0.11"),
        pytest.param(r"os\.environ|getenv", id="environment-variables"),
    ],
)
def test_no_source_uses(banned):
    assert len(SOURCES) > 40
    assert [path.name for path in SOURCES if re.search(banned, path.read_text())] == []


def test_kernels_know_nothing_of_models():
    """pallas_kernels imports jax and itself."""
    kernels = [path for path in SOURCES if "pallas_kernels" in path.parts]
    assert kernels and not any(re.search(r"^\s*(from|import) dsa_jax", path.read_text(), re.M) for path in kernels)


def test_import_starts_no_backend():
    """Importing takes no device: programs that fork, or set their devices up first, are not disturbed."""
    code = "import dsa_jax; from jax._src import xla_bridge; assert not xla_bridge._backends, xla_bridge._backends"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)
