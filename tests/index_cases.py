"""What the tests of scores and selection share: inputs, paged caches with their keys in order, adversarial scores."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax.cache import IndexCache

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
E4M3 = jnp.float8_e4m3fn


def run(function, implementation, *args, **options):
    """Calls the implementation; one that says it cannot run these shapes here is skipped with its reason."""
    try:
        return function(*args, implementation=implementation, **options)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))


def normal(rng, shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


@dataclasses.dataclass
class Ragged:
    """Arguments of indexer_logits."""

    q: jnp.ndarray
    k: jnp.ndarray
    weights: jnp.ndarray
    starts: jnp.ndarray
    ends: jnp.ndarray
    k_scale: jnp.ndarray | None

    @property
    def args(self):
        return self.q, self.k, self.weights, self.starts, self.ends

    def rows(self, some):
        """The same keys for some of the rows."""
        some = jnp.asarray(some) if not isinstance(some, slice) else some
        return Ragged(self.q[some], self.k, self.weights[some], self.starts[some], self.ends[some], self.k_scale)


def draw(seed, rows, columns, heads=8, width=32, dtype=jnp.float32, *, ranges="causal"):
    """Random inputs; an e4m3 key has a scale. ranges: "causal" (the last rows of the context), "full" or "random"."""
    rng = np.random.default_rng(seed)
    starts, ends = np.zeros(rows, np.int32), np.full(rows, columns, np.int32)
    if ranges == "causal":
        ends = np.arange(columns - rows + 1, columns + 1, dtype=np.int32)
    if ranges == "random":
        starts, ends = (rng.integers(-5, columns + 6, rows, dtype=np.int32) for _ in range(2))
    return Ragged(
        normal(rng, (rows, heads, width), dtype),
        normal(rng, (columns, width), dtype),
        normal(rng, (rows, heads)),
        jnp.asarray(starts),
        jnp.asarray(ends),
        jnp.asarray(rng.uniform(0.01, 1.0, columns).astype(np.float32)) if dtype == E4M3 else None,
    )


@dataclasses.dataclass
class Paged:
    """Arguments of paged_indexer_logits, and each request's keys in order: keys[B, capacity, D], scales or None."""

    q: jnp.ndarray
    cache: IndexCache
    weights: jnp.ndarray
    block_table: jnp.ndarray
    seq_lens: jnp.ndarray
    keys: jnp.ndarray
    scales: jnp.ndarray | None

    @property
    def args(self):
        return self.q, self.cache, self.weights, self.block_table, self.seq_lens

    def ragged(self, request):
        """Request number `request` as a ragged problem over its whole capacity."""
        queries, capacity = self.q.shape[1], self.keys.shape[1]
        ends = np.clip(int(self.seq_lens[request]) - queries + np.arange(queries) + 1, 0, capacity)
        scale = None if self.scales is None else self.scales[request]
        starts = jnp.zeros(queries, jnp.int32)
        return Ragged(self.q[request], self.keys[request], self.weights[request], starts, jnp.asarray(ends), scale)


def draw_paged(seed, seq_lens, queries=1, heads=8, width=32, dtype=jnp.float32, *, page=16, pages_each=None):
    """Requests over pages in random order. Slots past a request's length hold NaN (in e4m3 too), with NaN scales, and
    table entries past its last page hold -1, far numbers or another request's page.
    """
    rng = np.random.default_rng(seed)
    batch, need = len(seq_lens), [-(-max(length, 0) // page) for length in seq_lens]
    each = pages_each or max(*need, 1)
    pages = batch * each + 3
    order = rng.permutation(pages)[: batch * each].reshape(batch, each).astype(np.int32)
    k, scale = np.array(normal(rng, (pages, page, width), dtype)), rng.uniform(0.01, 1.0, (pages, page))
    scale, table = scale.astype(np.float32), order.copy()
    for b, length in enumerate(seq_lens):
        slot = np.arange(each * page).reshape(each, page) >= length
        k[order[b]] = np.where(slot[..., None], np.array(np.nan, k.dtype), k[order[b]])
        scale[order[b]] = np.where(slot, np.nan, scale[order[b]])
        for p in range(need[b], each):
            table[b, p] = (-1, INT_MAX, INT_MIN, pages, order[(b + 1) % batch, 0])[p % 5]
    scaled = dtype == E4M3
    return Paged(
        normal(rng, (batch, queries, heads, width), dtype),
        IndexCache(jnp.asarray(k), jnp.asarray(scale) if scaled else None),
        normal(rng, (batch, queries, heads)),
        jnp.asarray(table),
        jnp.asarray(np.array(seq_lens, np.int32)),
        jnp.asarray(k[order].reshape(batch, each * page, width)),
        jnp.asarray(scale[order].reshape(batch, each * page)) if scaled else None,
    )


def adversarial_rows(columns, seed=0):
    """Score rows by name, float32 [columns], that top-k kernels are known to get wrong."""
    rng = np.random.default_rng(seed)
    one = np.float32(1.0)
    ulps = one.view(np.int32) + np.arange(columns, dtype=np.int32)
    negative_nan = np.array(0xFFC00001, np.uint32).view(np.float32)
    gaps = rng.standard_normal(columns)
    rows = {
        "normal": rng.standard_normal(columns),
        "relu": np.maximum(rng.standard_normal(columns) - 1.28, 0),
        "equal": np.full(columns, 3.25),
        "zeros": np.zeros(columns),
        "two values": rng.choice([-1.0, 2.0], columns),
        "few winners": np.where(rng.permutation(columns) < min(100, columns // 3 + 1), 1 + rng.random(columns), 0.0),
        "narrow": rng.uniform(10, 10.2, columns),
        "one-ulp ramp": rng.permutation(ulps).view(np.float32),
        "one-ulp ramp, negative": -rng.permutation(ulps).view(np.float32),
        "ascending": np.sort(rng.standard_normal(columns)),
        "descending": np.sort(rng.standard_normal(columns))[::-1],
        "both zeros": rng.choice([0.0, -0.0, 1.0, -1.0], columns),
        "denormals": rng.permutation(columns).astype(np.int32).view(np.float32),
        "infinities": rng.choice([np.inf, -np.inf, 0.0, 5.0], columns),
        "largest": rng.choice([3.4028235e38, -3.4028235e38, 3.4e38], columns),
        "some NaN": np.where(rng.random(columns) < 0.3, np.nan, gaps),
        "negative NaN": np.where(rng.random(columns) < 0.3, negative_nan, gaps.astype(np.float32)),
        "one number": np.where(np.arange(columns) == columns // 2, 1.0, np.nan),
        "all NaN": np.full(columns, np.nan),
        "all -inf": np.full(columns, -np.inf),
        "any bits": rng.integers(INT_MIN, INT_MAX, columns, np.int32, endpoint=True).view(np.float32),
        "few bits": (rng.integers(0, 4, columns, np.int32) * 0x3FFFFFFF).view(np.float32),
    }
    return {name: np.asarray(row, np.float32) for name, row in rows.items()}
