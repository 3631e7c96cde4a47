"""Sparse MLA: every shape is checked against float64 on a sample of rows, then timed.

The floor of a shape is the larger of its products at the machine's bf16 matrix rate and its bytes: in prefill the
selected rows at the rate at which rows were gathered from the L2 cache with nothing else to do, in decode the same rows
at the machine's copy rate, for there each request's rows come from memory.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.timing import seconds_per_call
from pallas_kernels.sparse_mla import portable
from pallas_kernels.target import target_of

BF16_FLOPS = 777e12  # H200: a bf16 matrix product of XLA
GATHER_BYTES = 8.1e12  # H200: random 1152-byte rows of a 38 MB array
COPY_BYTES = 4.3e12  # H200: a device-to-device copy, bytes read plus bytes written
KERNELS = {"portable": portable}
COSINE = 7e-6  # 1 - cosine similarity with float64 above which nothing is timed
LATENT, ROPE, PAGE = 512, 64, 64
OPTIONS = dict(sm_scale=(LATENT + ROPE) ** -0.5, v_dim=LATENT)

Cache = collections.namedtuple("Cache", "nope scale rope")


@dataclasses.dataclass(frozen=True)
class Prefill:
    """rows queries, each with topk random keys out of `keys`. peer_us: FlashMLA on an H200, us, where known."""

    heads: int
    keys: int
    cache: str = "bf16"
    peer_us: float | None = None
    rows: int = 4096
    topk: int = 2048

    @property
    def name(self) -> str:
        return f"prefill H={self.heads} {self.cache} {self.rows} of {self.keys}"

    def inputs(self) -> tuple:
        starts = 977 * jnp.arange(self.rows, dtype=jnp.int32)[:, None]
        chosen = jax.random.permutation(jax.random.key(3), self.keys)[: self.topk].astype(jnp.int32)
        indices = (chosen[None] + starts) % self.keys
        return _queries((self.rows, self.heads)), _cache(self.keys, self.cache), indices

    def call(self, kernel: Any) -> Callable[..., Any]:
        return lambda q, cache, indices: kernel.sparse_mla(q, cache, indices, **OPTIONS)

    def refusal(self, kernel: Any, args: tuple) -> str | None:
        return kernel.refuse_sparse_mla(target_of(), *args, **OPTIONS)

    def sample(self, args: tuple) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Four rows: their numbers, queries, and dequantised keys [4, topk, D]."""
        q, cache, indices = args
        rows = np.linspace(0, self.rows - 1, 4).astype(int)
        return rows, np.asarray(q[rows]), np.stack([_rows(cache, indices[row]) for row in rows])


@dataclasses.dataclass(frozen=True)
class Decode:
    """next_n queries of each of batch requests of 32768 tokens, topk random positions each, in pages of 64 tokens."""

    heads: int
    batch: int
    next_n: int = 1
    cache: str = "e4m3"
    peer_us: float | None = None
    topk: int = 2048
    length: int = 32768

    @property
    def name(self) -> str:
        return f"decode H={self.heads} {self.cache} {self.batch} x {self.next_n}"

    @property
    def rows(self) -> int:
        return self.batch * self.next_n

    def inputs(self) -> tuple:
        pages = self.batch * self.length // PAGE
        table = jax.random.permutation(jax.random.key(4), pages).reshape(self.batch, -1).astype(jnp.int32)
        shape = (self.batch, self.next_n, self.topk)
        indices = jax.random.randint(jax.random.key(3), shape, 0, self.length, jnp.int32)
        cache = _cache(pages * PAGE, self.cache)
        q = _queries((self.batch, self.next_n, self.heads))
        return q, cache, indices, table, jnp.full(self.batch, self.length, jnp.int32)

    def call(self, kernel: Any) -> Callable[..., Any]:
        return lambda *args: jax.tree.map(
            lambda x: x.reshape(self.rows, *x.shape[2:]), kernel.paged_sparse_mla(*args, **OPTIONS)
        )

    def refusal(self, kernel: Any, args: tuple) -> str | None:
        return kernel.refuse_paged_sparse_mla(target_of(), *args, **OPTIONS)

    def sample(self, args: tuple) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Up to four rows: their numbers, queries, and dequantised keys."""
        q, cache, indices, table, _ = args
        rows = np.unique(np.linspace(0, self.rows - 1, 4).astype(int))
        keys = []
        for row in rows:
            request, query = divmod(int(row), self.next_n)
            position = np.asarray(indices[request, query])
            slots = np.asarray(table[request])[position // PAGE] * PAGE + position % PAGE
            keys.append(_rows(cache, jnp.asarray(slots)))
        return rows, np.asarray(q.reshape(self.rows, *q.shape[2:])[rows]), np.stack(keys)


CASES = (
    *(Prefill(64, keys, "bf16", us) for keys, us in ((8192, 1828), (32768, 1913), (131072, 2329))),
    *(Prefill(128, keys, "bf16", us) for keys, us in ((8192, 3701), (131072, 4162))),
    *(Prefill(heads, 32768, "bf16", 1913) for heads in (8, 16, 32)),
    *(Prefill(heads, 32768, "e4m3") for heads in (16, 64)),
    Decode(64, 1, peer_us=23.1),
    Decode(64, 16, peer_us=36.3),
    Decode(64, 64, peer_us=85.9),
    Decode(64, 128, peer_us=129.8),
    Decode(64, 128, 2, peer_us=240),
    Decode(128, 128, 2, peer_us=401),
    Decode(16, 128, peer_us=129.8),
    Decode(64, 128, cache="bf16"),
    Decode(16, 128, cache="bf16"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement. error: 1 - cosine similarity with float64. floor: the fraction of the floor reached."""

    case: str
    implementation: str
    error: float
    us: float
    us_flushed: float
    tflops: float
    gbytes: float
    floor: float
    peer: float | None

    def __str__(self) -> str:
        peer = f"{self.peer:5.2f}x peer" if self.peer else ""
        return (
            f"{self.case:36} {self.implementation:9} {self.us:9.1f} us ({self.us_flushed:9.1f} flushed) "
            f"{self.tflops:5.0f} TFLOP/s {self.gbytes:5.0f} GB/s {100 * self.floor:4.0f} % of floor {peer}"
        )


