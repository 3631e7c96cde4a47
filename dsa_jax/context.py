"""What the rows of one step see, and through which op they reach it.

A layer works on packed rows [T, hidden] and leaves everything about requests, caches and implementations to a context:

- `Sequences`: whole sequences side by side and no cache; a row's keys are rows of the same call.
- `PagedPrefill`: a chunk of one or more requests, whose keys are in paged caches, the chunk's own included.
- `PagedDecode`: the last `next_n` tokens of every request, over the same caches.
- `PagedMixed`: both in one step.

Between layers, selected indices are positions in the row's own request, ascending, -1 last: i32[T, index_topk].
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from dsa_jax import stripe_cost
from dsa_jax.cache import (
    IndexCache,
    gather_index_keys,
    ragged_rows,
    read_latents,
    to_slots,
    write_index_keys,
    write_latents,
)
from dsa_jax.mla import paged_sparse_mla, sparse_mla
from dsa_jax.parallel import on_ranks, over_heads, over_requests
from dsa_jax.plan import visible_indices
from dsa_jax.quant import quantize_index_query
from dsa_jax.striped import striped_select_topk
from dsa_jax.topk import DEFAULT_MEMORY_BUDGET, paged_select_topk, select_topk


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's caches. `index` is None on layers that share another layer's indices."""

    latent: Any  # LatentCache
    index: Any  # IndexCache or None


@dataclasses.dataclass(frozen=True)
class Stripes:
    """How prefill rows are divided over a mesh axis for selection; `striped_select_topk` says what the fields mean.

    stripe, min_rows: None for what `dsa_jax.stripe_cost` finds best.
    """

    mesh: Mesh | AbstractMesh
    axis_name: str
    stripe: int | None = None
    combine: Literal["max", "all_gather"] = "all_gather"
    fold: bool = True
    min_rows: int | None = None


@dataclasses.dataclass(frozen=True)
class Options:
    """What every op of a step is called with.

    index_topk: keys a row attends to.
    sm_scale: the softmax scale.
    dense: attend to every visible key through the expanded form and score none (prefills of at most index_topk tokens).
        None for a prefill whose lengths the caller does not know: the device looks, and where no row sees more than
        index_topk keys all of them are selected without scores.
    implementation, memory_budget, num_splits: as the ops take them.
    stripes: divide prefill selection over a mesh axis, or None to select every row on every device.
    mesh: attend on each rank's heads, divide experts and decode's requests over the ranks; None for one device.
    reuse_indices: attend to the indices handed in also in a layer that has an indexer, which then only writes its keys
        (later draft steps of a multi-token prediction layer, see `config.index_share_for_mtp_iteration`).
    """

    index_topk: int
    sm_scale: float
    dense: bool | None = False
    implementation: str | None = None
    memory_budget: int = DEFAULT_MEMORY_BUDGET
    num_splits: int | None = None
    stripes: Stripes | None = None
    mesh: Mesh | AbstractMesh | None = None
    reuse_indices: bool = False


