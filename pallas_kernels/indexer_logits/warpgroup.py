"""What one math warpgroup does with a tile of 64 keys, in PTX: wgmma, then the weighted sum of the heads in registers.

The keys are the product's 64 rows and `columns` (query, head) pairs its columns. wgmma leaves columns 8j + 2c and
8j + 2c + 1 of a row with lane c of a quad, so the pairs are ordered to give every lane heads of one query only: eight
consecutive columns hold two heads of four queries, or of fewer queries whose heads are then shared out between lanes.
The order costs nothing, it is how the copy of the queries is cut (`Tile.query_slice`). A lane then sums its heads
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
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

KEYS = 64  # rows of a wgmma
_WARPGROUP = 128
_SWIZZLE_CODE = {128: 1, 64: 2, 32: 3}  # the layout field of a shared-memory matrix descriptor
_SCALAR = plgpu.Layout.WG_SPLAT(())


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
    def groups(self) -> int:
        """Groups of eight columns, each one copy."""
        return self.columns // 8

    @property
    def query_view(self) -> tuple[int, int, int, int]:
        """The axes (heads, dim) of the queries, cut for `query_slice`."""
        return (self.lanes, self.thread_heads // 2, 2, self.dim)

    @property
    def group_shape(self) -> tuple[int, int, int, int]:
        """Eight columns in shared memory."""
        return (4 // self.lanes, self.lanes, 2, self.chunk)

    def query_slice(self, row: Any, group: int, chunk: int) -> tuple[Any, ...]:
        """Where one chunk of a group of columns lies in an array [rows, *query_view], the first query in `row`."""
        quad, pair = divmod(group, self.thread_heads // 2)
        per_group = 4 // self.lanes
        return (
            pl.ds(row + quad * per_group, per_group),
            slice(None),
            pair,
            slice(None),
            pl.ds(chunk * self.chunk, self.chunk),
        )


def register_file(count: int) -> Any:
    """The type of an opaque file of `count` 32-bit registers a thread, an even number."""
    shape = (_WARPGROUP * count,)
    return plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=_file_layout(count))


def load_weights(tile: Tile, *, queries: int, halved: Callable[[int], bool]) -> Callable[..., jax.Array]:
    """-> f(weights_ref[rows, heads], request, first_query): the weights of this lane's heads, quad by quad.

    halved(head): whether `sum_heads` will give that head's relu doubled.
    """
    count = tile.quads * tile.thread_heads

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, _SCALAR), return_type=register_file(count))
    def load(_, ref, request, first):
        lane = _lane_of_quad()
        values = []
        for quad in range(tile.quads):
            row, _ = _row(tile, quad, queries, _scalar(request), _scalar(first))
            part = arith.andi(lane, _i32(tile.lanes - 1))
            word = arith.addi(_mul(row, tile.heads), _mul(part, tile.thread_heads))
            address = arith.addi(_global(ref), _wide(arith.shli(word, _i32(2))))
            for offset in range(0, tile.thread_heads, 4):
                text = f"ld.global.nc.v4.f32 {{$0,$1,$2,$3}}, [$4+{4 * offset}];"
                values += _ptx(text, address, results=[_f32_type()] * 4, pure=True)
        half = _f32(0.5)
        return _pack([arith.mulf(v, half) if halved(i % tile.thread_heads) else v for i, v in enumerate(values)])

    return load


def load_rows(tile: Tile, *, queries: int, columns: int) -> Callable[..., jax.Array]:
    """-> f(ranges_ref[rows, 2], out_ref, request, first_query): where this lane's queries may write what.

    A pointer to the row of the first, and for each the first visible key, how many are visible, and how many columns to
    write (none past the last query), all less the key that the lane stands on in a tile.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), _SCALAR, _SCALAR),
        return_type=register_file(_row_registers(tile)),
    )
    def load(_, ranges, out, request, first):
        key = _key_of_lane(tile)
        words = [_i32(0), _i32(0)]
        for quad in range(tile.quads):
            row, is_real = _row(tile, quad, queries, _scalar(request), _scalar(first))
            if quad == 0:
                offset = arith.addi(arith.muli(_wide(row), _i64(columns)), arith.extsi(_i64_type(), key))
                pointer = arith.addi(_global(out), arith.shli(offset, _i64(2)))
                words[0] = arith.trunci(_i32_type(), pointer)
                words[1] = arith.trunci(_i32_type(), arith.shrui(pointer, _i64(32)))
            address = arith.addi(_global(ranges), _wide(arith.shli(row, _i32(3))))
            start, end = _ptx("ld.global.nc.v2.b32 {$0,$1}, [$2];", address, results=[_i32_type()] * 2, pure=True)
            visible = arith.maxsi(arith.subi(end, start), _i32(0))
            limit = arith.subi(arith.select(is_real, _i32(columns), _i32(0)), key)
            words += [arith.subi(start, key), visible, limit]
        words += [_i32(0)] * (_row_registers(tile) - len(words))
        return _pack([arith.bitcast(_f32_type(), word) for word in words])

    return load


