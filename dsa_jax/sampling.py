"""How the next token is drawn from logits, on the device, one rule a row.

A draw at position p of a request depends on its logits, its settings and (seed, p), on nothing else: not on the batch,
the row or the step. So a request writes one text in any company, also where several tokens are verified in one step.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dsa_jax.checks import require

MAX_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Sampling:
    """A request's settings.

    temperature: 0 takes the likeliest token, the lowest id of equal ones; else logits are divided by it and drawn from.
    top_k: draw among the k likeliest only; 0 for all.
    top_p: then draw among the likeliest whose probabilities first reach top_p together; 1 for all.
    seed: of the draws, in 0..2^32 - 1.
    Raises ValueError naming the field, its value and the legal range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require(0.0 <= self.temperature < math.inf, "temperature", self.temperature, "at least 0 and finite")
        require(0 <= self.top_k <= 2**31 - 1, "top_k", self.top_k, "in 0..2147483647, 0 for all tokens")
        require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "more than 0 and at most 1")
        require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"in 0..{MAX_SEED}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """The settings of every row: temperature, top_p float32 [R], top_k int32 [R], seed uint32 [R]."""

    temperature: Any
    top_k: Any
    top_p: Any
    seed: Any

    @classmethod
    def of(cls, rows: Sequence[Sampling]) -> "SamplingRows":
        """On the host."""
        return cls(
            np.array([row.temperature for row in rows], np.float32),
            np.array([row.top_k for row in rows], np.int32),
            np.array([row.top_p for row in rows], np.float32),
            np.array([row.seed for row in rows], np.uint32),
        )

    def repeat(self, count: int) -> "SamplingRows":
        """Every row `count` times in a row."""
        return jax.tree.map(lambda x: jnp.repeat(x, count), self)


def sample(logits: Float[Array, "R V"], positions: Int[Array, " R"], rows: SamplingRows) -> Int[Array, " R"]:
    """The token at `positions` of each row's request."""
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Array:
        scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
        cut = jnp.any((rows.top_k > 0) | (rows.top_p < 1.0))
        kept = lax.cond(cut, lambda: _kept(scaled, rows), lambda: jnp.ones_like(scaled, dtype=bool))
        drawn = jax.vmap(_draw)(jnp.where(kept, scaled, -jnp.inf), positions, rows.seed)
        return jnp.where(rows.temperature > 0, drawn, likeliest)

    return lax.cond(jnp.any(rows.temperature > 0), draw, lambda: likeliest)


def _draw(logits: Array, position: Array, seed: Array) -> Array:
    """Gumbel noise by token: leaving tokens out does not change the others' noise.

    Threefry whatever generator jax is set to: the noise of "rbg" depends on the other rows of a vmap.
    """
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def _kept(logits: Float[Array, "R V"], rows: SamplingRows) -> Bool[Array, "R V"]:
    """Which stay: the top_k likeliest, of those the fewest that reach top_p; the lower id of equal ones first."""
    order = jnp.argsort(-logits, axis=-1, stable=True)
    rank = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
    in_top_k = (rows.top_k[:, None] == 0) | (rank < rows.top_k[:, None])
    descending = jnp.where(in_top_k, jnp.take_along_axis(logits, order, axis=-1), -jnp.inf)
    probabilities = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    keep = in_top_k & ((before < rows.top_p[:, None]) | (rows.top_p[:, None] == 1.0))
    return jnp.put_along_axis(jnp.zeros_like(keep), order, keep, axis=-1, inplace=False)