def run(cases: Iterable[Prefill | Decode] = CASES, implementations: Iterable[str] = tuple(KERNELS)) -> Iterator[Row]:
    """Checks, then times. A kernel that refuses a shape is left out; one that is wrong raises."""
    for case in cases:
        args = case.inputs()
        for name in implementations:
            if case.refusal(KERNELS[name], args) is None:
                yield measure(case, name, case.call(KERNELS[name]), args)


def measure(case: Prefill | Decode, name: str, call: Callable[..., Any], args: tuple) -> Row:
    """Checks and times one function on one case. Raises AssertionError, and times nothing, if it is wrong."""
    rows, queries, keys = case.sample(args)
    out, lse = (np.asarray(x[rows]) for x in jax.jit(call)(*args))
    error = _error(out, lse, queries, keys)
    assert error < COSINE, f"{case.name} {name}: 1 - cosine similarity with float64 is {error}"
    leaves, tree = jax.tree.flatten(args)
    launch, calls = (lambda *leaves: call(*jax.tree.unflatten(tree, leaves))[0]), 8 if case.rows > 512 else 64
    seconds, flushed = (seconds_per_call(launch, *leaves, calls=calls, flush=flush) for flush in (False, True))
    lanes = case.rows * case.topk
    flops = 2 * lanes * case.heads * (2 * LATENT + ROPE)
    bytes_read = lanes * (656 if case.cache == "e4m3" else 1152)
    rate = GATHER_BYTES if isinstance(case, Prefill) else COPY_BYTES
    floor = max(flops / BF16_FLOPS, bytes_read / rate)
    return Row(
        case=case.name,
        implementation=name,
        error=error,
        us=1e6 * seconds,
        us_flushed=1e6 * flushed,
        tflops=flops / flushed / 1e12,
        gbytes=bytes_read / flushed / 1e9,
        floor=floor / flushed,
        peer=case.peer_us / (1e6 * flushed) if case.peer_us else None,
    )


def _queries(shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (*shape, LATENT + ROPE), jnp.bfloat16)


def _cache(slots: int, kind: str) -> Cache:
    """Pages of normal rows; an e4m3 cache's scales are powers of two."""
    keys = jax.random.split(jax.random.key(1), 3)
    nope = jax.random.normal(keys[0], (slots // PAGE, PAGE, LATENT), jnp.bfloat16)
    rope = jax.random.normal(keys[1], (slots // PAGE, PAGE, ROPE), jnp.bfloat16)
    if kind == "bf16":
        return Cache(nope, None, rope)
    exponents = jax.random.randint(keys[2], (slots // PAGE, PAGE, LATENT // 128), -7, -4)
    return Cache((64 * nope).astype(jnp.float8_e4m3fn), jnp.exp2(exponents.astype(jnp.float32)), rope)


def _rows(cache: Cache, slots: jax.Array) -> np.ndarray:
    nope, scale, rope = (
        None if x is None else np.asarray(x[slots // PAGE, slots % PAGE]).astype(np.float64) for x in cache
    )
    return np.concatenate([nope if scale is None else nope * np.repeat(scale, 128, -1), rope], -1)


def _error(out: np.ndarray, lse: np.ndarray, queries: np.ndarray, keys: np.ndarray) -> float:
    """1 - cosine similarity of out with float64, or infinity where lse is off by more than 1e-5 of its size."""
    logits = np.einsum("rhd,rkd->rhk", queries.astype(np.float64), keys) * OPTIONS["sm_scale"]
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    if not np.allclose(lse, (top + np.log(total))[..., 0], rtol=1e-5, atol=1e-5):
        return np.inf
    want = np.einsum("rhk,rkv->rhv", weights / total, keys[..., :LATENT])
    got = out.astype(np.float64)
    return 1.0 - 2.0 * float((got * want).sum()) / float((got * got).sum() + (want * want).sum())
