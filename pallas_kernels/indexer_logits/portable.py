"""Index scores through Pallas-Triton: sm_80 and newer, gfx942, gfx950; interpreted on a CPU.

Grid: one program for `group` queries of one request and a run of `keys_per_program` columns, that is
B * ceil(Q / group) * ceil(L / keys_per_program) programs. A program keeps its queries' heads, at most `dot_columns`
(query, head) pairs, as one operand of the dot and walks key tiles of `block_keys` as the other, so the sum over the
heads is a sum along the dot's second axis. Tiles that no query of the group can see are neither loaded nor computed:
they are written -inf.

e4m3 operands go to the matrix unit as they are where it takes e4m3fn. Elsewhere (sm_80, gfx942) their bytes are decoded
in the kernel to float16, exactly but for a factor of 2^-8 on either side, which the weights take back.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import triton_backend as triton
from pallas_kernels.indexer_logits.problem import (
    PagedKeys,
    Problem,
    nothing,
    paged_problem,
    ragged_problem,
    refuse_operands,
)
from pallas_kernels.target import Target, target_of
from pallas_kernels.tuning import tuned

_FLOAT8 = jnp.float8_e4m3fn
_DECODED_FACTOR = 2.0**16  # either operand decodes to 2^-8 of its value
# Pallas-Triton offsets are signed 32-bit numbers of elements for arrays of up to 2^32 bytes, 64-bit beyond.
_NARROW_OFFSETS = (2**31, 2**32)


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is cut. None of it depends on the number of queries or requests, so no row's bits do.

    block_keys: keys of one tile.
    dot_columns: (query, head) pairs of one tile, at most.
    keys_per_program: columns one program walks.
    decode_fp8: e4m3 bytes become float16 in the kernel, for matrix units without e4m3fn.
    num_warps, num_stages: Triton's.
    """

    block_keys: int = 128
    dot_columns: int = 128
    keys_per_program: int = 2048
    decode_fp8: bool = False
    num_warps: int = 4
    num_stages: int = 3


def indexer_logits(
    q: Num[Array, "M H D"],
    k: Num[Array, "N D"],
    weights: Float[Array, "M H"],
    starts: Int[Array, " M"],
    ends: Int[Array, " M"],
    *,
    k_scale: Float[Array, " N"] | None = None,
    clean_logits: bool = True,
    target: Target | str | None = None,
) -> Float[Array, "M N"]:
    """The logits of M queries over N keys, -inf outside [starts, ends), or there anything unless clean_logits.

    target: the device to compile for, if not this one.
    """
    problem = ragged_problem(q, k, weights, starts, ends, k_scale)
    config = config_indexer_logits(target_of(target), q, k, weights, starts, ends, k_scale=k_scale)
    return solve(problem, config, clean=clean_logits, interpret=_interpreted(target))[0]


def paged_indexer_logits(
    q: Num[Array, "B Q H D"],
    cache: PagedKeys,
    weights: Float[Array, "B Q H"],
    block_table: Int[Array, "B P"],
    seq_lens: Int[Array, " B"],
    *,
    clean_logits: bool = True,
    target: Target | str | None = None,
) -> Float[Array, "B Q L"]:
    """The logits of Q queries of B requests over L = P * page columns; query i sees keys < seq_lens - Q + i + 1."""
    problem = paged_problem(q, cache, weights, block_table, seq_lens)
    config = config_paged_indexer_logits(target_of(target), q, cache, weights, block_table, seq_lens)
    return solve(problem, config, clean=clean_logits, interpret=_interpreted(target))


def refuse_indexer_logits(target: Target, q: Any, k: Any, *args: Any, **options: Any) -> str | None:
    """Why this kernel cannot run there, or None."""
    config = config_indexer_logits(target, q, k, *args, **options)
    return refuse_operands(q, k) or _refuse_target(target) or _refuse_size(k) or _refuse_tiles(target, q, config)


