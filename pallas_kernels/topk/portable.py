"""Exact top-k of score rows through Pallas-Triton: sm_80 and newer, gfx942, gfx950; interpreted on a CPU.

A program takes one row after another. For each it
1. guesses a threshold that a little more than k scores should reach, from a sample of the row;
2. reads the row once and appends the scores that reach it, in column order, to a scratch buffer;
3. finds the k-th greatest of those by search and writes the columns of the k greatest.
A guess that leaves fewer than k scores, or more than the buffer holds, costs time alone: the row is searched itself.

Scores are compared as keys (`keys.py`), so that NaN and -inf never reach a threshold and 0.0 ties with -0.0.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float32, Int32

from pallas_kernels import triton_backend as triton
from pallas_kernels.target import Target, target_of
from pallas_kernels.topk.keys import LOWEST_KEY, NO_KEY, TOP_KEY, keys_of
from pallas_kernels.tuning import tuned

_UNLIMITED = 1 << 30
_NOWHERE = 1 << 30


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is cut.

    chunk: columns read at a time; a power of two of at most 32768.
    capacity: candidates the scratch buffer of a program holds; a power of two above k.
    samples: scores the threshold is guessed from; a power of two.
    programs: programs at most; each has a buffer of 8 * capacity bytes.
    num_warps, num_stages: Triton's.
    """

    chunk: int = 2048
    capacity: int = 4096
    samples: int = 2048
    programs: int = 1024
    num_warps: int = 4
    num_stages: int = 2


def topk_indices(
    scores: Float32[Array, "M N"],
    k: int,
    starts: Int32[Array, "M"] | None = None,
    ends: Int32[Array, "M"] | None = None,
    *,
    target: Target | str | None = None,
) -> Int32[Array, "M k"]:
    """The columns of the k greatest scores[m, starts[m]:ends[m]], lowest column first among equals; ascending, then -1.

    starts, ends: None, both of them, for whole rows.
    target: the device to compile for; None for the one that runs.
    """
    target = target_of(target)
    if starts is None or ends is None:
        starts = jnp.full_like(scores, 0, shape=scores.shape[:1], dtype=jnp.int32)
        ends = starts + scores.shape[1]
    return solve(scores, k, starts, ends, config_topk_indices(target, scores, k), interpret=target.platform == "cpu")


def refuse_topk_indices(target: Target, scores, k: int, starts=None, ends=None) -> str | None:
    """Why this kernel cannot run, or None."""
    del k, starts, ends
    if target.platform == "cuda" and target.compute_capability < 80:
        return f"Triton kernels need sm_80 or newer, got {target.arch}"
    if scores.dtype != jnp.float32:
        return f"scores must be float32, got {scores.dtype}"
    if scores.shape[1] >= 1 << 30:
        return f"columns are counted in 30 bits, got N = {scores.shape[1]}"
    return None


