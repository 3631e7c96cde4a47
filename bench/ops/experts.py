"""The routed experts' matrix products."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bench.case import MLA_COSINE, Case, cosine_error, quick_key, sampled, short
from dsa_jax import DsaConfig
from dsa_jax.grouped import grouped_matmul


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedMatmul(Case):
    """Rows sorted by expert, each times its expert's matrix. Experts are drawn evenly.

    rows: tokens times experts a token; inner, outer: widths before and after; experts: matrices.
    """

    op: ClassVar[str] = "grouped_matmul"
    unit: ClassVar[str | None] = "bf16"

    rows: int
    inner: int
    outer: int
    experts: int = 256

    @classmethod
    def of_model(cls, config: DsaConfig, seq: int) -> list["GroupedMatmul"]:
        """Gate with up, and down, for a chunk of up to 8192 tokens and for a decode step of 32."""
        hidden, width = config.hidden_size, config.moe_intermediate_size
        return [
            cls(rows=tokens * config.num_experts_per_tok, inner=inner, outer=outer, experts=config.n_routed_experts)
            for tokens in (min(seq, 8192), 32)
            for inner, outer in ((hidden, 2 * width), (width, hidden))
        ]

    @property
    def name(self) -> str:
        return f"{short(self.rows)} x {self.inner} to {self.outer}, {self.experts} experts"

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inner * self.outer

    @property
    def bytes(self) -> int:
        hit = int((np.asarray(self._sizes()) > 0).sum())
        return 2 * (self.rows * (self.inner + self.outer) + hit * self.inner * self.outer)

    def inputs(self) -> tuple[Any, ...]:
        keys = jax.random.split(quick_key(0), 2)
        x = jax.random.normal(keys[0], (self.rows, self.inner), jnp.bfloat16)
        weight = jax.random.normal(keys[1], (self.experts, self.outer, self.inner), jnp.bfloat16)
        return x, weight, jnp.asarray(self._sizes())

    def call(self, implementation: str) -> Callable[..., Any]:
        return lambda *inputs: grouped_matmul(*inputs, implementation=implementation)

    def sample(self, out: Any, inputs: tuple[Any, ...]) -> Any:
        x, weight, sizes = inputs
        rows, columns = sampled(self.rows, 16), sampled(self.outer, 101)
        expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.asarray(rows), side="right")
        return out[rows][:, columns], x[rows], weight[expert[:, None], columns[None]]

    def error(self, sample: Any, *, ours: bool) -> str | None:
        del ours
        out, x, weight = sample
        return cosine_error(out, np.einsum("ri,roi->ro", x.astype(np.float64), weight.astype(np.float64)), MLA_COSINE)

    def _sizes(self) -> np.ndarray:
        """Rows of every expert."""
        chosen = np.random.default_rng(0).integers(0, self.experts, self.rows)
        return np.bincount(chosen, minlength=self.experts).astype(np.int32)
