"""What one math warpgroup does with a tile of 64 keys, in PTX: wgmma, then the weighted sum of the heads in registers.

The keys are the product's 64 rows and `columns` (query, head) pairs its columns. wgmma leaves columns 8j + 2c and
8j + 2c + 1 of a row with lane c of a quad, so the pairs are ordered to give every lane heads of one query only: eight
consecutive columns hold two heads of four queries, or of fewer queries whose heads are then shared out between lanes.
The order costs nothing, it is how the copy of the queries is cut (`Tile.query_view`). A lane then sums its heads
without talking to another, and only lanes that share a query meet at the end.

Values go between these functions as opaque register files: arrays of 2-vectors, so many 32-bit registers a thread.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels import simt
from pallas_kernels.simt import SCALAR, THREADS, Operand, Pointer, Value, as_value, maximum, minimum, scalar, select

KEYS = 64  # rows of a wgmma
_SCALAR_RESULT = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)
_SWIZZLE_CODE = {128: 1, 64: 2, 32: 3}  # the layout field of a shared-memory matrix descriptor


@dataclasses.dataclass(frozen=True)
class Tile:
    """The (query, head) columns of one tile and how they lie in shared memory.

    heads: 16, 32, 64 or 128; columns: a multiple of it, at most 128; dim: index_head_dim; itemsize: an operand's bytes.
    """

    heads: int
    columns: int
    dim: int
    itemsize: int

    @property
    def queries(self) -> int:
        return self.columns // self.heads

    @property
    def lanes(self) -> int:
        """Lanes of a quad that share a query, each with `thread_heads` of its heads."""
        return max(4 // self.queries, 1)

    @property
    def thread_heads(self) -> int:
        return self.heads // self.lanes

    @property
    def quads(self) -> int:
        """Queries that a lane serves, four apart from each other."""
        return max(self.queries // 4, 1)

    @property
    def chunk(self) -> int:
        """Elements of a row that lie together: at most the 128 bytes that a swizzled row can have."""
        return min(self.dim, 128 // self.itemsize)

    @property
    def chunks(self) -> int:
        return self.dim // self.chunk

    @property
    def row_bytes(self) -> int:
        return self.chunk * self.itemsize

    @property
    def query_view(self) -> tuple[int, int, int, int]:
        """The axes (heads, dim) of the queries, cut for copies quad by quad."""
        return (self.lanes, self.thread_heads // 2, 2, self.dim)

    @property
    def quad_shape(self) -> tuple[int, ...]:
        """The columns of one quad of queries in shared memory, eight and eight."""
        return (self.thread_heads // 2, 4 // self.lanes, self.lanes, 2, self.chunk)


def register_file(count: int) -> Any:
    """The type of an opaque file of `count` 32-bit registers a thread, an even number."""
    shape = (THREADS * count,)
    return plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=_file_layout(count))


def load_weights(tile: Tile, *, halved: Callable[[int], bool]) -> Callable[..., jax.Array]:
    """-> f(weights_ref[columns or more] in shared memory): the weights of this lane's heads, quad by quad.

    halved(head): whether `sum_heads` will give that head's relu doubled.
    """
    count = tile.quads * tile.thread_heads

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=register_file(count))
    def load(_, ref):
        part = _lane_of_quad() & (tile.lanes - 1)
        values = []
        for quad in range(tile.quads):
            first = Pointer.to(ref).at(_query_of_lane(tile, quad) * tile.heads + part * tile.thread_heads)
            for offset in range(0, tile.thread_heads, 4):
                # Volatile: the compiler must not move it past the slot's return.
                text = f"ld.volatile.shared.v4.f32 {{$0,$1,$2,$3}}, [$4+{4 * offset}];"
                values += simt.ptx_floats(text, first.shared(), count=4)
        return _pack([x * 0.5 if halved(i % tile.thread_heads) else x for i, x in enumerate(values)])

    return load


def load_rows(tile: Tile, *, queries: int, columns: int, has_lengths: bool) -> Callable[..., jax.Array]:
    """-> f(length or ranges, out_ref, request, first_query, before): where this lane's queries may write what.

    A pointer to the row of the first, and for each the first visible key, how many are visible, and how many columns to
    write (none past the last query), all less the key that the lane stands on in a tile.

    first_query: of the group; before: its queries that come before this tile's.
    length: of the request, where has_lengths.
    ranges: starts and ends of the group's queries in shared memory, 32 words apart.
    """
    source_type = SCALAR if has_lengths else plgpu.RefType()

    @plgpu.inline_mgpu(
        arg_types=(source_type, plgpu.RefType(), SCALAR, SCALAR, SCALAR),
        return_type=register_file(_row_registers(tile)),
    )
    def load(_, source, out, request, first, before):
        key = _key_of_lane(tile)
        if tile.lanes == 4:  # two hold the same sums as the others: far past any limit they do not write
            key = select((_thread() & 2).differs(0), 2**30, key)
        first_row = scalar(request) * queries + scalar(first)
        words: list[Value] = []
        for quad in range(tile.quads):
            in_group = scalar(before) + _query_of_lane(tile, quad)
            slot = scalar(first) + in_group
            if quad == 0:
                words += Pointer.to(out).row(first_row + in_group, columns).at(key).words()
            if has_lengths:
                start, end = as_value(0), scalar(source) + (slot + (1 - queries))
            else:
                start, end = (Pointer.to(source)[in_group + x] for x in (0, 32))
                start = maximum(start, 0)
            end = minimum(end, columns)
            limit = select(slot < queries, columns, 0) - key
            words += [start - key, maximum(end - start, 0), limit]
        words += [as_value(0)] * (_row_registers(tile) - len(words))
        return _pack([word.as_float() for word in words])

    return load


def multiply(tile: Tile) -> Callable[..., jax.Array]:
    """-> f(keys_ref, queries_ref): the 64 x columns products of a tile in shared memory, `columns // 2` registers."""
    transforms = (plgpu.SwizzleTransform(tile.row_bytes),)
    ref = plgpu.RefType(transforms)
    count = tile.columns // 2

    @plgpu.inline_mgpu(arg_types=(ref, ref), return_type=register_file(count))
    def run(_, keys, queries):
        words = (_descriptor_low(x) for x in (keys, queries))
        return _pack(simt.ptx_floats(_wgmma_text(tile, count), *words, count=count, collective=True))

    return run


def load_scales(tile: Tile) -> Callable[..., jax.Array]:
    """-> f(scale_ref[64] in shared memory): the scales of this lane's two keys, or twice that of the one it writes."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=register_file(2))
    def load(_, ref):
        first = Pointer.to(ref).at(_key_of_lane(tile)).shared()
        texts = [f"ld.volatile.shared.f32 $0, [$1+{32 * i}];" for i in range(2 if tile.lanes == 1 else 1)]
        scales = [simt.ptx(text, first, result=simt.f32()) for text in texts]
        return _pack([scales[0], scales[-1]])

    return load


