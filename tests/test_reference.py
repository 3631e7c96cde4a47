"""The specification against transformers' numbers."""

import golden_data as golden
import numpy as np
import pytest
import tolerances

from dsa_jax import reference


@pytest.fixture(scope="module", params=golden.NAMES)
def run(request):
    name = request.param
    want = golden.outputs(name)
    trace = reference.forward(
        golden.tensors(name),
        golden.config(name),
        golden.tokens(name),
        latent_norm_eps=golden.TRANSFORMERS_LATENT_EPS,
        row_block=17,  # not a divisor of the 64 rows
    )
    return name, want, trace


def test_logits(run):
    _, want, trace = run
    np.testing.assert_allclose(trace.logits, want["logits"], rtol=0, atol=tolerances.GOLDEN_LOGITS)
    np.testing.assert_allclose(trace.hidden, want["final_norm"], rtol=0, atol=tolerances.GOLDEN_LOGITS)


def test_layers(run):
    _, want, trace = run
    for i, hidden in enumerate(trace.layers[:-1]):
        np.testing.assert_allclose(hidden, want[f"hidden_{i + 1}"], rtol=0, atol=tolerances.GOLDEN_LOGITS)


def test_every_selection(run):
    name, want, trace = run
    topk = golden.config(name).index_topk
    for i, indices in enumerate(trace.indices):
        np.testing.assert_array_equal(indices, golden.indices_of_mask(want[f"topk_mask_{i}"], topk))


def test_sparsity_matters(run):
    """The dense model's logits are far away: a path that attends to everything cannot pass the tests above."""
    _, want, trace = run
    assert np.abs(trace.logits - want["logits_dense"]).max() > 100 * tolerances.GOLDEN_LOGITS


@pytest.mark.parametrize("name", golden.NAMES)
def test_latent_norm_eps_of_the_config(name):
    want = golden.outputs(name)
    trace = reference.forward(golden.tensors(name), golden.config(name), golden.tokens(name))
    np.testing.assert_allclose(trace.logits, want["logits_latent_eps_cfg"], rtol=0, atol=tolerances.GOLDEN_LOGITS)


@pytest.mark.parametrize(
    ("prefix", "hidden", "zero_first"),
    [("mtp", "final_norm", False), ("mtp_prenorm", "last_layer", False), ("mtp_zero0", "final_norm", True)],
    ids=["normed", "not-normed", "zeroed-first-embedding"],
)
def test_mtp(prefix, hidden, zero_first):
    want, config = golden.outputs("tiny_glm52"), golden.config("tiny_glm52")
    tensors, eps = golden.tensors("tiny_glm52"), golden.TRANSFORMERS_LATENT_EPS
    trace = reference.forward(tensors, config, golden.tokens("tiny_glm52"), latent_norm_eps=eps)
    taken = trace.hidden if hidden == "final_norm" else trace.layers[-1]
    draft = reference.mtp_forward(
        tensors, config, golden.tokens("tiny_glm52"), taken, latent_norm_eps=eps, zero_first_embedding=zero_first
    )
    np.testing.assert_allclose(draft.logits, want[f"{prefix}_logits"], rtol=0, atol=tolerances.GOLDEN_LOGITS)
    for row, indices in enumerate(np.asarray(draft.indices[0]).swapaxes(0, 1)):
        visible = np.where(want[f"{prefix}_topk_idx"][:, row] <= row, want[f"{prefix}_topk_idx"][:, row], 2**30)
        np.testing.assert_array_equal(np.where(indices < 0, 2**30, indices), np.sort(visible, axis=-1))
