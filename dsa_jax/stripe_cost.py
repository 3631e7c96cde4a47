"""What a striped selection costs, from the lengths alone: work per rank, bytes sent, and the time both take.

    selection = call + pairs * (2 * heads * dim / flops[keys] + 4 / top_k) + rows * row
    exchange  = latency + bytes / link + all rows * merge

where pairs are the (row, key) pairs that a rank's rows see: no other scores are computed, written or read. A step takes
as long as its slowest rank, and the exchange after it, with what every rank does to put all rows into their places. The
projections before are left out.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

from dsa_jax.checks import require
from dsa_jax.striped import packed_lanes, stripe_owners

Keys = Literal["e4m3", "bf16"]
LONGEST_STRIPE = 512
LEAST_ROUNDS = 4


@dataclasses.dataclass(frozen=True)
class Rates:
    """What one device and its links do.

    flops: multiplications and additions of index scores, a second, by what the index keys are.
    top_k: bytes of scores a second that top-k reads.
    call, row: seconds of a selection whatever its size, and of each of its rows.
    link, latency: bytes a second that a rank sends and as many that it receives, and seconds of an exchange of nothing.
    place, unpack: seconds of each row of the step around a MAX and around an all-gather, of 2048 indices.
    """

    flops: Mapping[Keys, float]
    top_k: float
    call: float
    row: float
    link: float
    latency: float
    place: float
    unpack: float


# NVIDIA H200, jax 0.11.2: fitted to bench/results/select_topk.json, all within 5 %; the exchange's to all-reduces and
# all-gathers of 17 MB to 1 GB between two GPUs on NVLink, and to what striped selections of earlier kernels took beyond
# both (multi_gpu_h200.json).
H200 = Rates(
    flops={"e4m3": 1.29e15, "bf16": 7.7e14},
    top_k=2.2e12,
    call=36e-6,
    row=2e-9,
    link=270e9,
    latency=60e-6,
    place=5e-9,
    unpack=15e-9,
)


@dataclasses.dataclass(frozen=True)
class Indexer:
    """The widths that the cost depends on."""

    heads: int = 32
    dim: int = 128
    topk: int = 2048
    keys: Keys = "e4m3"


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One step's selection on several ranks.

    rows, pairs: [ranks], the rows that each rank selects and the keys they see.
    exchanged: bytes that the busiest rank sends.
    selection, exchange: seconds of the slowest rank, and of the exchange.
    replicated: seconds where every rank selects every row.
    """

    rows: Int[np.ndarray, " ranks"]
    pairs: Int[np.ndarray, " ranks"]
    exchanged: int
    selection: float
    exchange: float
    replicated: float

    @property
    def imbalance(self) -> float:
        """The most pairs of a rank over the mean."""
        return float(self.pairs.max() / max(self.pairs.mean(), 1))

    @property
    def speed_up(self) -> float:
        return self.replicated / (self.selection + self.exchange)


def predict(
    visible: Int[np.ndarray, " M"],
    columns: int,
    num_ranks: int,
    *,
    stripe: int,
    fold: bool = False,
    combine: Literal["max", "all_gather"] = "max",
    indexer: Indexer = Indexer(),
    rates: Rates = H200,
) -> Prediction:
    """The cost of rows that see `visible` keys each, out of `columns`, in stripes; ceil(M / ranks) cuts in runs.

    Fewer rows than ranks are not divided.
    """
    num_rows, all_pairs = len(visible), int(visible.sum())
    replicated = selection_seconds(num_rows, all_pairs, indexer, rates)
    if not 1 < num_ranks <= num_rows:
        each = (np.full(num_ranks, count, np.int64) for count in (num_rows, all_pairs))
        return Prediction(*each, exchanged=0, selection=replicated, exchange=0.0, replicated=replicated)
    owner = np.repeat(stripe_owners(num_rows, num_ranks, stripe, fold=fold), stripe)[:num_rows]
    rows = np.bincount(owner, minlength=num_ranks)
    pairs = np.bincount(owner, weights=visible, minlength=num_ranks).astype(np.int64)
    seconds = [selection_seconds(r, p, indexer, rates) for r, p in zip(rows.tolist(), pairs.tolist(), strict=True)]
    sent = exchanged_bytes(num_rows, columns, num_ranks, combine, indexer.topk)
    exchange = exchange_seconds(num_rows, sent, combine, rates)
    return Prediction(rows, pairs, sent, selection=max(seconds), exchange=exchange, replicated=replicated)