def sum_heads_and_store(
    tile: Tile, *, columns: int, pages: int, doubled: Callable[[int], bool], has_scale: bool, is_kept: bool
) -> Callable[..., None]:
    """-> f(products, weights, rows, scales?, mapped..., first_key): finishes a tile and writes it.

    mapped: for each of the `pages` pages of the tile (0, 1 or 2) whether the cache has it, 1 or 0; without it: -inf.
    doubled(head): take that head's relu as x + |x|, twice its value, on the fma pipe; else as a maximum, on the alu.
    is_kept: the L2 cache keeps these logits before anything else.
    """
    files = (tile.columns // 2, tile.quads * tile.thread_heads, _row_registers(tile))
    arg_types = (*map(_file_layout, files), *([_file_layout(2)] if has_scale else []), *[SCALAR] * (pages + 1))

    @plgpu.inline_mgpu(arg_types=arg_types)
    def run(_, products, weights, rows, *rest):
        products, weights = _unpack(products), _unpack(weights)
        low, high, *rows = (word.bits() for word in _unpack(rows))
        *mapped, key = (scalar(x) for x in rest[has_scale:])
        pointer = Pointer.of_words(low, high, simt.f32()).at(key)
        for quad in range(tile.quads):
            sums = [_weighted_sum(tile, products, weights, quad, half, doubled) for half in range(2)]
            sums = _sum_over_lanes(tile, sums)
            if has_scale:
                sums = [total * scale for total, scale in zip(sums, _unpack(rest[0]), strict=False)]
            start, visible, limit = rows[3 * quad : 3 * quad + 3]
            if mapped:
                visible = visible * _of_page(mapped)
            of_quad = pointer.row(as_value(4 * quad), columns)
            _store((start, visible, limit), of_quad, key, sums, simt.policy("evict_last") if is_kept else None)

    return run


def fill_tile(group: int, *, queries: int, columns: int) -> Callable[..., None]:
    """-> f(out_ref, request, first_query, first_key), for one warp: -inf to all of a group's queries at 64 keys."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR))
    def fill(_, out, request, first, first_key):
        key = scalar(first_key) + (_thread() & 31)
        for query in range(group):
            slot = scalar(first) + query
            limit = select(slot < queries, columns, 0) - key
            pointer = Pointer.to(out).row(scalar(request) * queries + slot, columns).at(key)
            for step in range(0, KEYS, 32):
                _store_below(limit, step, pointer, -math.inf)

    return fill


def hold_pages(shape: tuple[int, int]) -> Callable[..., jax.Array]:
    """-> f(table_ref[*shape], request, run): 32 entries of a request's block table, from 32 * run on, one in each lane
    of a warp. Past the last one it is the last."""
    requests, pages = shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=_SCALAR_RESULT)
    def hold(_, table, request, run):
        entry = minimum(scalar(run) * 32 + (_thread() & 31), pages - 1)
        return _scalar_result(Pointer.to(table).row(minimum(scalar(request), requests - 1), pages)[entry])

    return hold


@plgpu.inline_mgpu(arg_types=(SCALAR, SCALAR), return_type=_SCALAR_RESULT)
def held_page(_, held, entry):
    """The entry, counted in the table, of those that `hold_pages` gave the warp."""
    return _scalar_result(simt.of_lane(scalar(held), scalar(entry) & 31))


def _scalar_result(value: Value) -> Any:
    return mgpu.FragmentedArray.splat(value.ir, (), is_signed=True)


def _row_registers(tile: Tile) -> int:
    """Registers of `load_rows`, an even number."""
    return 2 + 3 * tile.quads + tile.quads % 2


def _query_of_lane(tile: Tile, quad: int) -> Value:
    """The lane's query among those of the tile."""
    return _lane_of_quad() // tile.lanes + quad * 4 // tile.lanes


def _weighted_sum(
    tile: Tile,
    products: Sequence[Value],
    weights: Sequence[Value],
    quad: int,
    half: int,
    doubled: Callable[[int], bool],
) -> Value:
    """This lane's sum over its heads for key `half` of its two.

    Always quarter by quarter of the heads, then quarters 0 + 1 and 2 + 3, then those two: whether a lane has one, two
    or four quarters, and so whatever the tile, a logit has the same bits.
    """
    quarter = tile.heads // 4
    sums: list[Any] = [None] * (tile.thread_heads // quarter)
    for i in range(quarter):
        for part in range(len(sums)):
            head = part * quarter + i
            group = quad * (tile.thread_heads // 2) + head // 2
            x = products[4 * group + 2 * half + head % 2]
            x = _relu_doubled(x) if doubled(head) else _relu(x)
            weight = weights[quad * tile.thread_heads + head]
            sums[part] = x * weight if i == 0 else simt.fma(x, weight, sums[part])
    while len(sums) > 1:
        sums = [sums[2 * i] + sums[2 * i + 1] for i in range(len(sums) // 2)]
    return sums[0]


def _sum_over_lanes(tile: Tile, sums: list[Value]) -> list[Value]:
    """Adds what the lanes of one query have, for the keys that this lane writes: both, or where lanes share, one."""
    if tile.lanes == 1:
        return sums
    kept, given = (select(_is_odd_lane(), *pair) for pair in (sums[::-1], sums))
    total = kept + simt.lane_across(given, 1)
    return [total + simt.lane_across(total, 2) if tile.lanes == 4 else total]


def _of_page(values: list[Value]) -> Value:
    """Of one value a page that the one of this thread's keys: with two pages, half of the warps have either."""
    return values[0] if len(values) == 1 else select(_thread() >= THREADS // 2, values[1], values[0])


def _store(
    row: tuple[Value, Value, Value], pointer: Pointer, key: Value, sums: list[Value], cache: Value | None
) -> None:
    """Writes the lane's logits of one query, -inf where it does not see the key. cache: a policy, or None."""
    start, visible, limit = row
    for half, total in enumerate(sums):
        inside = (key - start + 8 * half).below(visible)
        _store_below(limit - key, 8 * half, pointer, select(inside, total, -math.inf), cache)


def _store_below(limit: Value, step: int, pointer: Pointer, value: Operand, cache: Value | None = None) -> None:
    """Stores value `step` floats after pointer, if step < limit."""
    hint, policies = ("", []) if cache is None else (".L2::cache_hint", [cache])
    operands = f"[$1+{4 * step}], $2{', $3' * len(policies)}"
    text = f"{{ .reg .pred p; setp.gt.s32 p, $0, {step}; @p st.global{hint}.f32 {operands}; }}"
    simt.ptx(text, limit, pointer, value, *policies)


def _row_of_lane() -> Value:
    """The row of the tile, of 64, that is the first of this thread's two in wgmma's accumulator; the other is 8 on."""
    return (_thread() >> 5) * 16 + ((_thread() & 31) >> 2)


def _key_of_lane(tile: Tile) -> Value:
    """The row this lane writes first. Lanes that share a query write one key each: an odd one the second of the two."""
    row = _row_of_lane()
    return row if tile.lanes == 1 else row + ((_thread() & 1) << 3)


def _wgmma_text(tile: Tile, count: int) -> str:
    """All wgmmas of a tile. After the `count` results come the low words of the keys' and the queries' descriptors."""
    kind, step, tail = ("e4m3", 32, "") if tile.itemsize == 1 else ("bf16", 16, ", 0, 0")
    results = ",".join(f"${i}" for i in range(count))
    high = (_SWIZZLE_CODE[tile.row_bytes] << 30) | (8 * tile.row_bytes >> 4)
    lines = ["{ .reg .b64 da, db; .reg .b32 la, lb;", "wgmma.fence.sync.aligned;"]
    steps = tile.chunk // step
    for index in range(tile.chunks * steps):
        chunk, within = divmod(index, steps)
        a = chunk * KEYS * tile.row_bytes + 32 * within
        b = chunk * tile.columns * tile.row_bytes + 32 * within
        lines += [
            f"add.s32 la, ${count}, {a >> 4}; add.s32 lb, ${count + 1}, {b >> 4};",
            f"mov.b64 da, {{la, {high}}}; mov.b64 db, {{lb, {high}}};",
            f"wgmma.mma_async.sync.aligned.m64n{tile.columns}k{step}.f32.{kind}.{kind} "
            f"{{{results}}}, da, db, {min(index, 1)}, 1, 1{tail};",
        ]
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0; }"])


def _descriptor_low(ref) -> Value:
    """The low word of a matrix descriptor: the address in units of 16 bytes; swizzled, the leading offset is unused."""
    return (Pointer.to(ref).shared() >> 4) + (1 << 16)


def _relu(x: Value) -> Value:
    return simt.pure("max.NaN.f32 $0, $1, 0f00000000;", x)


def _relu_doubled(x: Value) -> Value:
    return simt.pure("{ .reg .f32 a; abs.f32 a, $1; add.rn.f32 $0, $1, a; }", x)


def _file_layout(count: int) -> Any:
    return plgpu.Layout.WG_STRIDED((THREADS * count,), vec_size=2)


def _pack(values: Sequence[Value]) -> Any:
    pairs = np.empty((len(values) // 2,), dtype=object)
    pair_type = ir.VectorType.get((2,), simt.f32())
    for i in range(len(pairs)):
        pair = llvm.insertelement(llvm.mlir_undef(pair_type), values[2 * i].ir, as_value(0).ir)
        pairs[i] = llvm.insertelement(pair, values[2 * i + 1].ir, as_value(1).ir)
    layout = mgpu.WGStridedFragLayout((THREADS * len(values),), 2)
    return mgpu.FragmentedArray(_registers=pairs, _layout=layout, _is_signed=None)


def _unpack(file: Any) -> list[Value]:
    return [Value(llvm.extractelement(pair, as_value(i).ir)) for pair in file.registers.flat for i in range(2)]


def _thread() -> Value:
    """The thread's number in its warpgroup."""
    return simt.thread() & (THREADS - 1)


def _lane_of_quad() -> Value:
    return _thread() & 3


def _is_odd_lane() -> Value:
    return (_thread() & 1).differs(0)
