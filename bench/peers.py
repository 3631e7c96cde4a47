"""Other people's kernels on our inputs: torch.topk always, the rest where they are installed.

A peer gets what we get, converted before it is timed: the layouts it wants, and schedules that it makes once a step.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bench.case import Case
from bench.ops.attention import PagedSparseMla, SparseMla
from bench.ops.scores import IndexerLogits, PagedIndexerLogits, SelectTopk
from bench.ops.topk import Topk
from dsa_jax.cache import to_slots
from dsa_jax.plan import decode_ends
from dsa_jax.quant import pack_index_pages, pack_latent_rows


class Unavailable(Exception):
    """Why a peer does not run a case."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """A peer's call, ready to be timed.

    call: runs it on torch's stream.
    result: what `call` returned as `Case.error` takes it.
    """

    call: Callable[[], Any]
    result: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Peer:
    """name: as printed; module: what to import; prepare(module, case, inputs): raises Unavailable or gives a Launch."""

    name: str
    module: str
    prepare: Callable[[Any, Any, tuple[Any, ...]], Launch]

    def load(self) -> Any:
        """The peer's module, imported. Raises Unavailable with the reason."""
        if jax.default_backend() != "gpu":
            raise Unavailable("needs a GPU")
        try:
            importlib.import_module("torch")
            return importlib.import_module(self.module)
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name in ("torch", self.module.split(".")[0])
            raise Unavailable(f"{error.name} is not installed" if missing else f"does not import: {error}") from error

    def launch(self, case: Case, inputs: tuple[Any, ...]) -> Launch:
        """The case made ready for the peer. Raises Unavailable with the reason."""
        module = self.load()
        jax.block_until_ready(inputs)
        return self.prepare(module, case, inputs)


def baselines(case: Case) -> tuple[Peer, ...]:
    """What comes with torch itself."""
    return (Peer("torch.topk", "torch", _torch_topk),) if isinstance(case, Topk) else ()


def peers(case: Case) -> tuple[Peer, ...]:
    """Every peer that has the case's op, installed or not."""
    return _PEERS.get(type(case), ())


def wait(out: Any) -> Any:
    """Blocks until torch's stream is done."""
    _torch().cuda.synchronize()
    return out


def flush_l2() -> Any:
    """Reads more memory than the L2 cache holds, in one kernel on torch's stream."""
    return _scratch().amax(1)


@functools.cache
def _scratch() -> Any:
    torch = _torch()
    return torch.zeros(2**17, 2**10, dtype=torch.float32, device="cuda")


def _torch() -> Any:
    return importlib.import_module("torch")


def _to_torch(x: jax.Array) -> Any:
    """The same memory as a torch tensor; e4m3 goes through bytes, which every version of the exchange knows."""
    if x.dtype == jnp.float8_e4m3fn:
        return _to_torch(lax.bitcast_convert_type(x, jnp.uint8)).view(_torch().float8_e4m3fn)
    return _torch().from_dlpack(x)


def _to_jax(tensor: Any) -> jax.Array:
    return jax.dlpack.from_dlpack(tensor.contiguous())


def _torch_topk(torch: Any, case: Topk, inputs: tuple[Any, ...]) -> Launch:
    if case.k > case.columns:
        raise Unavailable("k is more than the columns")
    scores = _to_torch(inputs[0])
    return Launch(lambda: torch.topk(scores, case.k, dim=1), lambda out: _to_jax(out[1]))


def _flashinfer_topk(flashinfer: Any, case: Topk, inputs: tuple[Any, ...]) -> Launch:
    scores = _to_torch(inputs[0])
    return Launch(lambda: flashinfer.top_k(scores, case.k), lambda out: _to_jax(out[1]))


def _sglang_topk(sgl_kernel: Any, case: Topk, inputs: tuple[Any, ...]) -> Launch:
    if case.k != 2048:
        raise Unavailable("has k = 2048 only")
    scores = _to_torch(inputs[0])
    lengths = _torch().full((case.rows,), case.columns, dtype=_torch().int32, device="cuda")
    return Launch(lambda: sgl_kernel.fast_topk_v2(scores, lengths, case.k), _to_jax)


def _vllm_topk(vllm_ops: Any, case: Topk, inputs: tuple[Any, ...]) -> Launch:
    del vllm_ops  # importing it registers the op with torch
    torch = _torch()
    scores = _to_torch(inputs[0])
    bounds = [torch.full((case.rows,), n, dtype=torch.int32, device="cuda") for n in (0, case.columns)]
    out = torch.empty((case.rows, case.k), dtype=torch.int32, device="cuda")

    def call():
        torch.ops._C.top_k_per_row_prefill(scores, *bounds, out, case.rows, scores.stride(0), scores.stride(1), case.k)
        return out

    return Launch(call, _to_jax)


def _deep_gemm_logits(deep_gemm: Any, case: IndexerLogits, inputs: tuple[Any, ...]) -> Launch:
    if case.keys != "e4m3":
        raise Unavailable("takes e4m3 only")
    q, k, weights, starts, ends, k_scale = map(_to_torch, inputs)
    return Launch(lambda: deep_gemm.fp8_mqa_logits(q, (k, k_scale), weights, starts, ends, clean_logits=False), _to_jax)