def refuse_paged_indexer_logits(target: Target, q: Any, cache: PagedKeys, *args: Any, **options: Any) -> str | None:
    """Why this kernel cannot run there, or None."""
    if cache.k.shape[1] & (cache.k.shape[1] - 1):
        return f"pages must hold a power of two of tokens, got {cache.k.shape[1]}"
    config = config_paged_indexer_logits(target, q, cache, *args, **options)
    reason = refuse_operands(q, cache.k) or _refuse_target(target) or _refuse_size(cache.k)
    return reason or _refuse_tiles(target, q, config)


def config_indexer_logits(target: Target, q: Any, k: Any, *args: Any, **options: Any) -> Config:
    """The config this kernel would run with."""
    del args, options
    return _config("indexer_logits.portable", target, q, keys_per_program=2048)


def config_paged_indexer_logits(target: Target, q: Any, cache: PagedKeys, *args: Any, **options: Any) -> Config:
    """The config this kernel would run with. Decode has few rows: shorter runs of keys keep all cores busy."""
    del cache, args, options
    return _config("paged_indexer_logits.portable", target, q, keys_per_program=512)


@functools.partial(jax.jit, static_argnames=("config", "clean", "interpret"))
def solve(problem: Problem, config: Config, *, clean: bool = True, interpret: bool) -> Float[Array, "B Q L"]:
    """The logits of a problem with a given config. clean: -inf where no row sees a key, or else anything."""
    if problem.is_empty:
        return nothing(problem)
    batch, queries = problem.q.shape[:2]
    cut = _Cut.of(problem, config)
    q, k = problem.q, problem.k
    if cut.decode_fp8:
        q, k = (lax.bitcast_convert_type(x, jnp.uint8) for x in (q, k))
    optional = [x for x in (problem.k_scale, problem.block_table) if x is not None]
    return triton.launch(
        functools.partial(_kernel, cut=cut, clean=clean, has_scale=problem.k_scale is not None),
        (q, k, problem.weights, *problem.ranges(), *optional),
        out_shape=jax.ShapeDtypeStruct((batch, queries, problem.columns), jnp.float32),
        grid=batch * cut.groups * cut.runs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        name="indexer_logits",
        interpret=interpret,
    )


