"""Narrow caches end to end: how far every layer's hidden state and selection are from those over wide caches."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsa_jax.cache_error import _difference, _kept, cache_errors
from dsa_jax.config import DsaConfig
from dsa_jax.model import CausalLM

# Greatest median error of a layer's hidden states, and least share of the same keys, over 150 tokens.
BOUNDS = {"bfloat16": (6e-3, 0.98), "float8_e4m3fn": (0.25, 0.85)}


def test_error_of_every_layer_within_its_bound():
    model = CausalLM(DsaConfig.tiny(num_hidden_layers=3), rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 256, 150)
    for dtype, (hidden, kept) in BOUNDS.items():
        errors = cache_errors(model, tokens, dtype, against="float32")
        assert [error.layer for error in errors] == [0, 1, 2]
        assert all(0.0 < error.hidden < hidden for error in errors), errors
        assert [error.kept is None for error in errors] == [kind == "shared" for kind in model.config.indexer_types]
        assert all(error.kept is None or kept < error.kept <= 1.0 for error in errors), errors


def test_measures():
    want = jnp.array([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0]])
    assert _difference(want, want) == 0.0
    assert _difference(want + jnp.array([[0.5, 0.0], [0.0, 0.1], [9.0, 0.0]]), want) == pytest.approx(0.1)
    assert _kept(jnp.array([[1, 2, -1], [0, 3, 5]]), jnp.array([[1, 3, -1], [0, 3, 5]])) == 4 / 5
