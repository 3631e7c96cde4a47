"""Attention of every row over its own range of keys, a key and a value a head, through Pallas-Triton.

A program takes block_rows rows of one head and goes through the blocks of keys that any of them sees, with an online
softmax. Blocks are cut from key 0 on, and one that a row does not see leaves its sums as they are to the last bit, so a
row does not depend on its neighbours. Programs of a head are neighbours, the rows that usually see most first.

Shared memory: the queries, and num_stages blocks of keys and of values.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels import triton_backend as triton
from pallas_kernels.softmax import LOG2E
from pallas_kernels.target import Target, target_of
from pallas_kernels.tuning import tuned

_MAX_WIDTH = 512


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is cut: rows of a program, keys of a block, and Triton's num_warps and num_stages."""

    block_rows: int = 128
    block_keys: int = 64
    num_warps: int = 8
    num_stages: int = 2


def dense_mla(
    q: BFloat16[Array, "M H D"],
    k: BFloat16[Array, "N H D"],
    v: BFloat16[Array, "N H V"],
    starts: Int32[Array, " M"],
    ends: Int32[Array, " M"],
    *,
    sm_scale: float,
    target: Target | str | None = None,
) -> tuple[BFloat16[Array, "M H V"], Float32[Array, "M H"]]:
    """out and the natural log-sum-exp of every row over the keys [starts, ends); 0 and -inf where there are none.

    target: the device to compile for; None for the one that runs.
    """
    target = target_of(target)
    config = config_dense_mla(target, q, k, v, starts, ends, sm_scale=sm_scale)
    assert config is not None, "refuse_dense_mla comes first"
    return solve(q, k, v, starts, ends, config, sm_scale=float(sm_scale), interpret=target.platform == "cpu")


def refuse_dense_mla(target: Target, q: Any, k: Any, v: Any, starts: Any, ends: Any, *, sm_scale: float) -> str | None:
    """Why this kernel cannot run, or None."""
    if target.platform == "cuda" and target.compute_capability < 80:
        return f"Triton kernels need sm_80 or newer, got {target.arch}"
    if q.dtype != jnp.bfloat16:
        return f"q, k and v must be bfloat16, got {q.dtype}"
    if max(q.shape[-1], v.shape[-1]) > _MAX_WIDTH:
        return f"heads must be at most {_MAX_WIDTH} wide, got {q.shape[-1]} and {v.shape[-1]}"
    if config_dense_mla(target, q, k, v, starts, ends, sm_scale=sm_scale) is None:
        return f"no block of its keys fits {target.shared_memory} bytes of shared memory"
    return None


def config_dense_mla(
    target: Target, q: Any, k: Any, v: Any, starts: Any, ends: Any, *, sm_scale: float
) -> Config | None:
    """The config this kernel would run with, the largest that fits the shared memory; None if none does.

    The number of rows plays no part: a row's bits must not depend on its batch.
    """
    del k, starts, ends, sm_scale
    widths = q.shape[-1], v.shape[-1]
    if target.platform == "cpu":
        return Config()
    choices = (
        Config(),
        Config(block_rows=64),
        Config(block_rows=64, block_keys=32, num_warps=4),
        Config(block_rows=32, block_keys=32, num_warps=4),
        Config(block_rows=16, block_keys=16, num_warps=4),
    )
    if target.platform == "rocm":
        choices = choices[2:]  # of 512 registers eight warps leave a thread 256, and tiles of 64 keys spill
    elif widths[1] > 128:
        choices = choices[1:]  # accumulators of 128 rows would spill
    fitting = (config for config in choices if shared_bytes(target, config, *widths) <= target.shared_memory)
    heuristic = next(fitting, None)
    if heuristic is None:
        return None
    return tuned("dense_mla.portable", target, heuristic, heads=q.shape[1], width=widths[0], value=widths[1])


