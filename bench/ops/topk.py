"""Top-k of score rows."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.case import Case, sampled, short
from dsa_jax import DsaConfig, topk_indices

_CHECKED_ROWS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topk(Case):
    """k of every row's scores.

    rows, columns: of the scores, float32.
    scores: "normal", or "relu": max(normal - 1.5, 0), whose k-th score ties with most of the row.
    """

    op: ClassVar[str] = "topk_indices"
    unit: ClassVar[str | None] = None

    rows: int
    columns: int
    k: int = 2048
    scores: Literal["normal", "relu"] = "normal"

    @classmethod
    def of_model(cls, config: DsaConfig, seq: int) -> list["Topk"]:
        """A prefill chunk's last rows, and one decode step of 64 requests."""
        return [cls(rows=rows, columns=seq, k=config.index_topk) for rows in (min(seq, 4096), 64)]

    @property
    def name(self) -> str:
        return f"{self.rows} x {short(self.columns)} k={self.k}{' relu' * (self.scores == 'relu')}"

    @property
    def flops(self) -> int:
        return 0

    @property
    def bytes(self) -> int:
        return 4 * self.rows * (self.columns + self.k)

    def inputs(self) -> tuple[Any, ...]:
        scores = jax.random.normal(jax.random.key(self.rows + self.columns), (self.rows, self.columns), jnp.float32)
        return (jnp.maximum(scores - 1.5, 0) if self.scores == "relu" else scores,)

    def call(self, implementation: str) -> Callable[..., Any]:
        return lambda scores: topk_indices(scores, self.k, implementation=implementation)

    def baselines(self) -> dict[str, Callable[..., Any] | str]:
        if self.k > self.columns:
            return {"lax.top_k": "k is more than the columns"}
        return {"lax.top_k": lambda scores: lax.top_k(scores, self.k)[1]}

    def sample(self, out: Any, inputs: tuple[Any, ...]) -> Any:
        rows = sampled(self.rows, _CHECKED_ROWS)
        return inputs[0][rows], out[rows]

    def error(self, sample: Any, *, ours: bool) -> str | None:
        scores, chosen = sample
        kept = min(self.k, self.columns)
        rule = np.argsort(-scores, axis=1, kind="stable")[:, :kept]
        if ours:
            want = np.pad(np.sort(rule, axis=1), ((0, 0), (0, self.k - kept)), constant_values=-1)
            return None if np.array_equal(chosen, want) else "other columns than the rule's"
        best = np.take_along_axis(scores, rule, axis=1)
        got = -np.sort(-np.take_along_axis(scores, np.asarray(chosen, np.int64), axis=1), axis=1)
        distinct = all(len(np.unique(row)) == kept for row in chosen)
        return None if distinct and np.array_equal(got, best) else "other scores than the k greatest"
