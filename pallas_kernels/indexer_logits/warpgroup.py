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
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.indexer_logits.ptx import (
    SCALAR,
    WARPGROUP,
    asm,
    asm1,
    f32,
    f32_type,
    global_address,
    i32,
    i32_type,
    i64,
    i64_type,
    load_global,
    load_shared,
    mul,
    policy,
    scalar,
    shared_address,
    shuffle_from,
    shuffle_xor,
    thread,
    wide,
)

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
    shape = (WARPGROUP * count,)
    return plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=_file_layout(count))


def load_weights(tile: Tile, *, halved: Callable[[int], bool]) -> Callable[..., jax.Array]:
    """-> f(weights_ref[columns or more] in shared memory): the weights of this lane's heads, quad by quad.

    halved(head): whether `sum_heads` will give that head's relu doubled.
    """
    count = tile.quads * tile.thread_heads

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=register_file(count))
    def load(_, ref):
        part = arith.andi(_lane_of_quad(), i32(tile.lanes - 1))
        values = []
        for quad in range(tile.quads):
            word = arith.addi(mul(_query_of_lane(tile, quad), tile.heads), mul(part, tile.thread_heads))
            address = arith.addi(shared_address(ref), arith.shli(word, i32(2)))
            for offset in range(0, tile.thread_heads, 4):
                # Volatile: a load that the compiler moved past the slot's return would read the next group's.
                text = f"ld.volatile.shared.v4.f32 {{$0,$1,$2,$3}}, [$4+{4 * offset}];"
                values += asm(text, address, results=[f32_type()] * 4)
        half = f32(0.5)
        return _pack([arith.mulf(v, half) if halved(i % tile.thread_heads) else v for i, v in enumerate(values)])

    return load


def load_rows(tile: Tile, *, queries: int, columns: int, has_lengths: bool) -> Callable[..., jax.Array]:
    """-> f(length or ranges, out_ref, request, first_query): where this lane's queries may write what.

    A pointer to the row of the first, and for each the first visible key, how many are visible, and how many columns to
    write (none past the last query), all less the key that the lane stands on in a tile.

    length: of the request, where has_lengths.
    ranges: starts and ends of a tile's queries in shared memory, [2, 32], from a row on that 4 divides.
    """
    source_type = SCALAR if has_lengths else plgpu.RefType()

    @plgpu.inline_mgpu(
        arg_types=(source_type, plgpu.RefType(), SCALAR, SCALAR),
        return_type=register_file(_row_registers(tile)),
    )
    def load(_, source, out, request, first):
        key = _key_of_lane(tile)
        first_row = arith.addi(mul(scalar(request), queries), scalar(first))
        words = [i32(0), i32(0)]
        for quad in range(tile.quads):
            in_group = _query_of_lane(tile, quad)
            slot = arith.addi(scalar(first), in_group)
            if quad == 0:
                row = arith.addi(first_row, in_group)
                offset = arith.addi(arith.muli(wide(row), i64(columns)), arith.extsi(i64_type(), key))
                pointer = arith.addi(global_address(out), arith.shli(offset, i64(2)))
                words[0] = arith.trunci(i32_type(), pointer)
                words[1] = arith.trunci(i32_type(), arith.shrui(pointer, i64(32)))
            if has_lengths:
                start, end = i32(0), arith.addi(scalar(source), arith.addi(slot, i32(1 - queries)))
            else:
                at = arith.addi(in_group, arith.andi(first_row, i32(3)))
                start, end = load_shared(source, at), load_shared(source, arith.addi(at, i32(32)))
                start = arith.maxsi(start, i32(0))
            end = arith.minsi(end, i32(columns))
            visible = arith.maxsi(arith.subi(end, start), i32(0))
            is_real = arith.cmpi(arith.CmpIPredicate.slt, slot, i32(queries))
            limit = arith.subi(arith.select(is_real, i32(columns), i32(0)), key)
            words += [arith.subi(start, key), visible, limit]
        words += [i32(0)] * (_row_registers(tile) - len(words))
        return _pack([arith.bitcast(f32_type(), word) for word in words])

    return load


def multiply(tile: Tile) -> Callable[..., jax.Array]:
    """-> f(keys_ref, queries_ref): the 64 x columns products of a tile in shared memory, `columns // 2` registers."""
    transforms = (plgpu.SwizzleTransform(tile.row_bytes),)
    ref = plgpu.RefType(transforms)
    count = tile.columns // 2

    @plgpu.inline_mgpu(arg_types=(ref, ref), return_type=register_file(count))
    def run(_, keys, queries):
        text = _wgmma_text(tile, count)
        return _pack(asm(text, _descriptor_low(keys), _descriptor_low(queries), results=[f32_type()] * count))

    return run