def _deep_gemm_select(deep_gemm: Any, case: SelectTopk, inputs: tuple[Any, ...]) -> Launch:
    if case.keys != "e4m3":
        raise Unavailable("takes e4m3 only")
    if 4 * case.rows * case.columns > 20e9:
        raise Unavailable("its scores do not fit in memory")
    torch = _torch()
    q, k, weights, starts, ends, k_scale = map(_to_torch, inputs)

    def call():
        logits = deep_gemm.fp8_mqa_logits(q, (k, k_scale), weights, starts, ends, clean_logits=True)
        return torch.topk(logits, min(case.topk, case.columns), dim=1)[1]

    return Launch(call, _to_jax)


def _deep_gemm_paged(deep_gemm: Any, case: PagedIndexerLogits, inputs: tuple[Any, ...]) -> Launch:
    q, cache, weights, table, lengths = inputs
    if case.next_n > 2:
        raise Unavailable("takes at most next_n = 2 on sm_90")
    # A page is all its keys, then all their scales, 132 bytes a token: [pages, page, 1, 132].
    pages = _to_torch(pack_index_pages(cache.k, cache.scale)).view(cache.k.shape[0], case.page, 1, case.dim + 4)
    ends = _to_torch(decode_ends(lengths, case.next_n))
    query, heads, blocks = _to_torch(q), _to_torch(weights.reshape(-1, case.heads)), _to_torch(table)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(ends, case.page, deep_gemm.get_num_sms())
    columns = table.shape[1] * case.page

    def call():
        return deep_gemm.fp8_paged_mqa_logits(query, pages, heads, ends, blocks, schedule, columns, clean_logits=False)

    return Launch(call, lambda out: _to_jax(out).reshape(case.batch, case.next_n, -1))


def _flash_mla_prefill(flash_mla: Any, case: SparseMla, inputs: tuple[Any, ...]) -> Launch:
    q, cache, indices = inputs
    if case.cache != "bf16":
        raise Unavailable("prefills from a bf16 cache only")
    rows = jnp.concatenate([cache.nope, cache.rope], axis=-1).reshape(-1, 1, case.latent + case.rope)
    heads = -(-case.heads // 64) * 64  # it takes multiples of 64
    query = _to_torch(jnp.pad(q, ((0, 0), (0, heads - case.heads), (0, 0))))
    kv, chosen = _to_torch(rows), _to_torch(indices[:, None])
    call = functools.partial(flash_mla.flash_mla_sparse_fwd, query, kv, chosen, case.options["sm_scale"])
    return Launch(call, lambda out: (_to_jax(out[0])[:, : case.heads], None))


def _flash_mla_decode(flash_mla: Any, case: PagedSparseMla, inputs: tuple[Any, ...]) -> Launch:
    q, cache, indices, table, lengths = inputs
    if case.cache != "e4m3":
        raise Unavailable("decodes sparsely from an FP8 cache only")
    heads = -(-case.heads // 64) * 64
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, heads - case.heads), (0, 0)))
    request = jnp.repeat(jnp.arange(case.batch, dtype=jnp.int32), case.next_n)
    slots = to_slots(indices.reshape(-1, case.topk), request, table, cache.page_size).reshape(indices.shape)
    packed = _to_torch(pack_latent_rows(cache.nope, cache.scale, cache.rope))
    pages = packed.view(*cache.nope.shape[:2], 1, case.row_bytes).view(_torch().float8_e4m3fn)
    query, blocks, lens, chosen = (_to_torch(x) for x in (padded, table, lengths, slots))
    schedule = flash_mla.get_mla_metadata(lens, case.next_n * heads, 1, heads, True, case.topk)

    def call():
        return flash_mla.flash_mla_with_kvcache(
            query,
            pages,
            blocks,
            lens,
            case.latent,
            *schedule,
            softmax_scale=case.options["sm_scale"],
            is_fp8_kvcache=True,
            indices=chosen,
        )

    return Launch(call, lambda out: (_to_jax(out[0])[:, :, : case.heads], None))


def _examples_only(module: Any, case: Case, inputs: tuple[Any, ...]) -> Launch:
    raise Unavailable("ships its kernels for this as example scripts, which cannot be imported")


_TILELANG = Peer("tilelang", "tilelang", _examples_only)
_PEERS: dict[type[Case], tuple[Peer, ...]] = {
    Topk: (
        Peer("sglang", "sgl_kernel", _sglang_topk),
        Peer("flashinfer", "flashinfer", _flashinfer_topk),
        Peer("vllm", "vllm._custom_ops", _vllm_topk),
        _TILELANG,
    ),
    IndexerLogits: (Peer("deep_gemm", "deep_gemm", _deep_gemm_logits), _TILELANG),
    PagedIndexerLogits: (Peer("deep_gemm", "deep_gemm", _deep_gemm_paged),),
    SelectTopk: (Peer("deep_gemm + torch.topk", "deep_gemm", _deep_gemm_select),),
    SparseMla: (Peer("flash_mla", "flash_mla", _flash_mla_prefill), _TILELANG),
    PagedSparseMla: (Peer("flash_mla", "flash_mla", _flash_mla_decode),),
}


def known() -> Iterator[str]:
    """The names of all peers."""
    yield from dict.fromkeys(peer.name for group in _PEERS.values() for peer in group)
