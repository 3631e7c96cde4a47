"""8-bit floats with a scale a block, the Hadamard rotation before them, and the byte layouts other engines use.

Values are stored as OCP e4m3 (float8_e4m3fn) on every device. The encoding of an array is its dtype, never a flag.
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float8e4m3fn, Float32, UInt8

from dsa_jax.checks import refuse, require, require_dtype, require_shape

ScaleFormat = Literal["float32", "ue8m0"]

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
# The largest finite value of each 8-bit float: 448, 240, 57344 and 57344.
FP8_MAX = {
    jnp.dtype(kind): float(jnp.finfo(kind).max)
    for kind in (jnp.float8_e4m3fn, jnp.float8_e4m3fnuz, jnp.float8_e5m2, jnp.float8_e5m2fnuz)
}
BLOCK = 128
AMAX_FLOOR = 1e-4  # DeepSeek's: a block of zeros has a scale too


def is_fp8(array: Any) -> bool:
    return jnp.dtype(array.dtype) in FP8_MAX


def require_one_fp8_kind(**arrays: Any) -> None:
    """Raises TypeError for two 8-bit floats of different kinds: e4m3fnuz read as e4m3fn doubles every value."""
    kinds = {name: str(array.dtype) for name, array in arrays.items() if is_fp8(array)}
    if len(set(kinds.values())) > 1:
        got = ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
        raise TypeError(f"8-bit floats must be of one kind, got {got}")


def quantize(
    x: Float[Array, "*lead D"], *, block: int = BLOCK, scale_format: ScaleFormat
) -> tuple[Float8e4m3fn[Array, "*lead D"], Float32[Array, "*lead blocks"]]:
    """e4m3 values and one scale for each block of the last axis:

        scale = max(amax(|x|), 1e-4) / 448,  rounded up to a power of two for "ue8m0"
        values = e4m3(clip(x / scale, -448, 448)),  to nearest, ties to even

    x: a float of 16 or 32 bits; infinities count as the largest float32. A NaN makes its whole block and the scale NaN.
    block: elements a scale; the last block may be shorter, so the scales are [..., ceil(D / block)].
    scale_format: "float32", or "ue8m0" for scales that are powers of two (still held in float32).
    The bits are the same on every device. Raises ValueError for another dtype, block < 1 and an unknown scale_format.
    """
    require(not is_fp8(x), "x's dtype", x.dtype, "a float of 16 or 32 bits")
    require(block >= 1, "block", block, "at least 1")
    if scale_format not in ("float32", "ue8m0"):
        refuse("scale_format", repr(scale_format), "'float32' or 'ue8m0'")
    largest = float(jnp.finfo(jnp.float32).max)
    blocks = _to_blocks(jnp.clip(x.astype(jnp.float32), -largest, largest), block)
    amax = jnp.maximum(jnp.max(jnp.abs(blocks), axis=-1, keepdims=True), AMAX_FLOOR)
    scale = amax * jnp.float32(1 / FP8_MAX[E4M3])
    if scale_format == "ue8m0":
        scale = round_up_to_power_of_two(scale)
    scaled = _nearest_quotient(blocks, scale, blocks / scale)
    # Jax casts do not saturate: anything from 465 up would turn into NaN.
    values = jnp.clip(scaled, -FP8_MAX[E4M3], FP8_MAX[E4M3]).astype(E4M3)
    return _from_blocks(values, x.shape), scale[..., 0]


def dequantize(
    values: Float[Array, "*lead D"], scale: Float32[Array, "*lead blocks"], *, block: int = BLOCK
) -> Float32[Array, "*lead D"]:
    """values * scale of the block, in float32. Raises ValueError if `scale` is not [..., ceil(D / block)]."""
    require(block >= 1, "block", block, "at least 1")
    num_blocks = math.ceil(values.shape[-1] / block)
    require_shape("scale", scale, (*values.shape[:-1], num_blocks), f"[..., ceil(D / {block})]")
    return _from_blocks(_to_blocks(values.astype(jnp.float32), block) * scale[..., None], values.shape)


def round_up_to_power_of_two(x: Float32[Array, "*s"]) -> Float32[Array, "*s"]:
    """2^ceil(log2(x)) for x > 0, exactly: a bit of the mantissa carries into the exponent. NaN and inf stay.

    exp2(ceil(log2(x))) would not do: XLA's log2 and exp2 are approximate, and miss even at powers of two.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x)