def load_scales() -> Callable[..., jax.Array]:
    """-> f(scale_ref[64] in shared memory): the scales of this lane's two keys."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=register_file(2))
    def load(_, ref):
        address = arith.addi(shared_address(ref), arith.shli(_row_of_lane(), i32(2)))
        return _pack([asm1(f"ld.volatile.shared.f32 $0, [$1+{32 * i}];", address) for i in range(2)])

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
        low, high, *rows = (arith.bitcast(i32_type(), word) for word in _unpack(rows))
        *mapped, key = (scalar(x) for x in rest[has_scale:])
        offset = arith.addi(arith.shli(wide(high), i64(32)), wide(arith.shli(key, i32(2))))
        pointer = arith.addi(wide(low), offset)
        for quad in range(tile.quads):
            sums = [_weighted_sum(tile, products, weights, quad, half, doubled) for half in range(2)]
            sums = _sum_over_lanes(tile, sums)
            if has_scale:
                scales = _kept(tile, _unpack(rest[0]))
                sums = [arith.mulf(total, scale) for total, scale in zip(sums, scales, strict=True)]
            of_quad = arith.addi(pointer, i64(16 * columns * quad))  # four rows on
            start, visible, limit = rows[3 * quad : 3 * quad + 3]
            if mapped:
                visible = arith.muli(visible, _of_page(mapped))
            _store((start, visible, limit), of_quad, key, sums, policy("evict_last") if is_kept else None)

    return run


def fill_tile(tile: Tile, *, queries: int, columns: int) -> Callable[..., None]:
    """-> f(out_ref, request, first_query, first_key), for one warp: -inf to all of a tile."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR))
    def fill(_, out, request, first, first_key):
        key = arith.addi(scalar(first_key), arith.andi(thread(), i32(31)))
        for query in range(tile.queries):
            slot = arith.addi(scalar(first), i32(query))
            is_real = arith.cmpi(arith.CmpIPredicate.slt, slot, i32(queries))
            limit = arith.subi(arith.select(is_real, i32(columns), i32(0)), key)
            row = arith.addi(mul(scalar(request), queries), slot)
            offset = arith.addi(arith.muli(wide(row), i64(columns)), wide(key))
            pointer = arith.addi(global_address(out), arith.shli(offset, i64(2)))
            for step in range(0, KEYS, 32):
                _store_below(limit, step, pointer, f32(-math.inf))

    return fill


def hold_pages(shape: tuple[int, int]) -> Callable[..., jax.Array]:
    """-> f(table_ref[*shape], request, run): 32 entries of a request's block table, from 32 * run on, one in each lane
    of a warp. Past the last one it is the last."""
    requests, pages = shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=_SCALAR_RESULT)
    def hold(_, table, request, run):
        entry = arith.addi(mul(scalar(run), 32), arith.andi(thread(), i32(31)))
        row = wide(arith.minsi(scalar(request), i32(requests - 1)))
        word = arith.addi(arith.muli(row, i64(pages)), wide(arith.minsi(entry, i32(pages - 1))))
        return _scalar_result(load_global(table, word))

    return hold


@plgpu.inline_mgpu(arg_types=(SCALAR, SCALAR), return_type=_SCALAR_RESULT)
def held_page(_, held, entry):
    """The entry, counted in the table, of those that `hold_pages` gave the warp."""
    return _scalar_result(shuffle_from(scalar(held), arith.andi(scalar(entry), i32(31))))


def _scalar_result(value):
    return mgpu.FragmentedArray.splat(value, (), is_signed=True)


def _row_registers(tile: Tile) -> int:
    """Registers of `load_rows`, an even number."""
    return 2 + 3 * tile.quads + tile.quads % 2