def selection_seconds(rows: int, pairs: int, indexer: Indexer, rates: Rates) -> float:
    """One device's time for rows that see `pairs` keys together."""
    if rows == 0:
        return 0.0
    pair = 2 * indexer.heads * indexer.dim / rates.flops[indexer.keys] + 4 / rates.top_k
    return float(rates.call + pairs * pair + rows * rates.row)


def exchange_seconds(rows: int, sent: int, combine: str, rates: Rates) -> float:
    """Time of an exchange of a step's rows in which each rank sends so many bytes."""
    return rates.latency + sent / rates.link + rows * (rates.place if combine == "max" else rates.unpack)


def exchanged_bytes(rows: int, columns: int, num_ranks: int, combine: str, topk: int) -> int:
    """Bytes that each rank sends in a ring: an all-reduce of int32 rows, or an all-gather of rows packed in uint16."""
    if combine == "max":
        return 2 * (num_ranks - 1) * 4 * rows * topk // num_ranks
    return (num_ranks - 1) * 2 * rows * packed_lanes(topk, columns) // num_ranks


def causal(rows: int, columns: int) -> Int[np.ndarray, " M"]:
    """How many keys the last `rows` rows of a request of `columns` keys see."""
    return np.arange(columns - rows, columns, dtype=np.int64) + 1


def best_stripe(num_rows: int, num_ranks: int) -> int:
    """The stripe to fold: at most LONGEST_STRIPE rows, and an even number of rounds, at least LEAST_ROUNDS.

    Even rounds give every rank the same share of a causal triangle; several keep packed requests even.
    """
    rounds = max(LEAST_ROUNDS, 2 * math.ceil(num_rows / (2 * num_ranks * LONGEST_STRIPE)))
    return max(1, math.ceil(num_rows / (num_ranks * rounds)))


def pays(
    rows: int,
    columns: int,
    num_ranks: int,
    *,
    combine: str = "max",
    indexer: Indexer = Indexer(),
    rates: Rates = H200,
) -> bool:
    """Whether the last `rows` rows of a request of `columns` keys are selected sooner in stripes than by every rank.

    Few rows are not worth an exchange, nor may be the early ones of a prompt, which see few keys.
    Raises ValueError for rows outside of 1..columns, or num_ranks < 2.
    """
    require(1 <= rows <= columns, "rows", rows, f"in 1..{columns}, the columns")
    require(num_ranks >= 2, "num_ranks", num_ranks, "at least 2")
    pairs = rows * columns - rows * (rows - 1) // 2
    own = selection_seconds(-(-rows // num_ranks), pairs // num_ranks, indexer, rates)
    sent = exchanged_bytes(rows, columns, num_ranks, combine, indexer.topk)
    together = own + exchange_seconds(rows, sent, combine, rates)
    return rows >= num_ranks and together < selection_seconds(rows, pairs, indexer, rates)


def fit_rates(cases: list[dict[str, Any]], indexer: Indexer, start: Rates = H200) -> Rates:
    """The selection rates that come nearest to measured times, in relative error; flops and bytes of `start` together.

    cases: dicts of rows, pairs and seconds. Pairs cost one number here, which is divided over flops and top_k
        as `start` divides it.
    """
    terms: Float[np.ndarray, "cases 3"] = np.array([[1.0, c["pairs"], c["rows"]] for c in cases])
    seconds = np.array([c["seconds"] for c in cases])
    scale = np.abs(terms / seconds[:, None]).max(axis=0)
    cost = _nonnegative_least_squares(terms / seconds[:, None] / scale, np.ones(len(cases))) / scale
    call, pair, row = cost
    known = 2 * indexer.heads * indexer.dim / start.flops[indexer.keys] + 4 / start.top_k
    ratio = known / max(pair, 1e-30)
    return dataclasses.replace(
        start,
        call=float(call),
        row=float(row),
        flops={**start.flops, indexer.keys: float(start.flops[indexer.keys] * ratio)},
        top_k=float(start.top_k * ratio),
    )


def _nonnegative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """argmin |matrix x - target| over x >= 0, by leaving out what would be negative, over every subset of columns."""
    best, least = np.zeros(matrix.shape[1]), math.inf
    for chosen in range(1, 1 << matrix.shape[1]):
        columns = [i for i in range(matrix.shape[1]) if chosen >> i & 1]
        x, *_ = np.linalg.lstsq(matrix[:, columns], target, rcond=None)
        error = float(np.sum((matrix[:, columns] @ x - target) ** 2))
        if (x >= 0).all() and error < least:
            best, least = np.zeros(matrix.shape[1]), error
            best[columns] = x
    return best
