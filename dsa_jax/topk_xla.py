"""Exact top-k in integer arithmetic: the same bits on every device, at a cost that the scores' values do not change.

Scores become int32 keys in the order of the scores. Binary search over the key's 32 bits finds each row's k-th greatest
key; the columns above it are taken, and of those equal to it the lowest until there are k. What is taken is kept as one
bit a column, from which the column numbers are read off in order.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WORD = 32
# Scores that one group of rows takes at a time. A CPU runs over them 32 times, twice as fast where its keys (4 bytes
# each) stay in a core's cache; a GPU needs more to be busy.
CPU_GROUP = 1 << 19
GPU_GROUP = 1 << 23

NONE = np.int32(-(2**31))  # the key of what is never taken
_INFINITY = np.int32(0x7F800000)


@functools.partial(jax.jit, static_argnames="k")
def topk_indices(scores, k, starts, ends):
    """See dsa_jax.topk.topk_indices."""
    rows, columns = scores.shape
    # A guess: under jit the device is not known. It changes nothing but the time.
    size = _group_rows(rows, columns, k, CPU_GROUP if jax.default_backend() == "cpu" else GPU_GROUP)
    if size == rows:
        return _top(scores, starts, ends, k)

    def step(i, out):
        first = jnp.minimum(i * size, rows - size)  # the last group overlaps the one before it
        scores_, starts_, ends_ = (lax.dynamic_slice_in_dim(x, first, size) for x in (scores, starts, ends))
        return lax.dynamic_update_slice(out, _top(scores_, starts_, ends_, k), (first, 0))

    return lax.fori_loop(0, -(-rows // size), step, jnp.full_like(starts, -1, shape=(rows, k)))


def temporary_bytes(rows: int, columns: int, k: int) -> int:
    """Temporary memory of `topk_indices` at most: keys, bit words, and a dozen numbers a result."""
    return _group_rows(rows, columns, k, GPU_GROUP) * (5 * (columns + WORD) + 48 * k)


def _group_rows(rows, columns, k, group):
    return max(1, min(rows, group // max(columns, 4 * k)))


def _top(scores, starts, ends, k):
    keys = _order_keys(scores, starts, ends)
    least = _kth_greatest(keys, k)
    return _columns_of(*_take(keys, least, k), k)


def _order_keys(scores, starts, ends):
    """int32 [M, columns rounded up to words]: a < b as keys if and only if a < b as scores; 0.0 and -0.0 are equal.

    NaN, -inf and columns outside [starts, ends) get NONE, which is less than the key of any finite score.
    """
    bits = lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.int32)
    magnitude = bits & np.int32(0x7FFFFFFF)
    column = jnp.arange(scores.shape[1], dtype=jnp.int32)[None]
    inside = (column >= starts[:, None]) & (column < ends[:, None])
    legal = inside & ((magnitude < _INFINITY) | (bits == _INFINITY))
    keys = jnp.where(legal, jnp.where(bits < 0, -magnitude, magnitude), NONE)
    return jnp.pad(keys, ((0, 0), (0, -scores.shape[1] % WORD)), constant_values=NONE)


def _kth_greatest(keys, k):
    """The greatest key that at least k keys of the row reach; NONE if that is every key."""

    def settle_bit(i, least):
        # In the order of keys, setting the sign bit of NONE is a step up like any other: NONE ^ sign = 0.
        raised = least ^ (jnp.int32(1) << (31 - i))
        count = jnp.sum(keys >= raised[:, None], axis=1, dtype=jnp.int32)
        return jnp.where(count >= k, raised, least)

    return lax.fori_loop(0, 32, settle_bit, jnp.full_like(keys, NONE, shape=keys.shape[:1]))


def _take(keys, least, k):
    """What is taken: every key above `least`, and of those equal to it the lowest columns that make up k.

    Returns words, uint32 [M, words], with bit c of word w set where column 32 w + c is taken, and stops, how many are
    taken up to the end of each word.
    """
    above, equal = _pack(keys > least[:, None]), _pack((keys == least[:, None]) & (keys != NONE))
    stops_above, stops_equal = jnp.cumsum(_count(jnp.stack([above, equal])), axis=2, dtype=jnp.int32)
    missing = k - stops_above[:, -1:]
    quota = missing - (stops_equal - _count(equal))
    lowest = (jnp.uint32(1) << _position_of_bit(equal, quota).astype(jnp.uint32)) - jnp.uint32(1)
    words = above | jnp.where(_count(equal) <= quota, equal, equal & lowest)
    return words, stops_above + jnp.minimum(stops_equal, missing)


def _columns_of(words, stops, k):
    """int32 [M, k]: the numbers of the set bits, ascending, then -1."""
    rank = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32)[None], (words.shape[0], k))
    word = _first_above(stops, rank)
    found = jnp.take_along_axis(words, word, axis=1, mode="clip")
    before = jnp.take_along_axis(stops, word, axis=1, mode="clip") - _count(found)
    column = word * WORD + _position_of_bit(found, rank - before)
    return jnp.where(rank < stops[:, -1:], column, -1)


def _first_above(stops, rank):
    """For each rank[M, k] the first position where the ascending stops[M, words] is greater."""
    length = stops.shape[1]
    bits = length.bit_length()

    def step(i, low):
        middle = low + (jnp.int32(1) << (bits - 1 - i))
        value = jnp.take_along_axis(stops, middle - 1, axis=1, mode="clip")
        return jnp.where((middle <= length) & (value <= rank), middle, low)

    return lax.fori_loop(0, bits, step, jnp.zeros_like(stops, shape=rank.shape))


def _position_of_bit(words, rank):
    """The position in each uint32 of its set bit number `rank`, counted from the lowest; 0..31 where it has fewer."""
    position = jnp.zeros_like(words)
    for width in (16, 8, 4, 2, 1):
        below = (jnp.uint32(1) << (position + width)) - jnp.uint32(1)
        position = jnp.where(_count(words & below) <= rank, position + width, position)
    return position.astype(jnp.int32)


def _pack(bits):
    """bool [M, 32 W] to uint32 [M, W], the lowest column in the lowest bit."""
    place = jnp.uint32(1) << jnp.arange(WORD, dtype=jnp.uint32)
    split = bits.reshape(bits.shape[0], -1, WORD)
    return jnp.sum(jnp.where(split, place[None, None], jnp.uint32(0)), axis=2, dtype=jnp.uint32)


def _count(words):
    return lax.population_count(words).astype(jnp.int32)