@dataclasses.dataclass(frozen=True)
class _Cut:
    """The static sizes of one launch.

    group: queries of one program; groups: how many cover a request's queries.
    heads_per_dot: heads one dot takes, a power of two; dots: how many cover all heads.
    tiles: key tiles of a row; tiles_per_run: of one program; runs: programs along a row.
    page: tokens of a page, or 0 where keys lie in one array; pages: how many the cache has.
    """

    queries: int
    heads: int
    dim: int
    columns: int
    page: int
    pages: int
    block_keys: int
    group: int
    groups: int
    heads_per_dot: int
    dots: int
    tiles: int
    tiles_per_run: int
    runs: int
    decode_fp8: bool

    @classmethod
    def of(cls, problem: Problem, config: Config) -> "_Cut":
        _, queries, heads, dim = problem.q.shape
        # Matrix units want at least 16 columns.
        heads_per_dot = min(max(pl.next_power_of_2(heads), 16), config.dot_columns)
        # The number of queries must not shape the dot, nor so the bits of a row: decode takes as wide a one as prefill.
        group = config.dot_columns // heads_per_dot
        tiles = pl.cdiv(problem.columns, config.block_keys)
        tiles_per_run = max(config.keys_per_program // config.block_keys, 1)
        return cls(
            queries=queries,
            heads=heads,
            dim=dim,
            columns=problem.columns,
            page=problem.k.shape[1] if problem.block_table is not None else 0,
            pages=problem.k.shape[0],
            block_keys=config.block_keys,
            group=group,
            groups=pl.cdiv(queries, group),
            heads_per_dot=heads_per_dot,
            dots=pl.cdiv(heads, heads_per_dot),
            tiles=tiles,
            tiles_per_run=tiles_per_run,
            runs=pl.cdiv(tiles, tiles_per_run),
            decode_fp8=config.decode_fp8 and problem.q.dtype == _FLOAT8,
        )


def _kernel(q_ref, k_ref, w_ref, start_ref, end_ref, *rest, cut: _Cut, clean: bool, has_scale: bool):
    scale_ref = rest[0] if has_scale else None
    table_ref = rest[-2] if cut.page else None
    out_ref = rest[-1]
    program = pl.program_id(0)
    request = program // (cut.groups * cut.runs)
    first_query = (program // cut.runs) % cut.groups * cut.group
    slots = first_query + jnp.arange(cut.group, dtype=jnp.int32)
    rows = jnp.minimum(slots, cut.queries - 1)  # past the last query: computed again, not stored
    starts, ends = start_ref[request, rows], end_ref[request, rows]
    low, high = _union(start_ref, end_ref, request, first_query, cut)
    operands = [_load_queries(q_ref, w_ref, request, rows, dot, cut) for dot in range(cut.dots)]

    def store(tile, values):
        columns = tile * cut.block_keys + jnp.arange(cut.block_keys, dtype=jnp.int32)
        mask = (columns[:, None] < cut.columns) & (slots[None, :] < cut.queries)
        triton.store(out_ref.at[request, slots[None, :], columns[:, None]], values, mask=mask)

    def skip(tile, _):
        store(tile, jnp.full((cut.block_keys, cut.group), -jnp.inf, jnp.float32))

    def score(tile, _):
        columns = tile * cut.block_keys + jnp.arange(cut.block_keys, dtype=jnp.int32)
        seen = jnp.minimum(columns, high - 1)  # no key, and no page, past the last visible one is touched
        inside = (columns[:, None] >= starts[None, :]) & (columns[:, None] < ends[None, :])
        where: tuple[Any, ...] = (seen,)
        if table_ref is not None:
            page = table_ref[request, seen // cut.page]
            where = jnp.clip(page, 0, cut.pages - 1), seen % cut.page
            inside = inside & ((page >= 0) & (page < cut.pages))[:, None]
        keys = _load_keys(k_ref, where, cut)
        logits = sum((_head_sum(keys, q, w, cut) for q, w in operands[1:]), _head_sum(keys, *operands[0], cut))
        if scale_ref is not None:
            logits = logits * scale_ref[where][:, None]
        store(tile, jnp.where(inside, logits, -jnp.inf))

    first = program % cut.runs * cut.tiles_per_run
    last = jnp.minimum(first + cut.tiles_per_run, cut.tiles)
    begin = jnp.clip(low // cut.block_keys, first, last)
    end = jnp.clip(pl.cdiv(high, cut.block_keys), begin, last)
    if clean:
        lax.fori_loop(first, begin, skip, None)
    lax.fori_loop(begin, end, score, None)
    if clean:
        lax.fori_loop(end, last, skip, None)


def _union(start_ref, end_ref, request, first_query, cut: _Cut):
    """The smallest [low, high) that holds every key that a query of the group sees; [columns, 0) if none sees any."""
    low, high = jnp.int32(cut.columns), jnp.int32(0)
    for slot in range(cut.group):
        row = jnp.minimum(first_query + slot, cut.queries - 1)
        start, end = start_ref[request, row], end_ref[request, row]
        low = jnp.where(start < end, jnp.minimum(low, start), low)
        high = jnp.where(start < end, jnp.maximum(high, end), high)
    return low, high


def _load_queries(q_ref, w_ref, request, rows, dot: int, cut: _Cut):
    """One dot's operand [D, pairs] and its weights [pairs], pairs = group * heads_per_dot; weight 0 past the heads."""
    pairs = cut.group * cut.heads_per_dot
    pair = jnp.arange(pairs, dtype=jnp.int32)
    row = jnp.broadcast_to(rows[:, None], (cut.group, cut.heads_per_dot)).reshape(pairs)
    head = dot * cut.heads_per_dot + pair % cut.heads_per_dot
    real = head < cut.heads
    head = jnp.minimum(head, cut.heads - 1)
    dims = jnp.arange(cut.dim, dtype=jnp.int32)
    q = triton.load(q_ref.at[request, row[:, None], head[:, None], dims[None, :]])
    w = triton.load(w_ref.at[request, row, head], mask=real, other=0.0)
    if cut.decode_fp8:
        q, w = _decode_e4m3(q), w * _DECODED_FACTOR
    return q.T, w


def _load_keys(k_ref, where, cut: _Cut):
    """The keys of one tile, [block_keys, D]."""
    dims = jnp.arange(cut.dim, dtype=jnp.int32)
    keys = triton.load(k_ref.at[(*(index[:, None] for index in where), dims[None, :])])
    return _decode_e4m3(keys) if cut.decode_fp8 else keys


def _head_sum(keys, q, weights, cut: _Cut):
    """sum_h weights[., h] * relu(keys . q[., h]): [block_keys, group]."""
    scores = triton.relu(triton.dot_f32(keys, q)) * weights[None, :]
    return scores.reshape(cut.block_keys, cut.group, cut.heads_per_dot).sum(axis=2)


def _decode_e4m3(code):
    """2^-8 times the value of e4m3fn bytes, as float16: the fields of either format line up, and so do subnormals."""
    bits = code.astype(jnp.uint16)
    magnitude = bits & 0x7F
    nan = jnp.uint16(0x7E00)
    half = jnp.where(magnitude == 0x7F, nan, magnitude << 7) | ((bits & 0x80) << 8)
    return lax.bitcast_convert_type(half, jnp.float16)


def _config(kernel: str, target: Target, q: Any, *, keys_per_program: int) -> Config:
    heads, dim = q.shape[-2:]
    is_fp8 = q.dtype == _FLOAT8
    # wgmma reads bf16 keys from shared memory; elsewhere they pass through registers, where 128 of them do not fit.
    heuristic = Config(
        block_keys=128 if is_fp8 or target.arch == "sm_90" else 64,
        keys_per_program=keys_per_program,
        decode_fp8=is_fp8 and target.native_fp8 != "e4m3fn",
        num_stages=1 if target.platform == "rocm" else 3,
    )
    return tuned(kernel, target, heuristic, heads=heads, dim=dim, itemsize=q.dtype.itemsize)


def _interpreted(target: Target | str | None) -> bool:
    return target_of(target).platform == "cpu"


def _refuse_target(target: Target) -> str | None:
    if target.platform == "cuda" and target.compute_capability < 80:
        return f"Triton kernels need sm_80 or newer, got {target.arch}"
    return None


def shared_bytes(target: Target, q: Any, config: Config) -> int:
    """An upper bound of what Triton takes. CUDA keeps the queries there, and the keys in flight beside them.

    On AMD either operand only passes through, on its way to registers.
    """
    heads, dim = q.shape[-2:]
    itemsize = q.dtype.itemsize
    operand = 2 if config.decode_fp8 else itemsize
    queries, keys = (operand * count * dim for count in (config.dot_columns, config.block_keys))
    if target.platform == "rocm":
        return max(queries, keys)
    in_flight = max(1, config.num_stages - 1) * config.block_keys * dim * itemsize
    return pl.cdiv(heads, config.dot_columns) * queries + in_flight + 2048


def _refuse_tiles(target: Target, q: Any, config: Config) -> str | None:
    needed = shared_bytes(target, q, config)
    if target.platform != "cpu" and needed > target.shared_memory:
        return f"its tiles take {needed} bytes of shared memory, a block of {target.arch} has {target.shared_memory}"
    return None


def _refuse_size(k: Any) -> str | None:
    size = k.size * k.dtype.itemsize
    if k.dtype.itemsize == 1 and _NARROW_OFFSETS[0] < size <= _NARROW_OFFSETS[1]:
        return f"offsets into one-byte keys of more than 2 and up to 4 GiB would wrap, got {size} bytes"
    return None