# The fields of the contexts are typed Any: jax also puts shapes, shardings and None where the arrays are. Static ones
# are part of the pytree's structure.
_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sequences:
    """Whole sequences side by side, without a cache.

    positions: i32[T], the row's position in its own sequence.
    starts: i32[T], the row of this call where its sequence begins.
    """

    positions: Any
    starts: Any
    options: Options = dataclasses.field(metadata=_STATIC)

    @classmethod
    def of_batch(cls, batch: int, length: int, options: Options) -> "Sequences":
        """`batch` sequences of `length` tokens each, flattened one after another."""
        positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)
        starts = jnp.repeat(jnp.arange(batch, dtype=jnp.int32) * length, length)
        return cls(positions, starts, options)

    def write(self, cache: Any, latents: tuple[Array, Array], index_keys: Array | None) -> None:
        """Nothing is kept."""
        return None

    def select(self, cache: Any, q: Array, k: Array, weights: Array) -> Int[Array, "T K"]:
        columns = _select(q, k, weights, self.starts, self._ends, None, self.options)
        return _rebase(columns, -self.starts)

    def attend(self, cache: Any, q: Array, latents: tuple[Array, Array], indices: Array) -> Array:
        kv = jnp.concatenate(latents, axis=-1)
        return _sparse(q, kv, _rebase(indices, self.starts), latents[0].shape[-1], self.options)

    def visible(self, cache: Any, latents: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """The keys of a dense step, latent and rope joined [N, R + dr], and each row's range [starts, ends) in them."""
        return jnp.concatenate(latents, axis=-1), self.starts, self._ends

    @property
    def _ends(self) -> Array:
        return self.starts + self.positions + 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedPrefill:
    """A chunk of one or more requests over paged caches.

    positions: i32[T], the row's position in its request.
    request: i32[T], the row of `block_table` it belongs to; -1 for padding.
    block_table: i32[B, P], the page that holds positions [p * page_size, (p + 1) * page_size); -1 where there is none.
    seq_lens: i32[B], each request's length with this chunk.
    total: at least the sum of `seq_lens`; the size of the ragged copy of the keys.
    """

    positions: Any
    request: Any
    block_table: Any
    seq_lens: Any
    total: int = dataclasses.field(metadata=_STATIC)
    options: Options = dataclasses.field(metadata=_STATIC)

    def write(self, cache: LayerCache, latents: tuple[Array, Array], index_keys: Array | None) -> LayerCache:
        return _write(cache, self.slots(self.positions[:, None], cache)[:, 0], latents, index_keys)

    def slots(self, indices: Int[Array, "T K"], cache: LayerCache) -> Int[Array, "T K"]:
        """The cache slots of each row's indices."""
        return to_slots(indices, self.request, self.block_table, cache.latent.page_size)

    def select(self, cache: LayerCache, q: Array, k: Array, weights: Array) -> Int[Array, "T K"]:
        assert cache.index is not None
        q, weights = _match_query(cache.index, q, weights)
        keys, k_scale, _ = gather_index_keys(cache.index, self.block_table, self.seq_lens, self.total)
        starts, ends = self._ranges
        columns = _select(q, keys, weights, starts, ends, k_scale, self.options)
        return _rebase(columns, -starts)

    def attend(self, cache: LayerCache, q: Array, latents: tuple[Array, Array], indices: Array) -> Array:
        return _attend(cache, q, self.slots(indices, cache), self.options)

    def visible(self, cache: LayerCache, latents: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        request, position, _ = ragged_rows(self.seq_lens, self.total)
        slots = to_slots(position[:, None], request, self.block_table, cache.latent.page_size)[:, 0]
        return read_latents(cache.latent, slots).astype(latents[0].dtype), *self._ranges

    @property
    def _ranges(self) -> tuple[Array, Array]:
        """[starts, ends) of each row in the ragged copy of its request's keys; empty for padding."""
        first = jnp.cumsum(self.seq_lens) - self.seq_lens
        real = self.request >= 0
        starts = jnp.where(real, first[jnp.maximum(self.request, 0)], 0)
        return starts, jnp.where(real, starts + self.positions + 1, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedDecode:
    """The last `next_n` tokens of every request over paged caches; rows are requests times next_n.

    block_table: i32[B, P], as in PagedPrefill.
    seq_lens: i32[B], each request's length with these tokens; 0 for padding.
    next_n: tokens a request in this step, 1 to 6.
    """

    block_table: Any
    seq_lens: Any
    next_n: int = dataclasses.field(metadata=_STATIC)
    options: Options = dataclasses.field(metadata=_STATIC)

    @property
    def positions(self) -> Int[Array, " T"]:
        """The row's position in its request; 0 for rows that are not there."""
        return jnp.maximum(self._signed_positions, 0)

    @property
    def _signed_positions(self) -> Array:
        last = jnp.arange(self.next_n, dtype=jnp.int32) - self.next_n
        return (self.seq_lens[:, None] + last[None]).reshape(-1)

    def write(self, cache: LayerCache, latents: tuple[Array, Array], index_keys: Array | None) -> LayerCache:
        return _write(cache, self.slots(self._signed_positions[:, None], cache)[:, 0], latents, index_keys)

    def slots(self, indices: Int[Array, "T K"], cache: LayerCache) -> Int[Array, "T K"]:
        """The cache slots of each row's indices."""
        request = jnp.repeat(jnp.arange(self.block_table.shape[0], dtype=jnp.int32), self.next_n)
        return to_slots(indices, request, self.block_table, cache.latent.page_size)

    def select(self, cache: LayerCache, q: Array, k: Array, weights: Array) -> Int[Array, "T K"]:
        assert cache.index is not None
        q, weights = _match_query(cache.index, q, weights)
        options = self.options

        def select(index, q, weights, block_table, seq_lens):
            common = {"memory_budget": options.memory_budget, "implementation": options.implementation}
            return paged_select_topk(q, index, weights, block_table, seq_lens, options.index_topk, **common)

        rows = self._by_request(q), self._by_request(weights), self.block_table, self.seq_lens
        indices = over_requests(select, options.mesh, split=4)(cache.index, *rows)
        return indices.reshape(-1, options.index_topk)

    def attend(self, cache: LayerCache, q: Array, latents: tuple[Array, Array], indices: Array) -> Array:
        options = self.options

        def attend(*arrays):
            out, _ = paged_sparse_mla(
                *arrays,
                sm_scale=options.sm_scale,
                v_dim=cache.latent.nope.shape[-1],
                num_splits=options.num_splits,
                implementation=options.implementation,
            )
            return out

        queries = self._by_request(q.astype(cache.latent.rope.dtype))
        rows = cache.latent, self._by_request(indices), self.block_table, self.seq_lens
        out = over_heads(attend, options.mesh, axis=2)(queries, *rows)
        return out.reshape(-1, *out.shape[2:]).astype(q.dtype)

    def visible(self, cache: LayerCache, latents: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        raise ValueError("options.dense must be False in decode: its lengths are not known when it is compiled")

    def _by_request(self, rows: Array) -> Array:
        return rows.reshape(-1, self.next_n, *rows.shape[1:])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedMixed:
    """Decoded tokens of some requests and chunks of others in one step: `decode`'s rows, then `prefill`'s."""

    decode: PagedDecode
    prefill: PagedPrefill

    @property
    def options(self) -> Options:
        return self.prefill.options

    @property
    def positions(self) -> Int[Array, " T"]:
        return jnp.concatenate([self.decode.positions, self.prefill.positions])

    def write(self, cache: LayerCache, latents: tuple[Array, Array], index_keys: Array | None) -> LayerCache:
        positions = jnp.concatenate([self.decode._signed_positions, self.prefill.positions])
        return _write(cache, self.slots(positions[:, None], cache)[:, 0], latents, index_keys)

    def slots(self, indices: Int[Array, "T K"], cache: LayerCache) -> Int[Array, "T K"]:
        """The cache slots of each row's indices."""
        decoded, chunk = self._parts(indices)
        return jnp.concatenate([self.decode.slots(decoded, cache), self.prefill.slots(chunk, cache)])

    def select(self, cache: LayerCache, q: Array, k: Array, weights: Array) -> Int[Array, "T K"]:
        parts = zip((self.decode, self.prefill), *map(self._parts, (q, k, weights)), strict=True)
        return jnp.concatenate([context.select(cache, *rows) for context, *rows in parts])

    def attend(self, cache: LayerCache, q: Array, latents: tuple[Array, Array], indices: Array) -> Array:
        return _attend(cache, q, self.slots(indices, cache), self.options)

    def visible(self, cache: LayerCache, latents: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        return self.decode.visible(cache, latents)  # refuses

    def _parts(self, rows: Array) -> tuple[Array, Array]:
        count = self.decode.block_table.shape[0] * self.decode.next_n
        return rows[:count], rows[count:]


Context = Sequences | PagedPrefill | PagedDecode | PagedMixed


def _attend(cache: LayerCache, q: Array, slots: Int[Array, "T K"], options: Options) -> Array:
    """Sparse attention of every row over its own slots."""
    out = _sparse(q.astype(cache.latent.rope.dtype), cache.latent, slots, cache.latent.nope.shape[-1], options)
    return out.astype(q.dtype)


def _sparse(q: Array, kv: Any, indices: Int[Array, "T K"], v_dim: int, options: Options) -> Array:
    def attend(q, kv, indices):
        common = {"sm_scale": options.sm_scale, "implementation": options.implementation}
        return sparse_mla(q, kv, indices, v_dim=v_dim, **common)[0]

    return over_heads(attend, options.mesh)(q, kv, indices)


def _write(cache: LayerCache, slots: Array, latents: tuple[Array, Array], index_keys: Array | None) -> LayerCache:
    index = cache.index
    if index_keys is not None:
        assert index is not None
        index = write_index_keys(index, slots, index_keys)
    return LayerCache(write_latents(cache.latent, slots, *latents), index)


def _match_query(cache: IndexCache, q: Array, weights: Array) -> tuple[Array, Array]:
    """The index query in the cache's dtype; an fp8 query's scale goes into the weights."""
    if cache.k.dtype == jnp.float8_e4m3fn:
        return quantize_index_query(q, weights)
    return q.astype(cache.k.dtype), weights


def _rebase(indices: Int[Array, "T K"], offset: Int[Array, " T"]) -> Int[Array, "T K"]:
    """Adds each row's offset to its indices; -1 stays -1."""
    return jnp.where(indices >= 0, indices + offset[:, None], -1)


def _select(
    q: Float[Array, "T H D"],
    k: Float[Array, "N D"],
    weights: Float[Array, "T H"],
    starts: Array,
    ends: Array,
    k_scale: Array | None,
    options: Options,
) -> Int[Array, "T K"]:
    common: dict[str, Any] = {"memory_budget": options.memory_budget, "implementation": options.implementation}
    stripes = options.stripes
    mesh = options.mesh if stripes is None else stripes.mesh

    def select(q, k, weights, starts, ends, k_scale):
        if stripes is None:
            return select_topk(q, k, weights, starts, ends, options.index_topk, k_scale=k_scale, **common)
        common.update(_division(stripes, q, k, options.index_topk))
        return striped_select_topk(q, k, weights, starts, ends, options.index_topk, k_scale=k_scale, **common)

    whole = PartitionSpec()
    select = on_ranks(select, mesh, whole, whole)
    if options.dense is not None:
        return select(q, k, weights, starts, ends, k_scale)
    return jax.lax.cond(
        jnp.all(ends - starts <= options.index_topk),
        lambda: visible_indices(starts, ends, options.index_topk),
        lambda: select(q, k, weights, starts, ends, k_scale),
    )


def _division(stripes: Stripes, q: Array, k: Array, topk: int) -> dict[str, Any]:
    """striped_select_topk's options for a step of these sizes."""
    ranks, (rows, heads, dim) = stripes.mesh.shape[stripes.axis_name], q.shape
    stripe, min_rows = stripes.stripe, stripes.min_rows
    if min_rows is None and ranks > 1 and rows > 0:
        indexer = stripe_cost.Indexer(heads, dim, topk, "e4m3" if k.dtype.itemsize == 1 else "bf16")
        columns = max(rows, k.shape[0])
        gains = stripe_cost.pays(rows, columns, ranks, combine=stripes.combine, indexer=indexer)
        min_rows = 0 if gains else rows + 1
    return {
        "axis_name": stripes.axis_name,
        "stripe": stripe_cost.best_stripe(rows, ranks) if stripe is None else stripe,
        "fold": stripes.fold,
        "combine": stripes.combine,
        "min_rows": min_rows or 0,
    }