def _query_of_lane(tile: Tile, quad: int):
    """The lane's query among those of the tile."""
    in_group = arith.divui(_lane_of_quad(), i32(tile.lanes))
    return arith.addi(in_group, i32(quad * 4 // tile.lanes))


def _weighted_sum(tile: Tile, products, weights, quad: int, half: int, doubled):
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
            sums[part] = arith.mulf(x, weight) if i == 0 else _fma(x, weight, sums[part])
    while len(sums) > 1:
        sums = [arith.addf(sums[2 * i], sums[2 * i + 1]) for i in range(len(sums) // 2)]
    return sums[0]


def _sum_over_lanes(tile: Tile, sums):
    """Adds what the lanes of one query have, for the keys that this lane writes."""
    if tile.lanes == 1:
        return sums
    given = arith.select(_is_odd_lane(), sums[0], sums[1])
    total = arith.addf(_kept(tile, sums)[0], shuffle_xor(given, 1))
    return [arith.addf(total, shuffle_xor(total, 2)) if tile.lanes == 4 else total]


def _kept(tile: Tile, of_two_keys):
    """Of values for the lane's two keys those that it writes: both, or where lanes share a query one each."""
    return of_two_keys if tile.lanes == 1 else [arith.select(_is_odd_lane(), of_two_keys[1], of_two_keys[0])]


def _of_page(values):
    """Of one value a page that the one of this thread's keys: with two pages, half of the warps have either."""
    if len(values) == 1:
        return values[0]
    second = arith.cmpi(arith.CmpIPredicate.uge, thread(), i32(WARPGROUP // 2))
    return arith.select(second, values[1], values[0])


def _store(row, pointer, key, sums, cache):
    """Writes the lane's logits of one query, -inf where it does not see the key. cache: a policy, or None."""
    start, visible, limit = row
    limit = arith.subi(limit, key)
    for half, total in enumerate(sums):
        distance = arith.addi(arith.subi(key, start), i32(8 * half))
        inside = arith.cmpi(arith.CmpIPredicate.ult, distance, visible)
        _store_below(limit, 8 * half, pointer, arith.select(inside, total, f32(-math.inf)), cache)


def _store_below(limit, step: int, pointer, value, cache=None):
    """Stores value `step` floats after pointer, if step < limit."""
    hint, policies = ("", []) if cache is None else (".L2::cache_hint", [cache])
    operands = f"[$1+{4 * step}], $2{', $3' * len(policies)}"
    text = f"{{ .reg .pred p; setp.gt.s32 p, $0, {step}; @p st.global{hint}.f32 {operands}; }}"
    asm(text, limit, pointer, value, *policies, results=[])


def _row_of_lane():
    """The row of the tile, of 64, that is the first of this thread's two in wgmma's accumulator; the other is 8 on."""
    number = thread()
    warp = arith.divui(number, i32(32))
    return arith.addi(mul(warp, 16), arith.shrui(arith.andi(number, i32(31)), i32(2)))


def _key_of_lane(tile: Tile):
    """The row this lane writes first. Lanes that share a query write one key each: an odd one the second of the two."""
    row = _row_of_lane()
    if tile.lanes == 1:
        return row
    odd = arith.andi(thread(), i32(1))
    key = arith.addi(row, arith.shli(odd, i32(3)))
    if tile.lanes == 2:
        return key
    # Lanes 2 and 3 hold the same sums as 0 and 1: a key far past any limit keeps them from writing.
    twin = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(thread(), i32(2)), i32(0))
    return arith.select(twin, i32(2**30), key)


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


def _descriptor_low(ref):
    """The low word of a matrix descriptor: the address in units of 16 bytes; swizzled, the leading offset is unused."""
    return arith.addi(arith.shrui(shared_address(ref), i32(4)), i32(1 << 16))


def _relu(x):
    return asm1("max.NaN.f32 $0, $1, 0f00000000;", x, pure=True)


def _relu_doubled(x):
    text = "{ .reg .f32 a; abs.f32 a, $1; add.rn.f32 $0, $1, a; }"
    return asm1(text, x, pure=True)


def _fma(a, b, c):
    return asm1("fma.rn.f32 $0, $1, $2, $3;", a, b, c, pure=True)


def _file_layout(count: int) -> Any:
    return plgpu.Layout.WG_STRIDED((WARPGROUP * count,), vec_size=2)


def _pack(values: Sequence[Any]) -> Any:
    pairs = np.empty((len(values) // 2,), dtype=object)
    pair_type = ir.VectorType.get((2,), f32_type())
    for i in range(len(pairs)):
        pair = llvm.insertelement(llvm.mlir_undef(pair_type), values[2 * i], i32(0))
        pairs[i] = llvm.insertelement(pair, values[2 * i + 1], i32(1))
    layout = mgpu.WGStridedFragLayout((WARPGROUP * len(values),), 2)
    return mgpu.FragmentedArray(_registers=pairs, _layout=layout, _is_signed=None)


def _unpack(file: Any) -> list[Any]:
    return [llvm.extractelement(pair, i32(i)) for pair in file.registers.flat for i in range(2)]


def _lane_of_quad():
    return arith.andi(thread(), i32(3))


def _is_odd_lane():
    return arith.cmpi(arith.CmpIPredicate.ne, arith.andi(thread(), i32(1)), i32(0))
