"""Index scores: every shape is checked against float64 on a sample, then timed.

The floor of a shape is the larger of its products at the machine's fp8 matrix rate and its bytes, every key read once
and every logit written once, at the machine's copy rate.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.timing import seconds_per_call
from pallas_kernels.indexer_logits import hopper, portable
from pallas_kernels.target import target_of

FP8_FLOPS = 1494e12  # H200: an e4m3 matrix product of XLA, 4096 x 16384 x 4096
COPY_BYTES = 4.3e12  # H200: a device-to-device copy, bytes read plus bytes written
KERNELS = {"hopper": hopper, "portable": portable}
COSINE = 5e-6  # 1 - cosine similarity with float64 above which nothing is timed

Cache = collections.namedtuple("Cache", "k scale")


@dataclasses.dataclass(frozen=True)
class Prefill:
    """rows queries over columns keys. mask "causal": the rows are the last of the columns; "none": every row sees all.

    peer_us: DeepGEMM's fp8_mqa_logits on an H200, microseconds, where known.
    """

    heads: int
    rows: int
    columns: int
    mask: str
    peer_us: float | None = None
    dim: int = 128

    @property
    def name(self) -> str:
        return f"prefill H={self.heads} {self.rows} x {self.columns} {self.mask}"

    @property
    def pairs(self) -> int:
        """(query, key) pairs to score."""
        hidden = self.rows * (self.rows - 1) // 2 if self.mask == "causal" else 0
        return self.rows * self.columns - hidden

    @property
    def bytes(self) -> int:
        queries = self.rows * self.heads * (self.dim + 4)
        return queries + self.columns * (self.dim + 4) + 4 * self.rows * self.columns

    def inputs(self) -> tuple:
        keys = jax.random.split(jax.random.key(0), 4)
        q = _e4m3(keys[0], (self.rows, self.heads, self.dim))
        k = _e4m3(keys[1], (self.columns, self.dim))
        weights = jax.random.normal(keys[2], (self.rows, self.heads))
        k_scale = jax.random.uniform(keys[3], (self.columns,), minval=0.5, maxval=2.0)
        ends = jnp.full(self.rows, self.columns, jnp.int32)
        if self.mask == "causal":
            ends = self.columns - self.rows + 1 + jnp.arange(self.rows, dtype=jnp.int32)
        return q, k, weights, jnp.zeros(self.rows, jnp.int32), ends, k_scale

    def call(self, kernel: Any) -> Callable[..., jax.Array]:
        return lambda *args: kernel.indexer_logits(*args[:5], k_scale=args[5])

    def refusal(self, kernel: Any, args: tuple) -> str | None:
        return kernel.refuse_indexer_logits(target_of(), *args[:5], k_scale=args[5])

    def error(self, logits: jax.Array, args: tuple) -> float:
        q, k, weights, _, ends, k_scale = (np.asarray(x) for x in args)
        rows = np.unique(np.linspace(0, self.rows - 1, 8).astype(int))
        columns = np.unique(np.linspace(0, self.columns - 1, 501).astype(int))
        want = _float64(q[rows], k[columns], weights[rows], k_scale[columns])
        want = np.where(columns < ends[rows, None], want, -np.inf)
        return _cosine_distance(np.asarray(logits[rows][:, columns]), want)


@dataclasses.dataclass(frozen=True)
class Decode:
    """next_n queries of each of batch requests over pages of 64 tokens, all of one length or, mixed, up to it.

    peer_us: DeepGEMM's fp8_paged_mqa_logits on an H200, microseconds, where known.
    """

    heads: int
    batch: int
    length: int
    next_n: int
    peer_us: float | None = None
    mixed: bool = False
    dim: int = 128
    page: int = 64

    @property
    def name(self) -> str:
        return f"decode H={self.heads} {self.batch} x {self.length}{' mixed' * self.mixed} next_n={self.next_n}"

    @property
    def lengths(self) -> np.ndarray:
        full = np.full(self.batch, self.length)
        return np.random.default_rng(0).integers(1, self.length + 1, self.batch) if self.mixed else full

    @property
    def pairs(self) -> int:
        return int(self.lengths.sum()) * self.next_n

    @property
    def bytes(self) -> int:
        return int(self.lengths.sum()) * (self.dim + 4) + 4 * self.batch * self.length * self.next_n

    def inputs(self) -> tuple:
        keys = jax.random.split(jax.random.key(0), 5)
        pages = self.batch * self.length // self.page
        table = jax.random.permutation(keys[4], pages).reshape(self.batch, -1).astype(jnp.int32)
        q = _e4m3(keys[0], (self.batch, self.next_n, self.heads, self.dim))
        k = _e4m3(keys[1], (pages, self.page, self.dim))
        scale = jax.random.uniform(keys[3], (pages, self.page), minval=0.5, maxval=2.0)
        weights = jax.random.normal(keys[2], (self.batch, self.next_n, self.heads))
        return q, k, scale, weights, table, jnp.asarray(self.lengths, jnp.int32)

    def call(self, kernel: Any) -> Callable[..., jax.Array]:
        return lambda q, k, scale, *rest: kernel.paged_indexer_logits(q, Cache(k, scale), *rest)

    def refusal(self, kernel: Any, args: tuple) -> str | None:
        q, k, scale, *rest = args
        return kernel.refuse_paged_indexer_logits(target_of(), q, Cache(k, scale), *rest)

    def error(self, logits: jax.Array, args: tuple) -> float:
        q, k, scale, weights, table, lengths = args
        request = self.batch - 1
        columns = np.unique(np.linspace(0, self.length - 1, 501).astype(int))
        pages, within = np.asarray(table)[request, columns // self.page], columns % self.page
        keys, scales = np.asarray(k[pages, within]), np.asarray(scale[pages, within])
        want = _float64(np.asarray(q[request]), keys, np.asarray(weights[request]), scales)
        ends = int(lengths[request]) - self.next_n + 1 + np.arange(self.next_n)
        want = np.where(columns < ends[:, None], want, -np.inf)
        return _cosine_distance(np.asarray(logits[request][:, columns]), want)


CASES = (
    Prefill(32, 4096, 16384, "none", 616),
    Prefill(32, 8192, 8192, "causal", 329),
    Prefill(32, 32768, 32768, "causal", 4542),
    Prefill(32, 4096, 65536, "causal", 2520),
    Prefill(32, 4096, 131072, "causal", 4946),
    Prefill(64, 4096, 16384, "none", 995),
    Prefill(64, 8192, 8192, "causal", 518),
    Prefill(64, 32768, 32768, "causal", 9120),
    Prefill(64, 4096, 131072, "causal", 8929),
    Decode(32, 1, 4096, 1, 7),
    Decode(32, 1, 65536, 1, 9),
    Decode(32, 8, 65536, 1, 29.0),
    Decode(32, 64, 65536, 1, 161),
    Decode(64, 64, 65536, 1, 149),
    Decode(64, 64, 65536, 2, 159),
    Decode(32, 128, 8192, 1, 46.6),
    Decode(32, 128, 65536, 1, mixed=True),
    Decode(32, 1, 1048576, 1),
    Decode(32, 16, 65536, 6),
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
            f"{self.case:40} {self.implementation:9} {self.us:9.1f} us ({self.us_flushed:9.1f} flushed) "
            f"{self.tflops:7.0f} TFLOP/s {self.gbytes:6.0f} GB/s {100 * self.floor:4.0f} % of floor {peer}"
        )


def run(cases: Iterable[Prefill | Decode] = CASES, implementations: Iterable[str] = tuple(KERNELS)) -> Iterator[Row]:
    """Checks, then times. A kernel that refuses a shape is left out; one that is wrong raises."""
    for case in cases:
        args = case.inputs()
        for name in implementations:
            if case.refusal(KERNELS[name], args) is None:
                yield measure(case, name, case.call(KERNELS[name]), args)


def measure(case: Prefill | Decode, name: str, call: Callable[..., jax.Array], args: tuple) -> Row:
    """Checks and times one function on one case. Raises AssertionError, and times nothing, if it is wrong."""
    error = case.error(jax.jit(call)(*args), args)
    assert error < COSINE, f"{case.name} {name}: 1 - cosine similarity with float64 is {error}"
    seconds, flushed = seconds_per_call(call, *args), seconds_per_call(call, *args, flush=True)
    flops = 2 * case.pairs * case.heads * case.dim
    floor = max(flops / FP8_FLOPS, case.bytes / COPY_BYTES)
    return Row(
        case=case.name,
        implementation=name,
        error=error,
        us=1e6 * seconds,
        us_flushed=1e6 * flushed,
        tflops=flops / flushed / 1e12,
        gbytes=case.bytes / flushed / 1e9,
        floor=floor / flushed,
        peer=case.peer_us / (1e6 * flushed) if case.peer_us else None,
    )


def _e4m3(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16).astype(jnp.float8_e4m3fn)


def _float64(q, k, weights, k_scale) -> np.ndarray:
    q, k, weights, k_scale = (x.astype(np.float64) for x in (q, k, weights, k_scale))
    scores = np.maximum(np.einsum("mhd,nd->mhn", q, k), 0.0)
    return np.einsum("mhn,mh->mn", scores, weights) * k_scale


def _cosine_distance(got: np.ndarray, want: np.ndarray) -> float:
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite]):
        return np.inf
    got, want = got[finite].astype(np.float64), want[finite]
    return 1.0 - 2.0 * float((got * want).sum()) / float((got * got).sum() + (want * want).sum())