def multiply(tile: Tile) -> Callable[..., jax.Array]:
    """-> f(keys_ref, queries_ref): the 64 x columns products of a tile in shared memory, `columns // 2` registers."""
    transforms = (plgpu.SwizzleTransform(tile.row_bytes),)
    ref = plgpu.RefType(transforms)
    count = tile.columns // 2

    @plgpu.inline_mgpu(arg_types=(ref, ref), return_type=register_file(count))
    def run(_, keys, queries):
        text = _wgmma_text(tile, count)
        return _pack(_ptx(text, _descriptor_low(keys), _descriptor_low(queries), results=[_f32_type()] * count))

    return run


def load_scales() -> Callable[..., jax.Array]:
    """-> f(scale_ref[64] in shared memory): the scales of this lane's two keys."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=register_file(2))
    def load(_, ref):
        address = arith.addi(_shared(ref), arith.shli(_row_of_lane(), _i32(2)))
        return _pack([_ptx1(f"ld.shared.f32 $0, [$1+{32 * i}];", address) for i in range(2)])

    return load


def sum_heads_and_store(
    tile: Tile, *, columns: int, pages: int, doubled: Callable[[int], bool], has_scale: bool
) -> Callable[..., None]:
    """-> f(products, weights, rows, scales?, mapped..., first_key): finishes a tile and writes it.

    mapped: for each of the `pages` pages of the tile (0, 1 or 2) whether the cache has it, 1 or 0; without it: -inf.
    doubled(head): take that head's relu as x + |x|, twice its value, on the fma pipe; else as a maximum, on the alu.
    """
    files = (tile.columns // 2, tile.quads * tile.thread_heads, _row_registers(tile))
    arg_types = (*map(_file_layout, files), *([_file_layout(2)] if has_scale else []), *[_SCALAR] * (pages + 1))

    @plgpu.inline_mgpu(arg_types=arg_types)
    def run(_, products, weights, rows, *rest):
        products, weights = _unpack(products), _unpack(weights)
        low, high, *rows = (arith.bitcast(_i32_type(), word) for word in _unpack(rows))
        *mapped, key = (_scalar(x) for x in rest[has_scale:])
        offset = arith.addi(arith.shli(_wide(high), _i64(32)), _wide(arith.shli(key, _i32(2))))
        pointer = arith.addi(_wide(low), offset)
        for quad in range(tile.quads):
            sums = [_weighted_sum(tile, products, weights, quad, half, doubled) for half in range(2)]
            sums = _sum_over_lanes(tile, sums)
            if has_scale:
                scales = _kept(tile, _unpack(rest[0]))
                sums = [arith.mulf(total, scale) for total, scale in zip(sums, scales, strict=True)]
            of_quad = arith.addi(pointer, _i64(16 * columns * quad))  # four rows on
            start, visible, limit = rows[3 * quad : 3 * quad + 3]
            if mapped:
                visible = arith.muli(visible, _of_page(mapped))
            _store((start, visible, limit), of_quad, key, sums)

    return run


def fill_tile(tile: Tile, *, queries: int, columns: int) -> Callable[..., None]:
    """-> f(out_ref, request, first_query, first_key), for one warp: -inf to all of a tile."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, _SCALAR, _SCALAR))
    def fill(_, out, request, first, first_key):
        key = arith.addi(_scalar(first_key), arith.andi(_thread(), _i32(31)))
        for query in range(tile.queries):
            slot = arith.addi(_scalar(first), _i32(query))
            is_real = arith.cmpi(arith.CmpIPredicate.slt, slot, _i32(queries))
            limit = arith.subi(arith.select(is_real, _i32(columns), _i32(0)), key)
            row = arith.addi(_mul(_scalar(request), queries), slot)
            offset = arith.addi(arith.muli(_wide(row), _i64(columns)), _wide(key))
            pointer = arith.addi(_global(out), arith.shli(offset, _i64(2)))
            for step in range(0, KEYS, 32):
                _store_below(limit, step, pointer, _f32(-math.inf))

    return fill


