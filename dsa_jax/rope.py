"""Rotary position embedding: interleaved and half-split pairs, yarn."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from dsa_jax.checks import refuse, require

RopeLayout = Literal["interleaved", "half_split"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Yarn (arXiv 2309.00071), with the field names of a Hugging Face config.

    factor: how many times longer the context is than the one trained on.
    original_max_position_embeddings: the context trained on.
    beta_fast, beta_slow: frequencies that turn at least beta_fast times in that context stay, those that turn at most
        beta_slow times are divided by factor, those between are mixed.
    mscale, mscale_all_dim: weights m of the gain 0.1 * m * ln(factor) + 1 in `attention_factor` and `softmax_scale`.
    """

    factor: int | float
    original_max_position_embeddings: int
    beta_fast: int | float = 32.0
    beta_slow: int | float = 1.0
    mscale: int | float = 1.0
    mscale_all_dim: int | float = 0.0

    def __post_init__(self) -> None:
        require(self.factor > 0, "factor", self.factor, "greater than 0")
        original = self.original_max_position_embeddings
        require(original > 0, "original_max_position_embeddings", original, "greater than 0")
        require(self.beta_slow > 0, "beta_slow", self.beta_slow, "greater than 0")
        require(self.beta_fast >= self.beta_slow, "beta_fast", self.beta_fast, f"at least beta_slow = {self.beta_slow}")

    def gain(self, mscale: int | float) -> float:
        """0.1 * mscale * ln(factor) + 1, or 1 where the context is not stretched."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


def rope_frequencies(head_dim: int, theta: int | float, scaling: RopeScaling | None) -> Float32[Array, "half"]:
    """f_i = theta^(-2i / head_dim), in radians a position; with yarn f_i * (1 - ramp_i) + f_i / factor * ramp_i, where

        dim(n) = head_dim * ln(original / (2 pi n)) / (2 ln(theta))
        lo = max(floor(dim(beta_fast)), 0),  hi = min(ceil(dim(beta_slow)), head_dim - 1)
        ramp_i = clip((i - lo) / max(hi - lo, 0.001), 0, 1)

    Computed in float64 and rounded once.

    head_dim: width of the rotated slice (qk_rope_head_dim), even; 0 gives no frequencies. The result is [head_dim / 2].
    theta: the base (rope_theta), greater than 1.
    scaling: yarn's parameters, or None for plain RoPE.
    Raises ValueError for an odd or negative head_dim and for theta <= 1.
    """
    require(head_dim >= 0 and head_dim % 2 == 0, "head_dim", head_dim, "even and at least 0")
    require(theta > 1, "theta", theta, "greater than 1")
    pair = np.arange(head_dim // 2, dtype=np.float64)
    frequencies = theta ** (-2.0 * pair / max(head_dim, 1))
    if scaling is not None:
        ramp = _yarn_ramp(pair, head_dim, theta, scaling)
        frequencies = frequencies * (1.0 - ramp) + frequencies / scaling.factor * ramp
    return jnp.asarray(frequencies, jnp.float32)


def _yarn_ramp(pair: np.ndarray, head_dim: int, theta: int | float, scaling: RopeScaling) -> np.ndarray:
    def dim(turns: int | float) -> float:
        return (
            head_dim
            * math.log(scaling.original_max_position_embeddings / (2 * math.pi * turns))
            / (2 * math.log(theta))
        )

    low = max(math.floor(dim(scaling.beta_fast)), 0)
    high = min(math.ceil(dim(scaling.beta_slow)), head_dim - 1)
    return np.clip((pair - low) / max(high - low, 0.001), 0.0, 1.0)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Multiplier of cos and sin: gain(mscale) / gain(mscale_all_dim), 1 where the two are equal and without yarn."""
    return 1.0 if scaling is None else scaling.gain(scaling.mscale) / scaling.gain(scaling.mscale_all_dim)


def softmax_scale(qk_head_dim: int, scaling: RopeScaling | None) -> float:
    """sm_scale of the main attention: qk_head_dim^-0.5, times gain(mscale_all_dim)^2 with yarn.

    qk_head_dim: qk_nope_head_dim + qk_rope_head_dim, also where the attention runs absorbed on wider vectors.
    """
    require(qk_head_dim > 0, "qk_head_dim", qk_head_dim, "greater than 0")
    gain = 1.0 if scaling is None else scaling.gain(scaling.mscale_all_dim)
    return qk_head_dim**-0.5 * gain**2


def apply_rope(
    x: Float[Array, "*x dr"],
    positions: Int[Array, "*p"],
    frequencies: Float32[Array, "half"],
    *,
    layout: RopeLayout,
    factor: float = 1.0,
) -> Float[Array, "*x dr"]:
    """Rotates every pair (a, b) of the last axis by angle = position * f_i: (a cos - b sin, b cos + a sin).

    The result is always half-split, [all a' | all b']: the interleaved layout is reordered, as in transformers. Query
    and key are reordered alike, so their dot products stay; a cached k_rope or index key is a permutation of what code
    that writes the pairs back interleaved would cache.

    x: [..., T, dr] or [..., T, H, dr], any float dtype; dr may be 0.
    positions: [..., T], the leading axes of x; a length of 1 fits any. Axes of x after them (heads) share a position.
        The angle is rounded to float32, as in the models; positions themselves are exact up to 2^24.
    frequencies: [dr / 2] from `rope_frequencies`.
    layout: which elements form pair i: "interleaved" (x[2i], x[2i+1]) or "half_split" (x[i], x[i + dr/2]). The wrong
        one cannot be seen on short contexts and ruins long ones, so there is no default.
    factor: multiplies cos and sin, from `attention_factor`.
    Returns x's shape and dtype, computed in float32.
    Raises ValueError for an unknown layout and for shapes that do not fit.
    """
    _check_rope(x, positions, frequencies, layout)
    angle = positions.astype(jnp.float32)[..., None] * frequencies.reshape((1,) * positions.ndim + (-1,))
    angle = jnp.expand_dims(angle, tuple(range(positions.ndim, x.ndim - 1)))  # [*p, 1..., dr/2]
    cos, sin = jnp.cos(angle) * factor, jnp.sin(angle) * factor
    a, b = _pairs(x.astype(jnp.float32), layout)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _pairs(x: Array, layout: RopeLayout) -> tuple[Array, Array]:
    if layout == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _check_rope(x: Array, positions: Array, frequencies: Array, layout: str) -> None:
    if layout not in ("interleaved", "half_split"):
        refuse("layout", repr(layout), "'interleaved' or 'half_split'")
    width = 2 * frequencies.shape[0]
    require(x.ndim >= 1 and x.shape[-1] == width, "x's shape", list(x.shape), f"[..., {width}], two a frequency")
    lead = x.shape[: positions.ndim]
    fits = positions.ndim < x.ndim and all(p in (1, n) for p, n in zip(positions.shape, lead, strict=True))
    require(fits, "positions' shape", list(positions.shape), f"the leading axes of x's {list(x.shape)}")