def config_topk_indices(target: Target, scores, k: int, starts=None, ends=None) -> Config:
    """The config this kernel would run with."""
    del starts, ends
    rows, columns = scores.shape
    few = rows <= (target.num_cores or 128)
    # A buffer of twice k keeps both kinds of wrong guess rare; a sample of every 16th score keeps the buffer small.
    capacity = min(max(2 * pl.next_power_of_2(k), 1024), 2 * pl.next_power_of_2(max(columns, 8)))
    heuristic = Config(
        capacity=capacity,
        samples=min(max(pl.next_power_of_2(columns) // 16, 1024), 8192),
        chunk=min(4096 if few else 2048, max(pl.next_power_of_2(columns), 16)),
        # A row a core or fewer: more warps a row. A buffer of 8192 does not fit four warps' registers.
        num_warps=8 if few or capacity > 4096 else 4,
    )
    return tuned("topk.portable", target, heuristic, m=rows, n=columns, k=k)


@functools.partial(jax.jit, static_argnames=("k", "config", "interpret"))
def solve(scores, k: int, starts, ends, config: Config, *, interpret: bool) -> Int32[Array, "M k"]:
    """topk_indices with a given config."""
    rows, columns = scores.shape
    if rows == 0 or columns == 0:
        return jnp.full((rows, k), -1, jnp.int32)
    programs = min(rows, config.programs)
    buffer = jax.ShapeDtypeStruct((programs, config.capacity), jnp.int32)
    indices, _, _ = triton.launch(
        functools.partial(_kernel, k=k, config=config, programs=programs, interpret=interpret),
        (scores, starts, ends),
        out_shape=(jax.ShapeDtypeStruct((rows, k), jnp.int32), buffer, buffer),
        grid=programs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        name="topk_indices",
        interpret=interpret,
    )
    return indices


def _kernel(scores_ref, starts_ref, ends_ref, out_ref, keys_ref, columns_ref, *, k, config, programs, interpret):
    """Rows program_id, program_id + programs, ... one after another, with one buffer of keys_ref and columns_ref."""
    program = pl.program_id(0)
    rows, columns = scores_ref.shape
    buffer = _Line(keys_ref, program), _Line(columns_ref, program)

    def step(row):
        start = jnp.clip(starts_ref[row], 0, columns)
        end = jnp.clip(ends_ref[row], start, columns)
        scores, out = _Scores(_Line(scores_ref, row), start, end, config.chunk), _Line(out_ref, row)
        threshold = lax.cond(
            end - start > config.capacity,
            lambda: _guess(scores, k, config),
            lambda: start * 0 + LOWEST_KEY,  # the Triton lowering takes no literal as a branch's result
        )
        count = _collect(scores, threshold, k, config.capacity, buffer)
        _sync(interpret)
        fits = (count <= config.capacity) & ((count >= k) | (threshold == LOWEST_KEY))
        chosen = lax.cond(
            fits,
            lambda: _from_buffer(buffer, config.capacity, count, threshold, k, out),
            lambda: _from_row(scores, k, out),
        )
        slots = jnp.arange(pl.next_power_of_2(k), dtype=jnp.int32)
        out.store(slots, jnp.full_like(slots, -1), mask=(slots >= chosen) & (slots < k))
        _sync(interpret)  # the next row's candidates overwrite this row's
        return row + programs

    lax.while_loop(lambda row: row < rows, step, program)


@dataclasses.dataclass(frozen=True)
class _Line:
    """One row of a matrix in memory."""

    ref: Any
    row: jax.Array

    def load(self, slots, **masking):
        return triton.load(self.ref.at[self.row, slots], **masking)

    def store(self, slots, values, *, mask):
        # The interpreter writes a masked lane's old value back, over what another lane puts there: send it elsewhere.
        triton.store(self.ref.at[self.row, jnp.where(mask, slots, _NOWHERE)], values, mask=mask)


@dataclasses.dataclass(frozen=True)
class _Scores:
    """Columns [start, end) of a row of scores, read in chunks."""

    line: _Line
    start: jax.Array
    end: jax.Array
    chunk: int

    @property
    def chunks(self):
        return pl.cdiv(self.end - self.start, self.chunk)

    def load(self, i):
        """Keys and columns of the i-th chunk; NO_KEY past the end."""
        columns = self.start + i * self.chunk + jnp.arange(self.chunk, dtype=jnp.int32)
        return keys_of(self.line.load(columns, mask=columns < self.end, other=jnp.nan)), columns

    def count(self, key):
        return lax.fori_loop(0, self.chunks, lambda i, n: n + _count(self.load(i)[0], key), jnp.int32(0))


def _guess(scores: _Scores, k, config):
    """A key that more than k, but not more than `capacity` scores of the row should reach.

    The rank r of `samples` scores stands for a rank of n * r / samples in the row, give or take a standard deviation of
    sqrt(k * n / samples). Aims 4 of them above k, but not past the middle between k and the capacity.
    """
    length = scores.end - scores.start
    total = length.astype(jnp.float32)
    slots = jnp.arange(config.samples, dtype=jnp.int32)
    # Runs of four neighbours, evenly spread.
    run = ((slots // 4).astype(jnp.float32) * (total * (4 / config.samples))).astype(jnp.int32)
    columns = jnp.minimum(scores.start + run + slots % 4, scores.end - 1)
    keys = keys_of(scores.line.load(columns))
    aim = jnp.minimum(k + 4.0 * jnp.sqrt(total * (k / config.samples)), (k + config.capacity) / 2)
    rank = (aim * config.samples / total).astype(jnp.int32) + 1
    valid = _count(keys, LOWEST_KEY)
    slack = rank // 8
    lowest, high = 0 * rank + LOWEST_KEY, 0 * rank + TOP_KEY + 1
    search = functools.partial(_search, functools.partial(_count, keys), lowest, valid, high, rank, slack)
    return lax.cond(valid > rank + slack, lambda: search()[0], lambda: lowest)


def _collect(scores: _Scores, threshold, k, capacity, buffer):
    """Appends what reaches the threshold to the buffer, in column order: all above it, and the first k equal to it.

    Returns how many there are, which may be more than the capacity; the buffer then holds the first.
    """

    def step(i, counts):
        keys, columns = scores.load(i)
        slots, kept, counts = _place(keys, threshold, k, counts)
        kept &= slots < capacity
        for line, values in zip(buffer, (keys, columns), strict=True):
            line.store(slots, values, mask=kept)
        return counts

    above, equal = lax.fori_loop(0, scores.chunks, step, (jnp.int32(0), jnp.int32(0)))
    return above + jnp.minimum(equal, k)


def _from_buffer(buffer, capacity, count, threshold, k, out):
    """Writes the columns of the k greatest of the buffer's `count` candidates; returns how many were written."""
    slots = jnp.arange(capacity, dtype=jnp.int32)
    keys = buffer[0].load(slots, mask=slots < count, other=NO_KEY)
    columns = buffer[1].load(slots, mask=slots < count, other=0)
    key, quota = lax.cond(
        count > k,
        lambda: _kth(functools.partial(_count, keys), threshold, count, jnp.max(keys), k),
        lambda: (threshold, 0 * count + _UNLIMITED),
    )
    zero = 0 * count
    slots, kept, (above, equal) = _place(keys, key, quota, (zero, zero))
    out.store(slots, columns, mask=kept)
    return above + jnp.minimum(equal, quota)


def _from_row(scores: _Scores, k, out):
    """Does without the buffer: searches the row itself, reading it once for every probe."""
    valid = scores.count(LOWEST_KEY)
    lowest = 0 * valid + LOWEST_KEY
    key, quota = lax.cond(
        valid > k,
        lambda: _kth(scores.count, lowest, valid, 0 * valid + TOP_KEY, k),
        lambda: (lowest, 0 * valid + _UNLIMITED),
    )

    def step(i, counts):
        keys, columns = scores.load(i)
        slots, kept, counts = _place(keys, key, quota, counts)
        out.store(slots, columns, mask=kept)
        return counts

    above, equal = lax.fori_loop(0, scores.chunks, step, (jnp.int32(0), jnp.int32(0)))
    return above + jnp.minimum(equal, quota)


def _place(keys, threshold, quota, counts):
    """Where the keys above the threshold and the first `quota` equal to it go.

    counts: how many keys came before, above the threshold and equal to it.
    Returns the slots, which keys have one, and the counts with these keys.
    """
    above, equal = keys > threshold, keys == threshold
    # Both counts of a chunk in one prefix sum: 16 bits each.
    ones = jnp.where(above, 1, jnp.where(equal, 1 << 16, 0)).astype(jnp.int32)
    sums = jnp.cumsum(ones)
    total = jnp.sum(ones)
    rank_above = counts[0] + (sums & 0xFFFF)
    rank_equal = counts[1] + lax.shift_right_logical(sums, 16)
    kept = above | (equal & (rank_equal <= quota))
    slots = rank_above + jnp.minimum(rank_equal, quota) - 1
    return slots, kept, (counts[0] + (total & 0xFFFF), counts[1] + lax.shift_right_logical(total, 16))


def _kth(count, low, count_low, top, k):
    """The k-th greatest key and how many equal to it belong to the k greatest; low is reached by count_low > k keys.

    Where a key is found that exactly k reach, it stands for the k-th, and all equal to it belong.
    """
    key, reached, above = _search(count, low, count_low, top + 1, k + 0 * low, 0 * low)
    return key, jnp.where(reached == k, _UNLIMITED, k - above)


def _search(count, low, count_low, high, rank, slack):
    """The greatest key that at least `rank` keys reach, or any that rank to rank + slack reach.

    count: count(key) is how many reach a key.
    low, high: keys with count(low) = count_low >= rank and count(high) = 0 < rank.
    Returns the key, how many reach it, and, where those are more than rank + slack, how many reach the next.
    """

    def probe(state):
        low, high, count_low, count_high, step = state
        width = (high - low).astype(jnp.uint32)
        # Scores mostly spread smoothly: a straight line between the ends guesses well, for a while.
        share = (count_low - rank).astype(jnp.float32) / (count_low - count_high).astype(jnp.float32)
        guess = (width.astype(jnp.float32) * share).astype(jnp.uint32)
        offset = jnp.where(step < 12, guess, width // 2)
        middle = low + jnp.clip(offset, 1, width - 1).astype(jnp.int32)
        reached = count(middle)
        enough = reached >= rank
        return (
            jnp.where(enough, middle, low),
            jnp.where(enough, high, middle),
            jnp.where(enough, reached, count_low),
            jnp.where(enough, count_high, reached),
            step + 1,
        )

    def unfinished(state):
        low, high, count_low, _, _ = state
        return (count_low > rank + slack) & (high - low != 1)

    state = lax.while_loop(unfinished, probe, (low, high, count_low, 0 * rank, 0 * rank))
    return state[0], state[2], state[3]


def _count(keys, key):
    return jnp.sum((keys >= key).astype(jnp.int32))


def _sync(interpret: bool) -> None:
    """Makes what the program's threads wrote to the buffer visible to all of them."""
    if not interpret:
        triton.barrier()
