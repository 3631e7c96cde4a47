"""Sparse latent attention, prefill and paged decode, and dense attention for short prefills."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from bench.case import LSE, MLA_COSINE, Case, cosine_error, sampled, short
from dsa_jax import DsaConfig, LatentCache, dense_mla, paged_sparse_mla, sparse_mla
from dsa_jax.cache import read_latents

_BLOCK = 128  # latent numbers that share a scale
_PAGE = 64
_SCORE_BYTES = 20e9  # above which the attention that keeps all scores is left out
CacheKind = Literal["bf16", "e4m3"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sparse(Case):
    """What prefill and decode share.

    heads: query heads; latent, rope: width of a cached row. cache: "bf16" or "e4m3", whose rows take 1152 and 656
    bytes at the published widths. topk: keys a row attends to.
    """

    unit: ClassVar[str | None] = "bf16"

    heads: int
    cache: CacheKind = "bf16"
    topk: int = 2048
    latent: int = 512
    rope: int = 64

    @property
    def queries(self) -> int:
        raise NotImplementedError

    @property
    def keys_touched(self) -> int:
        """Rows of the cache that at least one query names, at most."""
        raise NotImplementedError

    @property
    def options(self) -> dict[str, Any]:
        return dict(sm_scale=(self.latent + self.rope) ** -0.5, v_dim=self.latent)

    @property
    def flops(self) -> int:
        return 2 * self.queries * self.topk * self.heads * (2 * self.latent + self.rope)

    @property
    def row_bytes(self) -> int:
        if self.cache == "bf16":
            return 2 * (self.latent + self.rope)
        return self.latent + 4 * -(-self.latent // _BLOCK) + 2 * self.rope

    @property
    def bytes(self) -> int:
        per_query = 2 * self.heads * (2 * self.latent + self.rope) + 4 * self.topk
        return self.keys_touched * self.row_bytes + self.queries * per_query

    def query(self, *lead: int) -> jax.Array:
        return jax.random.normal(jax.random.key(0), (*lead, self.heads, self.latent + self.rope), jnp.bfloat16)

    def latents(self, slots: int) -> LatentCache:
        """Pages of normal rows; an e4m3 cache's scales are powers of two."""
        keys = jax.random.split(jax.random.key(1), 3)
        pages = (slots // _PAGE, _PAGE)
        nope = jax.random.normal(keys[0], (*pages, self.latent), jnp.bfloat16)
        rope = jax.random.normal(keys[1], (*pages, self.rope), jnp.bfloat16)
        if self.cache == "bf16":
            return LatentCache(nope, None, rope)
        exponents = jax.random.randint(keys[2], (*pages, -(-self.latent // _BLOCK)), -7, -4)
        return LatentCache((64 * nope).astype(jnp.float8_e4m3fn), jnp.exp2(exponents.astype(jnp.float32)), rope)

    def error(self, sample: Any, *, ours: bool) -> str | None:
        """A sample is out[R, H, latent], lse[R, H] or None, queries[R, H, D], and the rows' keys [R, K, D]."""
        out, lse, queries, keys = sample
        keys = keys.astype(np.float64)
        logits = np.einsum("rhd,rkd->rhk", queries.astype(np.float64), keys, optimize=True) * self.options["sm_scale"]
        return _attention_error(out, lse, logits, keys[:, None])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseMla(_Sparse):
    """rows queries, each with topk random keys out of `keys`."""

    op: ClassVar[str] = "sparse_mla"
    keys: int
    rows: int = 4096

    @classmethod
    def of_model(cls, config: DsaConfig, seq: int) -> list["SparseMla"]:
        """The last 4096 rows of a prompt, with either cache."""
        kinds: tuple[CacheKind, ...] = ("bf16", "e4m3")
        return [
            cls(
                heads=config.num_attention_heads,
                keys=seq,
                rows=min(seq, 4096),
                cache=kind,
                topk=min(config.index_topk, seq),
                latent=config.kv_lora_rank,
                rope=config.qk_rope_head_dim,
            )
            for kind in kinds
        ]

    @property
    def name(self) -> str:
        return f"H={self.heads} {self.cache} {short(self.rows)} of {short(self.keys)} k={self.topk}"

    @property
    def queries(self) -> int:
        return self.rows

    @property
    def keys_touched(self) -> int:
        return min(self.keys, self.rows * self.topk)

    def inputs(self) -> tuple[Any, ...]:
        starts = 977 * jnp.arange(self.rows, dtype=jnp.int32)[:, None]
        chosen = jax.random.permutation(jax.random.key(3), self.keys)[: self.topk].astype(jnp.int32)
        indices = (chosen[None] + starts) % self.keys
        return self.query(self.rows), self.latents(self.keys), indices

    def call(self, implementation: str) -> Callable[..., Any]:
        return lambda *inputs: sparse_mla(*inputs, **self.options, implementation=implementation)

    def sample(self, out: Any, inputs: tuple[Any, ...]) -> Any:
        q, cache, indices = inputs
        rows = sampled(self.rows, 4)
        return *_take(out, rows), q[rows], read_latents(cache, indices[rows])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedSparseMla(_Sparse):
    """next_n queries of each of batch requests of `length` tokens, topk random positions each."""

    op: ClassVar[str] = "paged_sparse_mla"
    batch: int
    next_n: int = 1
    length: int = 32768
    cache: CacheKind = "e4m3"

    @classmethod
    def of_model(cls, config: DsaConfig, seq: int) -> list["PagedSparseMla"]:
        kinds: tuple[CacheKind, ...] = ("bf16", "e4m3")
        return [
            cls(
                heads=config.num_attention_heads,
                batch=batch,
                length=seq,
                cache=kind,
                topk=config.index_topk,
                latent=config.kv_lora_rank,
                rope=config.qk_rope_head_dim,
            )
            for kind in kinds
            for batch in (1, 32)
        ]

    @property
    def name(self) -> str:
        return f"H={self.heads} {self.cache} {self.batch} x {self.next_n} of {short(self.length)} k={self.topk}"

    @property
    def queries(self) -> int:
        return self.batch * self.next_n

    @property
    def keys_touched(self) -> int:
        return self.batch * min(self.length, self.next_n * self.topk)

    def inputs(self) -> tuple[Any, ...]:
        pages = self.batch * -(-self.length // _PAGE)
        table = jax.random.permutation(jax.random.key(4), pages).reshape(self.batch, -1).astype(jnp.int32)
        shape = (self.batch, self.next_n, self.topk)
        indices = jax.random.randint(jax.random.key(3), shape, 0, self.length, jnp.int32)
        q = self.query(self.batch, self.next_n)
        return q, self.latents(pages * _PAGE), indices, table, jnp.full(self.batch, self.length, jnp.int32)

    def call(self, implementation: str) -> Callable[..., Any]:
        return lambda *inputs: paged_sparse_mla(*inputs, **self.options, implementation=implementation)

    def sample(self, out: Any, inputs: tuple[Any, ...]) -> Any:
        q, cache, indices, table, _ = inputs
        requests = sampled(self.batch, 4)
        position = indices[requests, 0]
        pages = jnp.take_along_axis(table[requests], position // _PAGE, axis=1)
        keys = read_latents(cache, pages * _PAGE + position % _PAGE)
        return *(x if x is None else x[:, 0] for x in _take(out, requests)), q[requests, 0], keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseMla(Case):
    """Expanded attention of one causal sequence of `rows` tokens."""

    op: ClassVar[str] = "dense_mla"
    unit: ClassVar[str | None] = "bf16"

    heads: int
    rows: int
    qk_dim: int
    v_dim: int

    @classmethod
    def of_model(cls, config: DsaConfig, seq: int) -> list["DenseMla"]:
        heads = config.num_attention_heads
        return [cls(heads=heads, rows=seq, qk_dim=config.qk_head_dim, v_dim=config.v_head_dim)]

    @property
    def name(self) -> str:
        return f"H={self.heads} {short(self.rows)} causal {self.qk_dim}/{self.v_dim}"

    @property
    def flops(self) -> int:
        return self.rows * (self.rows + 1) * self.heads * (self.qk_dim + self.v_dim)

    @property
    def bytes(self) -> int:
        return 4 * self.rows * self.heads * (self.qk_dim + self.v_dim)

    def inputs(self) -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(0), 3)
        widths = (self.qk_dim, self.qk_dim, self.v_dim)
        q, k, v = (
            jax.random.normal(key, (self.rows, self.heads, width), jnp.bfloat16)
            for key, width in zip(keys, widths, strict=True)
        )
        ends = jnp.arange(1, self.rows + 1, dtype=jnp.int32)
        return q, k, v, jnp.zeros(self.rows, jnp.int32), ends

    @property
    def sm_scale(self) -> float:
        return self.qk_dim**-0.5

    def call(self, implementation: str) -> Callable[..., Any]:
        return lambda *inputs: dense_mla(*inputs, sm_scale=self.sm_scale, implementation=implementation)

    def baselines(self) -> dict[str, Callable[..., Any] | str]:
        plain = (
            "its scores of every head do not fit in memory" if 4 * self.heads * self.rows**2 > 2e10 else self._nn("xla")
        )
        if jax.default_backend() != "gpu":
            return {"jax.nn xla": plain, "jax.nn cudnn": "needs a GPU"}
        return {"jax.nn xla": plain, "jax.nn cudnn": self._nn("cudnn")}

    def _nn(self, implementation: Literal["xla", "cudnn"]) -> Callable[..., Any]:
        def run(q, k, v, starts, ends):
            del starts, ends
            v = jnp.pad(v, ((0, 0), (0, 0), (0, self.qk_dim - self.v_dim)))  # it wants values as wide as keys
            out = jax.nn.dot_product_attention(
                q[None], k[None], v[None], scale=self.sm_scale, is_causal=True, implementation=implementation
            )
            return out[0, :, :, : self.v_dim], None

        return run

    def sample(self, out: Any, inputs: tuple[Any, ...]) -> Any:
        q, k, v, _, ends = inputs
        rows, heads = sampled(self.rows, 4), sampled(self.heads, 4)
        out, lse = (x if x is None else x[:, heads] for x in _take(out, rows))
        return out, lse, q[rows][:, heads], k[:, heads], v[:, heads], ends[rows]

    def error(self, sample: Any, *, ours: bool) -> str | None:
        out, lse, q, k, v, ends = sample
        q, k, v = (np.moveaxis(x.astype(np.float64), 1, 0) for x in (q, k, v))  # heads first
        logits = np.moveaxis(q @ np.moveaxis(k, 1, 2), 0, 1) * self.sm_scale  # [R, H, N]
        visible = np.arange(self.rows) < ends[:, None, None]
        return _attention_error(out, lse, np.where(visible, logits, -np.inf), v[None])


def _take(out: tuple[Any, Any], rows: np.ndarray) -> tuple[Any, Any]:
    """Some rows of out and lse; lse may be None."""
    return out[0][rows], None if out[1] is None else out[1][rows]


def _attention_error(out: np.ndarray, lse: np.ndarray | None, logits: np.ndarray, values: np.ndarray) -> str | None:
    """out[..., v] and lse[...] against the softmax of float64 logits[..., N] over values[..., N, >= v].

    Leading axes of values may be 1.
    """
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    if lse is not None and not np.allclose(lse, (top + np.log(total))[..., 0], rtol=LSE, atol=LSE):
        return f"the log-sum-exp is off by more than {LSE:.0e}"
    want = np.matmul((weights / total)[..., None, :], values[..., : out.shape[-1]])[..., 0, :]
    return cosine_error(out, want, MLA_COSINE)