def hadamard(x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
    """x @ H_D * D^-0.5, H_D the Sylvester-Hadamard matrix: keeps dot products, spreads outliers before quantisation.

    x: D a power of two. Computed in float32 and rounded to x's dtype; DeepSeek's indexer rotates in bfloat16.
    A butterfly of log2(D) steps, so a row's bits do not depend on its batch. Raises ValueError if D is no power of two.
    """
    width = x.shape[-1]
    require(width >= 1 and width & (width - 1) == 0, "x's last axis", width, "a power of two")
    y = x.astype(jnp.float32)
    for _ in range(width.bit_length() - 1):  # each step mixes the index's top bit and moves it to the bottom
        a, b = y[..., : width // 2], y[..., width // 2 :]
        y = jnp.stack([a + b, a - b], axis=-1).reshape(x.shape)
    return (y * width**-0.5).astype(x.dtype)


def quantize_index_query(
    q: Float[Array, "*lead H D"], weights: Float32[Array, "*lead H"], *, scale_format: ScaleFormat = "ue8m0"
) -> tuple[Float8e4m3fn[Array, "*lead H D"], Float32[Array, "*lead H"]]:
    """The indexer's query in e4m3, one scale a head, with the scale folded into the head's weight.

    q: index queries, after RoPE (and `hadamard`, where the keys had it).
    weights: head weights in float32, with H^-0.5 and D^-0.5 in them.
    scale_format: as in `quantize`; ue8m0, DeepSeek's choice for the indexer, is exact to multiply with.
    Returns (q8, weights * scale). Raises ValueError for weights of another dtype or shape.
    """
    require_shape("weights", weights, tuple(q.shape[:-1]), "[..., H]")
    require_dtype("weights", weights, jnp.float32)
    values, scale = quantize(q, block=q.shape[-1], scale_format=scale_format)
    return values, weights * scale[..., 0]


def pack_latent_rows(
    nope: Float8e4m3fn[Array, "*lead R"],
    scale: Float32[Array, "*lead blocks"],
    rope: BFloat16[Array, "*lead dr"],
    *,
    row_bytes: int | None = None,
) -> UInt8[Array, "*lead bytes"]:
    """FlashMLA's row of the fp8 latent cache: R e4m3 bytes, the float32 scales, dr bfloat16; little endian.

    656 bytes for R = 512 (4 scales) and dr = 64.
    row_bytes: a wider record; the bytes past the content are zero.
    Raises ValueError for shapes that do not fit and for a row_bytes that is too small.
    """
    lead = tuple(nope.shape[:-1])
    require_dtype("nope", nope, E4M3)
    require_dtype("scale", scale, jnp.float32)
    require_dtype("rope", rope, jnp.bfloat16)
    require_shape("scale", scale, (*lead, math.ceil(nope.shape[-1] / BLOCK)), f"[..., ceil(R / {BLOCK})]")
    require_shape("rope", rope, (*lead, None), "[..., dr]")
    rows = jnp.concatenate([_to_bytes(nope), _to_bytes(scale), _to_bytes(rope)], axis=-1)
    if row_bytes is None:
        return rows
    require(row_bytes >= rows.shape[-1], "row_bytes", row_bytes, f"at least {rows.shape[-1]}")
    return jnp.pad(rows, [(0, 0)] * len(lead) + [(0, row_bytes - rows.shape[-1])])


def unpack_latent_rows(
    rows: UInt8[Array, "*lead bytes"], *, kv_lora_rank: int, qk_rope_head_dim: int
) -> tuple[Float8e4m3fn[Array, "*lead R"], Float32[Array, "*lead blocks"], BFloat16[Array, "*lead dr"]]:
    """The (nope, scale, rope) that `pack_latent_rows` packed. Raises ValueError if a row is too short for them."""
    require_dtype("rows", rows, jnp.uint8)
    rope_start = kv_lora_rank + 4 * math.ceil(kv_lora_rank / BLOCK)
    end = rope_start + 2 * qk_rope_head_dim
    require(rows.shape[-1] >= end, "rows' last axis", rows.shape[-1], f"at least {end} bytes")
    nope = _from_bytes(rows[..., :kv_lora_rank], E4M3)
    scale = _from_bytes(rows[..., kv_lora_rank:rope_start], jnp.float32)
    return nope, scale, _from_bytes(rows[..., rope_start:end], jnp.bfloat16)


def pack_index_pages(
    k: Float8e4m3fn[Array, "pages page D"], scale: Float32[Array, "pages page"]
) -> UInt8[Array, "pages bytes"]:
    """DeepGEMM's page of index keys: the D e4m3 bytes of all its tokens, then all their float32 scales, little endian.

    page * (D + 4) bytes a page, 132 a token for D = 128. DeepGEMM takes it viewed as [pages, page, 1, D + 4], though
    the bytes of a token do not lie together. Raises ValueError for shapes that do not fit.
    """
    require_dtype("k", k, E4M3)
    require_dtype("scale", scale, jnp.float32)
    require_shape("k", k, (None, None, None), "[pages, page, D]")
    require_shape("scale", scale, tuple(k.shape[:2]), "[pages, page]")
    return jnp.concatenate([_to_bytes(k).reshape(k.shape[0], k.shape[1] * k.shape[2]), _to_bytes(scale)], axis=-1)


def unpack_index_pages(
    pages: UInt8[Array, "pages bytes"], *, index_head_dim: int
) -> tuple[Float8e4m3fn[Array, "pages page D"], Float32[Array, "pages page"]]:
    """The (k, scale) that `pack_index_pages` packed. Raises ValueError if a page is not a whole number of tokens."""
    require_dtype("pages", pages, jnp.uint8)
    require_shape("pages", pages, (None, None), "[pages, bytes]")
    page_size, rest = divmod(pages.shape[1], index_head_dim + 4)
    require(rest == 0, "pages' last axis", pages.shape[1], f"a multiple of index_head_dim + 4 = {index_head_dim + 4}")
    k = _from_bytes(pages[:, : page_size * index_head_dim], E4M3)
    return k.reshape(-1, page_size, index_head_dim), _from_bytes(pages[:, page_size * index_head_dim :], jnp.float32)


def _to_blocks(x: Array, block: int) -> Array:
    """[..., D] to [..., ceil(D / block), block], filled up with zeros."""
    width = x.shape[-1]
    num_blocks = math.ceil(width / block)
    if num_blocks == 1:
        block = width
    if num_blocks * block != width:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, num_blocks * block - width)])
    return x.reshape(*x.shape[:-1], num_blocks, block)


