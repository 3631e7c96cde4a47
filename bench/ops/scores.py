"""Index scores, ragged and paged, and selection from them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.case import LOGITS_COSINE, Case, cosine_error, e4m3, sampled, short
from dsa_jax import DsaConfig, IndexCache, indexer_logits, paged_indexer_logits, select_topk

_EINSUM_BYTES = 20e9  # of scores before the sum over heads, above which the plain einsum is left out
_NEAR_TIE = 4e-3  # of a row's largest score: what the error of e4m3 sums may exchange around the k-th


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerLogits(Case):
    """Scores of a prefill's rows. What a row does not see is left open, as by peers.

    rows, columns: queries and keys.
    mask: "causal": the rows are the last of the columns; "none": every row sees all.
    keys: what queries and keys are; each key has a scale.
    """

    op: ClassVar[str] = "indexer_logits"

    heads: int
    rows: int
    columns: int
    mask: Literal["causal", "none"] = "causal"
    dim: int = 128
    keys: Literal["e4m3", "bf16"] = "e4m3"

    @classmethod
    def of_model(cls, config: DsaConfig, seq: int) -> list[Any]:
        """The last 4096 rows of a prompt."""
        heads, dim = config.index_n_heads, config.index_head_dim
        return [cls(heads=heads, rows=min(seq, 4096), columns=seq, dim=dim)]

    @property
    def name(self) -> str:
        keys = "" if self.keys == "e4m3" else f"{self.keys} "
        return f"H={self.heads} {keys}{short(self.rows)} x {short(self.columns)} {self.mask}"

    @property
    def unit(self) -> str:  # pyrefly: ignore[bad-override]
        return "fp8" if self.keys == "e4m3" else self.keys

    @property
    def pairs(self) -> int:
        """(query, key) pairs to score."""
        hidden = self.rows * (self.rows - 1) // 2 if self.mask == "causal" else 0
        return self.rows * self.columns - hidden

    @property
    def flops(self) -> int:
        return 2 * self.pairs * self.heads * self.dim

    @property
    def input_bytes(self) -> int:
        vector = self.dim * (1 if self.keys == "e4m3" else 2)
        return self.rows * self.heads * (vector + 4) + self.columns * (vector + 4)

    @property
    def bytes(self) -> int:
        return self.input_bytes + 4 * self.pairs

    def inputs(self) -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(0), 4)
        random = e4m3 if self.keys == "e4m3" else functools.partial(jax.random.normal, dtype=jnp.bfloat16)
        q, k = random(keys[0], (self.rows, self.heads, self.dim)), random(keys[1], (self.columns, self.dim))
        weights = jax.random.normal(keys[2], (self.rows, self.heads))
        k_scale = jax.random.uniform(keys[3], (self.columns,), minval=0.5, maxval=2.0)
        ends = jnp.full(self.rows, self.columns, jnp.int32)
        if self.mask == "causal":
            ends = self.columns - self.rows + 1 + jnp.arange(self.rows, dtype=jnp.int32)
        return q, k, weights, jnp.zeros(self.rows, jnp.int32), ends, k_scale

    def call(self, implementation: str) -> Callable[..., Any]:
        def run(q, k, weights, starts, ends, k_scale):
            options = dict(k_scale=k_scale, clean_logits=False, implementation=implementation)
            return indexer_logits(q, k, weights, starts, ends, **options)

        return run

    def baselines(self) -> dict[str, Callable[..., Any] | str]:
        if 4 * self.heads * self.rows * self.columns > _EINSUM_BYTES:
            return {"einsum": "its scores of every head do not fit in memory"}
        return {"einsum": _einsum}

    def sample(self, out: Any, inputs: tuple[Any, ...]) -> Any:
        rows, columns = sampled(self.rows, 8), sampled(self.columns, 501)
        return out[rows][:, columns], self.problem(inputs, rows, columns)

    def error(self, sample: Any, *, ours: bool) -> str | None:
        del ours
        got, problem = sample
        return cosine_error(got, _scores64(*problem), LOGITS_COSINE)

    def problem(self, inputs: tuple[Any, ...], rows: np.ndarray, columns: np.ndarray) -> tuple[Any, ...]:
        """The arguments of `_scores64` for some rows and columns."""
        q, k, weights, _, ends, k_scale = inputs
        visible = columns[None] < ends[rows][:, None]
        return q[rows], k[columns], weights[rows], k_scale[columns], visible


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectTopk(IndexerLogits):
    """Scores and their top-k in one call. A peer's is its scores followed by torch.topk."""

    op: ClassVar[str] = "select_topk"
    topk: int = 2048

    @classmethod
    def of_model(cls, config: DsaConfig, seq: int) -> list[Any]:
        """A whole prompt in one call."""
        heads, dim = config.index_n_heads, config.index_head_dim
        return [cls(heads=heads, rows=seq, columns=seq, dim=dim, topk=config.index_topk)]

    @property
    def name(self) -> str:
        return f"{super().name} k={self.topk}"

    @property
    def bytes(self) -> int:
        return self.input_bytes + 4 * self.rows * self.topk

    def call(self, implementation: str) -> Callable[..., Any]:
        def run(*inputs):
            q, k, weights, starts, ends, k_scale = inputs
            return select_topk(q, k, weights, starts, ends, self.topk, k_scale=k_scale, implementation=implementation)

        return run

    def baselines(self) -> dict[str, Callable[..., Any] | str]:
        (einsum,) = super().baselines().values()
        if isinstance(einsum, str):
            return {"einsum + lax.top_k": einsum}
        return {"einsum + lax.top_k": lambda *inputs: lax.top_k(einsum(*inputs), min(self.topk, self.columns))[1]}

    def sample(self, out: Any, inputs: tuple[Any, ...]) -> Any:
        rows = sampled(self.rows, 8)
        return out[rows], self.problem(inputs, rows, np.arange(self.columns))

    def error(self, sample: Any, *, ours: bool) -> str | None:
        for chosen, row in zip(sample[0], _scores64(*sample[1]), strict=True):
            visible = int(np.isfinite(row).sum())
            chosen = (
                chosen[: min(visible, self.topk)] if ours or visible >= self.topk else chosen[row[chosen] > -np.inf]
            )
            if len(np.unique(chosen)) != min(visible, self.topk) or not np.isfinite(row[chosen]).all():
                return "not exactly min(k, visible) distinct keys that the row sees"
            if visible > self.topk:
                margin = _NEAR_TIE * np.abs(row[np.isfinite(row)]).max()
                kth = np.partition(row, -self.topk)[-self.topk]
                if row[chosen].min() < kth - margin or not np.isin(np.flatnonzero(row > kth + margin), chosen).all():
                    return "other keys than those with the k greatest scores, near-ties aside"
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedIndexerLogits(Case):
    """Scores of the last next_n tokens of each request over an e4m3 cache. What a query does not see is left open.

    batch, length: requests, and tokens of each, or with `mixed` of the longest.
    """

    op: ClassVar[str] = "paged_indexer_logits"
    unit: ClassVar[str | None] = "fp8"

    heads: int
    batch: int
    length: int
    next_n: int = 1
    mixed: bool = False
    dim: int = 128
    page: int = 64

    @classmethod
    def of_model(cls, config: DsaConfig, seq: int) -> list["PagedIndexerLogits"]:
        heads, dim = config.index_n_heads, config.index_head_dim
        return [cls(heads=heads, batch=batch, length=seq, dim=dim) for batch in (1, 32)]

    @property
    def name(self) -> str:
        mixed = " mixed" * self.mixed
        return f"H={self.heads} {self.batch} x {short(self.length)}{mixed} next_n={self.next_n}"

    @property
    def lengths(self) -> np.ndarray:
        full = np.full(self.batch, self.length)
        return np.random.default_rng(0).integers(1, self.length + 1, self.batch) if self.mixed else full

    @property
    def flops(self) -> int:
        return 2 * int(self.lengths.sum()) * self.next_n * self.heads * self.dim

    @property
    def bytes(self) -> int:
        return int(self.lengths.sum()) * (self.dim + 4 + 4 * self.next_n)

    def inputs(self) -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(0), 5)
        pages = self.batch * -(-self.length // self.page)
        table = jax.random.permutation(keys[4], pages).reshape(self.batch, -1).astype(jnp.int32)
        q = e4m3(keys[0], (self.batch, self.next_n, self.heads, self.dim))
        k = e4m3(keys[1], (pages, self.page, self.dim))
        scale = jax.random.uniform(keys[3], (pages, self.page), minval=0.5, maxval=2.0)
        weights = jax.random.normal(keys[2], (self.batch, self.next_n, self.heads))
        return q, IndexCache(k, scale), weights, table, jnp.asarray(self.lengths, jnp.int32)

    def call(self, implementation: str) -> Callable[..., Any]:
        return lambda *inputs: paged_indexer_logits(*inputs, clean_logits=False, implementation=implementation)

    def sample(self, out: Any, inputs: tuple[Any, ...]) -> Any:
        q, cache, weights, table, lengths = inputs
        columns = sampled(table.shape[1] * self.page, 501)
        parts = []
        for request in sampled(self.batch, 3):
            pages, within = table[request][columns // self.page], columns % self.page
            ends = lengths[request] - self.next_n + 1 + jnp.arange(self.next_n)
            visible = columns[None] < ends[:, None]
            keys = cache.k[pages, within], weights[request], cache.scale[pages, within]
            parts.append((out[request][:, columns], (q[request], *keys, visible)))
        return parts

    def error(self, sample: Any, *, ours: bool) -> str | None:
        del ours
        wrong = (cosine_error(got, _scores64(*problem), LOGITS_COSINE) for got, problem in sample)
        return next(filter(None, wrong), None)


def _einsum(q, k, weights, starts, ends, k_scale):
    """The scores as anyone would write them, in bfloat16 products: e4m3 is exact in it."""
    dots = jnp.einsum("mhd,nd->mhn", q.astype(jnp.bfloat16), k.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    scores = jnp.einsum("mhn,mh->mn", jax.nn.relu(dots), weights) * k_scale[None]
    columns = jnp.arange(k.shape[0], dtype=jnp.int32)[None]
    return jnp.where((columns >= starts[:, None]) & (columns < ends[:, None]), scores, -jnp.inf)


def _scores64(q: Any, k: Any, weights: Any, k_scale: Any, visible: np.ndarray) -> np.ndarray:
    """float64 scores of q[M, H, D] over k[N, D], -inf where not visible[M, N]."""
    q, k, weights, k_scale = (np.asarray(x).astype(np.float64) for x in (q, k, weights, k_scale))
    out = np.zeros((q.shape[0], k.shape[0]))
    for head in range(q.shape[1]):  # one head at a time: all of them at once are gigabytes
        out += np.maximum(q[:, head] @ k.T, 0.0) * weights[:, head, None]
    return np.where(visible, out * k_scale, -np.inf)
