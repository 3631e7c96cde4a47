"""What the gate compiles: every call that the published models make to an op that has a kernel, as shapes."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from dsa_jax.calls import Call, model_calls
from dsa_jax.config import DsaConfig
from dsa_jax.dispatch import NAMES, Op, op_named
from pallas_kernels import tuning
from pallas_kernels.target import Target, target_of

# The architectures, and their devices by the names that measured tables go by (pallas_kernels/tuned).
DEVICES = {
    "sm_80": ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB"),
    "sm_90": ("NVIDIA H200", "NVIDIA H100 80GB HBM3"),
    "sm_120": ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
    "gfx942": ("AMD Instinct MI300X",),
    "gfx950": ("AMD Instinct MI355X",),
}
ARCHS = tuple(DEVICES)
# Attention heads of one device: 128 (DeepSeek-V3.2) and 64 (GLM-5), whole and split over up to 16 devices; and 24,
# the most of which the Hopper kernel takes e4m3 keys as they are.
HEADS = (8, 16, 24, 32, 64, 128)
CACHES = (jnp.bfloat16, jnp.float8_e4m3fn)
# Rows and columns of top-k: decode of one and of 64 requests, prefill over short and long rows.
SCORES = ((1, 65536), (1, 1 << 20), (64, 8192), (64, 65536), (4096, 4096), (4096, 8192), (4096, 32768), (4096, 65536))
TOPK = (512, 2048)
# Tokens of one step, for the routed experts.
TOKENS = (1, 32, 1024, 2048, 8192)
KERNELS = NAMES[:-1]


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, and what sets it apart from the op's other cases in a table.

    variant: what changes the code of a kernel beside its config: dtypes, and what tiles are made of.
    dtype: of what its matrix products read; "" where it has none.
    """

    call: Call
    label: str
    variant: str
    dtype: str

    @property
    def op(self) -> Op:
        op = op_named(self.call.op)
        assert isinstance(op, Op), "kernels are of ops, not of what is made of them"
        return op

    @property
    def name(self) -> str:
        return f"{self.call.op}: {self.label}"

    def refusal(self, implementation: str, target: Target) -> str | None:
        """Why a kernel does not take this call, as `explain` would say, or None."""
        try:
            self.op.resolve(implementation, *self.call.arguments, device=target, **self.call.options)
        except NotImplementedError as error:
            return str(error).partition(": ")[2].partition(": ")[2]
        return None

    def config(self, implementation: str, target: Target) -> Any:
        """The config the kernel runs the call with, None where it has but one."""
        describe = getattr(self.op.kernel(implementation), f"config_{self.call.op}", None)
        return describe and describe(target, *self.call.arguments, **self.call.options)

    def function(self, implementation: str, target: Target) -> tuple[Any, tuple[Any, ...]]:
        """(f, arrays): the kernel as a function of the call's arrays alone, and their shapes."""
        leaves, tree = jax.tree.flatten((self.call.arguments, self.call.options), is_leaf=lambda leaf: leaf is None)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
        kernel = getattr(self.op.kernel(implementation), self.call.op)

        def run(*arrays):
            filled = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                filled[place] = array
            arguments, options = jax.tree.unflatten(tree, filled)
            return kernel(*arguments, target=target, **options)

        return run, tuple(leaves[i] for i in places)


@functools.cache
def cases() -> tuple[Case, ...]:
    """All of them."""
    return (*_index_cases(), *_topk_cases(), *_attention_cases(), *_dense_cases(), *_expert_cases())


def targets(arch: str) -> list[Target]:
    """An architecture as such, and each of its devices that has a measured table."""
    plain = target_of(arch)
    return [plain] + [dataclasses.replace(plain, name=name) for name in DEVICES[arch] if tuning.table(name)]


def runnable(arch: str) -> Iterator[tuple[Case, str, Target]]:
    """(case, implementation, target) of every kernel that takes a call on an architecture."""
    for target in targets(arch):
        for case in cases():
            for implementation in case.op.implementations():
                if implementation in KERNELS and case.refusal(implementation, target) is None:
                    yield case, implementation, target


def _index_cases() -> Iterator[Case]:
    for config in (DsaConfig.glm5_2(), DsaConfig.deepseek_v32()):
        for cache in CACHES:
            for call in _calls(config, cache, ("indexer_logits", "paged_indexer_logits")):
                dtype = jnp.dtype(cache).name
                yield Case(
                    call, f"{config.index_n_heads} heads, {_short(dtype)}", f"{config.index_n_heads} {dtype}", dtype
                )


def _topk_cases() -> Iterator[Case]:
    for topk in TOPK:
        for rows, columns in SCORES:
            bounds = (jax.ShapeDtypeStruct((rows,), jnp.int32),) * 2
            scores = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
            call = Call("topk_indices", "prefill", (scores, topk, *bounds), {})
            yield Case(call, f"{rows} x {columns}, k = {topk}", "", "")


def _attention_cases() -> Iterator[Case]:
    for topk in TOPK:
        for cache in CACHES:
            for heads in HEADS:
                config = dataclasses.replace(DsaConfig.deepseek_v32(), num_attention_heads=heads, index_topk=topk)
                for call in _calls(config, cache, ("sparse_mla", "paged_sparse_mla")):
                    dtype = jnp.dtype(cache).name
                    yield Case(call, f"{heads} heads, {_short(dtype)}", dtype, "bfloat16")


def _dense_cases() -> Iterator[Case]:
    for config in (DsaConfig.glm5_2(), DsaConfig.deepseek_v32()):
        for call in _calls(config, jnp.bfloat16, ("dense_mla",)):
            widths = f"{config.qk_head_dim} and {config.v_head_dim} wide"
            yield Case(call, f"{config.num_attention_heads} heads, {widths}", widths, "bfloat16")


def _expert_cases() -> Iterator[Case]:
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    for config in (DsaConfig.glm5_2(), DsaConfig.deepseek_v32()):
        experts, narrow, wide = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        sizes = jax.ShapeDtypeStruct((experts,), jnp.int32)
        for tokens in TOKENS:
            for inner, outer in ((wide, 2 * narrow), (narrow, wide)):  # gate with up, and down
                x = shape((tokens * config.num_experts_per_tok, inner))
                call = Call("grouped_matmul", "prefill", (x, shape((experts, outer, inner)), sizes), {})
                yield Case(call, f"{tokens} tokens", "", "bfloat16")


def _calls(config: DsaConfig, cache: Any, ops: tuple[str, ...]) -> list[Call]:
    return [call for call in model_calls(config, cache_dtype=cache) if call.op in ops]


def _short(dtype: str) -> str:
    return {"bfloat16": "bf16", "float8_e4m3fn": "e4m3"}[dtype]
