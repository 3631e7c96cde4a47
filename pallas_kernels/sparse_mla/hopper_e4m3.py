"""What attention to e4m3 keys has in its own: f16 operands, and queries that fit f16.

e4m3 numbers become f16 in one instruction for two. Queries are brought into f16's range head by head, by powers of two.
"""

import functools
from collections.abc import Callable, Sequence

from pallas_kernels import simt
from pallas_kernels.simt import Value, as_value
from pallas_kernels.sparse_mla import wgmma
from pallas_kernels.sparse_mla.hopper_block import VALUE_TILES

_TOP = 14  # exponent of a head's greatest number


def load_shared(address: Value, offset: int) -> list[Value]:
    """Four neighbouring words, `offset` bytes further, as floats."""

    def code(_, words, operands):
        return [f"ld.shared.v4.b32 {{{','.join(words)}}}, [{operands[0]}+{offset}];"]

    return wgmma.statement(code, fresh=4, operands=(address,))


def store_shared(address: Value, words: Sequence[Value], offset: int = 0) -> None:
    """Four words, `offset` bytes further."""
    simt.ptx(f"st.shared.v4.b32 [$0+{offset}], {{$1,$2,$3,$4}};", address, *words)


def pack_f16(low: Value, high: Value) -> Value:
    """Two floats rounded to f16, in one word."""
    return simt.pure("cvt.rn.f16x2.f32 $0, $2, $1;", low, high, result=simt.i32())


def as_f16(word: str, targets: Sequence[str]) -> list[str]:
    """PTX: the four e4m3 numbers of a word as two pairs of f16. Needs `.reg .b16 half<2>`."""
    converts = (f"cvt.rn.f16x2.e4m3x2 {target}, half{i};" for i, target in enumerate(targets))
    return [f"mov.b32 {{half0, half1}}, {word};", *converts]


def store_as_f16(target: Value, offset: int, words, scale: tuple[Value, int], is_odd: Value) -> None:
    """16 e4m3 numbers times a scale to two chunks, `target` and the other one 16 bytes away, `offset` bytes further.

    scale: a pair of f16, and which of them.
    is_odd: 1 where the target is the second of the two.
    """

    pair, which = scale[0], f"half{scale[1]}"

    def code(_, __, operands):
        first, second, scale, odd, *words = operands
        lines = [
            ".reg .pred odd; .reg .b16 half<2>; .reg .b32 word<4>, pair<8>, twice;",
            f"mov.b32 {{half0, half1}}, {scale}; mov.b32 twice, {{{which}, {which}}};",
            f"setp.ne.s32 odd, {odd}, 0;",
            *(f"selp.b32 word{i}, {words[i ^ 2]}, {words[i]}, odd;" for i in range(4)),
        ]
        for i in range(4):
            pairs = [f"pair{2 * i + j}" for j in range(2)]
            lines += [*as_f16(f"word{i}", pairs), *(f"mul.rn.f16x2 {pair}, {pair}, twice;" for pair in pairs)]
        for i, address in enumerate((first, second)):
            pairs = ", ".join(f"pair{4 * i + k}" for k in range(4))
            lines.append(f"st.shared.v4.b32 [{address}+{offset}], {{{pairs}}};")
        return lines

    wgmma.statement(code, operands=(target, target ^ 16, pair, is_odd, *words))


def convert_queries(
    queries: Value,
    row: Value,
    part: Value,
    *,
    tile_bytes: int,
    tail_tiles: int,
    shift: int = 0,
    interleaved: bool = False,
) -> Value:
    """Makes a head's bf16 numbers a power of two times them where they lie, in f16 but for the tail.

    queries: the address of the first tile. part: of the eight lanes of a head, which are neighbours.
    shift: f16 numbers are divided by 2^shift too.
    interleaved: whether of 16 columns the first two of every four come first.
    Returns by how much products with them must be multiplied.
    """
    at = row << 7
    # Of every other tile two neighbouring chunks, and one of the tail.
    first = queries + at + ((((part & 3) << 1) ^ (row & 7)) << 4) + (part >> 2) * tile_bytes
    places = [(first ^ (16 * i)) + 2 * tile_bytes * j for j in range(VALUE_TILES // 2) for i in range(2)]
    tails = [queries + at + ((part ^ (row & 7)) << 4) + tile_bytes * VALUE_TILES][:tail_tiles]
    chunks = [[x.bits() for x in load_shared(place, 0)] for place in (*places, *tails)]
    highest = functools.reduce(_greater_halves, (x & 0x7FFF7FFF for chunk in chunks for x in chunk))
    for distance in (1, 2, 4):
        highest = _greater_halves(highest, simt.lane_across(highest.as_float(), distance).bits())
    exponent = simt.maximum(simt.maximum(highest >> 23, (highest & 0x7FFF) >> 7), _TOP + 1)
    power = as_value(2 * 127 + _TOP) - exponent
    factor = ((power - shift) << 23).as_float()
    for i in range(0, VALUE_TILES, 2):
        pairs = [_scaled(x, factor, pack_f16) for x in chunks[i] + chunks[i + 1]]
        halves = (pairs[0::2], pairs[1::2]) if interleaved else (pairs[:4], pairs[4:])
        for place, half in zip(places[i : i + 2], halves, strict=True):
            store_shared(place, half)
    factor = (power << 23).as_float()
    for place, chunk in zip(tails, chunks[VALUE_TILES:], strict=True):
        store_shared(place, [bf16_times(x, factor) for x in chunk])
    return ((exponent - _TOP) << 23).as_float()


def _greater_halves(a: Value, b: Value) -> Value:
    """The greater of either halves of words, which are not negative."""
    return simt.pure("max.u16x2 $0, $1, $2;", a, b, result=simt.i32())


def _scaled(word: Value, factor: Value, pack: Callable[[Value, Value], Value]) -> Value:
    """A pair of bf16 numbers times a factor."""
    low, high = (word << 16).as_float(), (word & 0xFFFF0000).as_float()
    return pack(low * factor, high * factor)


def bf16_times(word: Value, factor: Value) -> Value:
    """A pair of bf16 numbers times a factor."""
    return _scaled(word, factor, simt.pack_bf16)