def _from_blocks(blocks: Array, shape: tuple[int, ...]) -> Array:
    return blocks.reshape(*shape[:-1], blocks.shape[-2] * blocks.shape[-1])[..., : shape[-1]]


def _nearest_quotient(a: Array, b: Array, q: Array) -> Array:
    """a / b rounded to nearest, from a quotient q within 2 ulp: all that XLA's division gives on GPUs, and not enough
    where a value lies between two e4m3 numbers.

    One Newton step. The residual sums exact products of 12-bit halves, so fusing multiply-adds changes nothing.
    """
    q_high, b_high = _high_half(q), _high_half(b)
    q_low, b_low = q - q_high, b - b_high
    residual = ((a - q_high * b_high) - q_high * b_low - q_low * b_high) - q_low * b_low
    return q + residual / b


def _high_half(x: Array) -> Array:
    """x with the low 12 bits of its 24-bit significand cleared."""
    return jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000), jnp.float32
    )


def _to_bytes(x: Array) -> Array:
    """[..., n] to uint8 [..., n * itemsize]."""
    itemsize = jnp.dtype(x.dtype).itemsize
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], x.shape[-1] * itemsize)


def _from_bytes(rows: Array, dtype: Any) -> Array:
    """uint8 [..., n * itemsize] to [..., n]."""
    itemsize = jnp.dtype(dtype).itemsize
    if itemsize > 1:
        rows = rows.reshape(*rows.shape[:-1], rows.shape[-1] // itemsize, itemsize)
    return jax.lax.bitcast_convert_type(rows, dtype)