def shared_bytes(target: Target, config: Config, width: int, value_width: int) -> int:
    """An upper bound of what Triton takes: the queries, and keys and values of every stage.

    On AMD the queries only pass through, before the keys come, and rows are padded; gfx942 has one stage there.
    """
    columns, value_columns = (sum(chunk.size for chunk in _chunks(w)) for w in (width, value_width))
    queries, stage = 2 * config.block_rows * columns, 2 * config.block_keys * (columns + value_columns)
    if target.platform == "rocm":
        return max(queries, (1 if target.arch == "gfx942" else config.num_stages) * stage * 9 // 8)
    return queries + config.num_stages * stage + 2048


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """size columns, a power of two, from start on; width of them are there."""

    start: int
    size: int
    width: int


def _chunks(width: int) -> tuple[_Chunk, ...]:
    """A width as powers of two of at least 16, the largest first: 192 is 128 and 64."""
    chunks, start = [], 0
    while start < width:
        size = max(16, 1 << ((width - start).bit_length() - 1))
        chunks.append(_Chunk(start, size, min(size, width - start)))
        start += size
    return tuple(chunks)


@functools.partial(jax.jit, static_argnames=("config", "sm_scale", "interpret"))
def solve(q, k, v, starts, ends, config: Config, *, sm_scale: float, interpret: bool):
    """dense_mla with a given config."""
    (rows, heads, _), (keys, _, value_width) = q.shape, v.shape
    if 0 in (rows, keys):
        return jnp.zeros((rows, heads, value_width), q.dtype), jnp.full((rows, heads), -jnp.inf, jnp.float32)
    # In a product 0 * NaN would carry a value that is not finite to rows that do not see it: such values go in as 0,
    # and the rows that do see one are made NaN.
    finite = jnp.isfinite(v)
    broken = jnp.any(~finite, axis=-1).astype(jnp.float32)
    return triton.launch(
        functools.partial(_kernel, config=config, scale_log2=sm_scale * LOG2E),
        (q, k, jnp.where(finite, v, 0), broken, starts, ends),
        out_shape=(
            jax.ShapeDtypeStruct((rows, heads, value_width), q.dtype),
            jax.ShapeDtypeStruct((rows, heads), jnp.float32),
        ),
        grid=heads * pl.cdiv(rows, config.block_rows),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        name="dense_mla",
        interpret=interpret,
    )


def _kernel(q_ref, k_ref, v_ref, broken_ref, starts_ref, ends_ref, out_ref, lse_ref, *, config, scale_log2):
    """One program: a tile of rows of one head."""
    (rows, _, width), (keys, _, value_width) = q_ref.shape, v_ref.shape
    tiles = pl.cdiv(rows, config.block_rows)
    head = lax.div(pl.program_id(0), tiles)
    tile = tiles - 1 - lax.rem(pl.program_id(0), tiles)
    row = tile * config.block_rows + jnp.arange(config.block_rows)
    read = jnp.minimum(row, rows - 1)  # rows past the last repeat it, and are not stored
    starts, ends = (triton.load(ref.at[read]) for ref in (starts_ref, ends_ref))
    starts, ends = jnp.maximum(starts, 0), jnp.minimum(ends, keys)
    seen = ends > starts
    first = lax.div(jnp.min(jnp.where(seen, starts, keys)), config.block_keys)
    last = lax.div(jnp.max(jnp.where(seen, ends, 0)) + config.block_keys - 1, config.block_keys)
    queries = [_load(q_ref, read, head, chunk) for chunk in _chunks(width)]

    def block(i, carry):
        top, total, hit, sums = carry
        key = i * config.block_keys + jnp.arange(config.block_keys)
        read_key = jnp.minimum(key, keys - 1)
        parts = [
            triton.dot_f32(query, _load(k_ref, read_key, head, chunk).T)
            for query, chunk in zip(queries, _chunks(width), strict=True)
        ]
        inside = (key[None] >= starts[:, None]) & (key[None] < ends[:, None])
        logits = jnp.where(inside, functools.reduce(jnp.add, parts) * scale_log2, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(logits, axis=1))
        # While no key was visible the maximum is -inf, and -inf - -inf would be NaN.
        safe_top = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        p = jnp.exp2(logits - safe_top[:, None])
        decay = jnp.exp2(top - safe_top)
        total = total * decay + jnp.sum(p, axis=1)
        broken = triton.load(broken_ref.at[read_key, head])
        hit = jnp.maximum(hit, jnp.max(jnp.where(inside, broken[None], 0.0), axis=1))
        p = p.astype(v_ref.dtype)
        sums = tuple(
            acc * decay[:, None] + triton.dot_f32(p, _load(v_ref, read_key, head, chunk))
            for acc, chunk in zip(sums, _chunks(value_width), strict=True)
        )
        return new_top, total, hit, sums

    top = jnp.full((config.block_rows,), -jnp.inf, jnp.float32)
    none = jnp.zeros((config.block_rows,), jnp.float32)
    sums = tuple(jnp.zeros((config.block_rows, chunk.size), jnp.float32) for chunk in _chunks(value_width))
    top, total, hit, sums = lax.fori_loop(first, last, block, (top, none, none, sums))

    # A logit that is NaN reaches the sum but, on some devices, not the maximum.
    empty = total == 0.0
    lse = jnp.where(empty, -jnp.inf, (top + jnp.log2(jnp.where(empty, 1.0, total))) * math.log(2.0))
    # The interpreter writes a masked lane's old value back, over what another program puts there: send it elsewhere.
    place = jnp.where(row < rows, row, 1 << 30)
    triton.store(lse_ref.at[place, head], lse, mask=row < rows)
    factor = jnp.where(hit > 0.0, jnp.nan, 1.0 / jnp.where(empty, 1.0, total))
    for chunk, acc in zip(_chunks(value_width), sums, strict=True):
        columns = jnp.arange(chunk.size)
        triton.store(
            out_ref.at[place[:, None], head, chunk.start + columns[None]],
            (acc * factor[:, None]).astype(out_ref.dtype),
            mask=(row < rows)[:, None] & (columns < chunk.width)[None],
        )


def _load(ref, rows, head, chunk: _Chunk):
    """[rows, chunk.size] of one head, zeros past the chunk's width."""
    columns = jnp.arange(chunk.size)
    where = ref.at[rows[:, None], head, chunk.start + columns[None]]
    if chunk.width == chunk.size:
        return triton.load(where)
    mask = jnp.broadcast_to((columns < chunk.width)[None], (rows.shape[0], chunk.size))
    return triton.load(where, mask=mask, other=0.0)
