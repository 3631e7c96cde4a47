"""Drawing tokens on the device: the distribution, the cuts, and that a draw depends on its own row only."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax.sampling import Sampling, SamplingRows, sample

VOCAB = 19
LOGITS = np.random.default_rng(0).normal(size=(6, VOCAB)).astype(np.float32) * 2
draw = functools.cache(lambda: jax.jit(sample))()


def drawn(logits, positions, settings):
    return np.asarray(draw(jnp.asarray(logits), jnp.asarray(positions, jnp.int32), SamplingRows.of(settings)))


def many(logits, setting, count=6):
    """Tokens of one row at 600 * count positions."""
    rows = np.broadcast_to(logits, (6, VOCAB))
    return np.concatenate([drawn(rows, np.arange(6 * i, 6 * i + 6), [setting] * 6) for i in range(count * 100)])


def test_greedy_takes_the_lowest_of_the_likeliest():
    logits = LOGITS.copy()
    logits[0, [3, 7]] = 9.0
    want = logits.argmax(axis=1)
    np.testing.assert_array_equal(drawn(logits, np.arange(6), [Sampling()] * 6), want)
    mixed = [Sampling(), Sampling(temperature=1.0), *[Sampling()] * 4]
    np.testing.assert_array_equal(np.delete(drawn(logits, np.arange(6), mixed), 1), np.delete(want, 1))
    assert want[0] == 3


def test_draws_are_the_same_whatever_generator_jax_is_set_to():
    rows = SamplingRows.of([Sampling(temperature=1.5, seed=seed) for seed in range(6)])
    with jax.default_prng_impl("unsafe_rbg"):
        tokens = jax.jit(sample)(jnp.asarray(LOGITS), jnp.arange(6, dtype=jnp.int32), rows)
    np.testing.assert_array_equal(tokens, draw(jnp.asarray(LOGITS), jnp.arange(6, dtype=jnp.int32), rows))


def test_a_draw_depends_on_its_logits_settings_seed_and_position_only():
    settings = [Sampling(temperature=1.5, seed=seed, top_p=0.9, top_k=12) for seed in (7, 7, 8, 7, 2**32 - 1, 0)]
    logits = np.tile(LOGITS[:1], (6, 1))
    together = drawn(logits, [5] * 6, settings)
    assert together[0] == together[1] == together[3]
    other_company = drawn(LOGITS, [5] * 6, [settings[0], *[Sampling(temperature=9.0)] * 5])
    assert other_company[0] == together[0]
    by_position = [drawn(logits, [p] * 6, settings)[0] for p in range(40)]
    by_seed = [drawn(logits, [5] * 6, [Sampling(temperature=1.5, seed=s)] * 6)[0] for s in range(40)]
    assert len(set(by_position)) > 3 and len(set(by_seed)) > 3


def test_the_distribution():
    tokens = many(LOGITS[0], Sampling(temperature=2.0, seed=3))
    shares = np.bincount(tokens, minlength=VOCAB) / len(tokens)
    want = np.exp(LOGITS[0] / 2.0)
    want /= want.sum()
    np.testing.assert_allclose(shares, want, atol=4 * np.sqrt(want.max() / len(tokens)))


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        (dict(top_k=1), 1),
        (dict(top_k=3), 3),
        (dict(top_k=VOCAB + 9), VOCAB),
        (dict(top_p=1e-6), 1),
        (dict(top_k=4, top_p=0.5), None),
        (dict(top_p=0.7), None),
    ],
    ids=str,
)
def test_cuts(cut, kept):
    """Against the rule in numpy: top_k, then the fewest that reach top_p of what is left."""
    order = np.argsort(-LOGITS[1], kind="stable")[: cut.get("top_k") or VOCAB]
    if "top_p" in cut:
        shares = np.exp(LOGITS[1][order].astype(np.float64))
        shares /= shares.sum()
        order = order[: int(np.searchsorted(np.cumsum(shares), cut["top_p"])) + 1]
    assert kept is None or len(order) == kept
    tokens = many(LOGITS[1], Sampling(temperature=1.0, **cut), count=2)
    assert set(tokens) <= set(order.tolist())
    assert len(set(tokens)) >= min(len(order), 3)


def test_equal_logits_are_cut_by_the_lower_id():
    tokens = many(np.zeros(VOCAB, np.float32), Sampling(temperature=1.0, top_k=5), count=1)
    assert set(tokens) == set(range(5))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (dict(temperature=-0.1), "temperature must be at least 0 and finite, got -0.1"),
        (dict(temperature=float("nan")), "temperature must be at least 0 and finite, got nan"),
        (dict(top_k=-1), "top_k must be in 0..2147483647, 0 for all tokens, got -1"),
        (dict(top_p=0.0), "top_p must be more than 0 and at most 1, got 0.0"),
        (dict(top_p=1.5), "top_p must be more than 0 and at most 1, got 1.5"),
        (dict(seed=-1), "seed must be in 0..4294967295, got -1"),
        (dict(seed=2**32), "seed must be in 0..4294967295, got 4294967296"),
    ],
    ids=str,
)
def test_bad_settings(setting, message, as_user):
    with pytest.raises(ValueError, match=message):
        Sampling(**setting)