def _row_registers(tile: Tile) -> int:
    """Registers of `load_rows`, an even number."""
    return 2 + 3 * tile.quads + tile.quads % 2


def _row(tile: Tile, quad: int, queries: int, request, first):
    """The row of the lane's query in [rows], and whether there is such a query; past the last one it is the last."""
    in_group = arith.divui(_lane_of_quad(), _i32(tile.lanes))
    slot = arith.addi(first, arith.addi(in_group, _i32(quad * 4 // tile.lanes)))
    is_real = arith.cmpi(arith.CmpIPredicate.slt, slot, _i32(queries))
    return arith.addi(_mul(request, queries), arith.minsi(slot, _i32(queries - 1))), is_real


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
    total = arith.addf(_kept(tile, sums)[0], _shuffle_xor(given, 1))
    return [arith.addf(total, _shuffle_xor(total, 2)) if tile.lanes == 4 else total]


def _kept(tile: Tile, of_two_keys):
    """Of values for the lane's two keys those that it writes: both, or where lanes share a query one each."""
    return of_two_keys if tile.lanes == 1 else [arith.select(_is_odd_lane(), of_two_keys[1], of_two_keys[0])]


def _of_page(values):
    """Of one value a page that the one of this thread's keys: with two pages, half of the warps have either."""
    if len(values) == 1:
        return values[0]
    second = arith.cmpi(arith.CmpIPredicate.uge, _thread(), _i32(_WARPGROUP // 2))
    return arith.select(second, values[1], values[0])


def _store(row, pointer, key, sums):
    """Writes the lane's logits of one query, -inf where it does not see the key."""
    start, visible, limit = row
    limit = arith.subi(limit, key)
    for half, total in enumerate(sums):
        distance = arith.addi(arith.subi(key, start), _i32(8 * half))
        inside = arith.cmpi(arith.CmpIPredicate.ult, distance, visible)
        _store_below(limit, 8 * half, pointer, arith.select(inside, total, _f32(-math.inf)))


def _store_below(limit, step: int, pointer, value):
    """Stores value `step` floats after pointer, if step < limit."""
    text = f"{{ .reg .pred p; setp.gt.s32 p, $0, {step}; @p st.global.f32 [$1+{4 * step}], $2; }}"
    _ptx(text, limit, pointer, value, results=[])


def _row_of_lane():
    """The row of the tile, of 64, that is the first of this thread's two in wgmma's accumulator; the other is 8 on."""
    thread = _thread()
    warp = arith.divui(thread, _i32(32))
    return arith.addi(_mul(warp, 16), arith.shrui(arith.andi(thread, _i32(31)), _i32(2)))


def _key_of_lane(tile: Tile):
    """The row this lane writes first. Lanes that share a query write one key each: an odd one the second of the two."""
    row = _row_of_lane()
    if tile.lanes == 1:
        return row
    odd = arith.andi(_thread(), _i32(1))
    key = arith.addi(row, arith.shli(odd, _i32(3)))
    if tile.lanes == 2:
        return key
    # Lanes 2 and 3 hold the same sums as 0 and 1: a key far past any limit keeps them from writing.
    twin = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(_thread(), _i32(2)), _i32(0))
    return arith.select(twin, _i32(2**30), key)


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
    return arith.addi(arith.shrui(_shared(ref), _i32(4)), _i32(1 << 16))


def _relu(x):
    return _ptx1("max.NaN.f32 $0, $1, 0f00000000;", x, pure=True)


def _relu_doubled(x):
    text = "{ .reg .f32 a; abs.f32 a, $1; add.rn.f32 $0, $1, a; }"
    return _ptx1(text, x, pure=True)


def _fma(a, b, c):
    return _ptx1("fma.rn.f32 $0, $1, $2, $3;", a, b, c, pure=True)


def _shuffle_xor(x, mask: int):
    text = f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, 0xffffffff;"
    return _ptx1(text, x)


def _ptx1(text: str, *operands: Any, pure: bool = False) -> Any:
    return _ptx(text, *operands, results=[_f32_type()], pure=pure)[0]


def _ptx(text: str, *operands: Any, results: Sequence[Any], pure: bool = False) -> list[Any]:
    """Inline PTX: results are $0, $1, ..., operands follow. A pure one may be moved, merged and dropped."""
    letter = {"i32": "r", "i64": "l", "f32": "f"}
    constraints = [f"={letter[str(kind)]}" for kind in results] + [letter[str(x.type)] for x in operands]
    single = results[0] if results else ir.Type.parse("!llvm.void")
    kind: Any = single if len(results) < 2 else llvm.StructType.get_literal(list(results))
    value: Any = llvm.inline_asm(
        kind, list(operands), text, ",".join(constraints), asm_dialect=0, has_side_effects=not pure
    )
    if len(results) < 2:
        return [value] * len(results)
    return [llvm.extractvalue(result, value, [i]) for i, result in enumerate(results)]


def _file_layout(count: int) -> Any:
    return plgpu.Layout.WG_STRIDED((_WARPGROUP * count,), vec_size=2)


def _pack(values: Sequence[Any]) -> Any:
    pairs = np.empty((len(values) // 2,), dtype=object)
    pair_type = ir.VectorType.get((2,), _f32_type())
    for i in range(len(pairs)):
        pair = llvm.insertelement(llvm.mlir_undef(pair_type), values[2 * i], _i32(0))
        pairs[i] = llvm.insertelement(pair, values[2 * i + 1], _i32(1))
    layout = mgpu.WGStridedFragLayout((_WARPGROUP * len(values),), 2)
    return mgpu.FragmentedArray(_registers=pairs, _layout=layout, _is_signed=None)


def _unpack(file: Any) -> list[Any]:
    return [llvm.extractelement(pair, _i32(i)) for pair in file.registers.flat for i in range(2)]


def _scalar(x: Any) -> Any:
    return x.registers.item()


def _thread():
    """The thread's number in its warpgroup."""
    number = _ptx("mov.u32 $0, %tid.x;", results=[_i32_type()], pure=True)[0]
    return arith.andi(number, _i32(_WARPGROUP - 1))


def _lane_of_quad():
    return arith.andi(_thread(), _i32(3))


def _is_odd_lane():
    return arith.cmpi(arith.CmpIPredicate.ne, arith.andi(_thread(), _i32(1)), _i32(0))


def _global(ref):
    pointer = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(ref))
    return llvm.ptrtoint(_i64_type(), pointer)


def _shared(ref):
    return llvm.ptrtoint(_i32_type(), utils.memref_ptr(ref))


def _mul(x, factor: int):
    return arith.muli(x, _i32(factor))


def _wide(x):
    return arith.extui(_i64_type(), x)


def _i32_type():
    return ir.IntegerType.get_signless(32)


def _i64_type():
    return ir.IntegerType.get_signless(64)


def _f32_type():
    return ir.F32Type.get()


def _i32(value: int) -> Any:
    return utils.c(value, _i32_type())


def _i64(value: int) -> Any:
    return utils.c(value, _i64_type())


def _f32(value: float) -> Any:
    return utils.c(value, _f32_type())
