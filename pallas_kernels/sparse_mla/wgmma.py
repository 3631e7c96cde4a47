"""A warpgroup's matrix products on tiles in shared memory, in PTX: sm_90's wgmma with bf16 or f16 operands.

A tile is 64 rows of 64 such numbers, 8 KiB, in the 128-byte swizzle: the 16-byte chunk c of row r lies at byte
r * 128 + ((c ^ r % 8) << 4). A product of 64 rows leaves row 16w + l / 4 + 8i, columns 8j + 2 (l % 4) + e of its result
with lane l of warp w, in register 4j + 2i + e; packed to pairs, the registers of 16 columns are wgmma's A operand.

wgmma runs behind its thread's back until a wait, and until then its registers may not be touched. So products are
parts of one asm `statement` with the waits that belong to them, or the statement that waits takes the registers.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import llvm

from pallas_kernels.simt import Operand, Pointer, Value, as_value

ROW_BYTES = 128
TILE_BYTES = 64 * ROW_BYTES
_ROWS_8 = 8 * ROW_BYTES
_HIGH = (1 << 30) | (_ROWS_8 >> 4)  # of every descriptor: the 128-byte swizzle, and 1024 bytes from 8 rows to the next
_ACROSS = (TILE_BYTES >> 4) << 16  # of a transposed operand: from 64 columns to the next 64
COMMIT = "wgmma.commit_group.sync.aligned;"
FENCE = "wgmma.fence.sync.aligned;"
# Between writes to shared memory by ordinary stores or cp.async and their use by wgmma.
PROXY_FENCE = "fence.proxy.async.shared::cta;"


def wait_group(pending: int) -> str:
    """Waits until at most `pending` committed groups are unfinished."""
    return f"wgmma.wait_group.sync.aligned {pending};"


def wait_phase(barrier: str, offset: int, parity: str) -> str:
    """Waits for an mbarrier, `offset` bytes after the one whose address is in a register."""
    wait = f"mbarrier.try_wait.parity.shared::cta.b64 p, [{barrier}+{offset}], {parity};"
    return f"{{ .reg .pred p; WAIT: {wait} @!p bra WAIT; }}"


def arrive_if(flag: str, barrier: str, offset: int) -> str:
    """Arrives at an mbarrier in the threads whose flag is not 0."""
    arrive = f"mbarrier.arrive.shared::cta.b64 _, [{barrier}+{offset}];"
    return f"{{ .reg .pred p; setp.ne.s32 p, {flag}, 0; @p {arrive} }}"


def descriptor(address: Value) -> Value:
    """The low word of a tile's matrix descriptor."""
    return address >> 4


def scores(
    result: Sequence[str], a: str, b: str, tiles: Sequence[tuple[int, int]], *, fresh: bool, kind: str = "bf16"
) -> list[str]:
    """result[64, 64] (+)= A B^T over the columns of pairs of tiles, counted from the descriptors a and b."""
    lines = []
    for index, (tiles_ab, step) in enumerate((pair, step) for pair in tiles for step in range(4)):
        offsets = [(tile * TILE_BYTES + 32 * step) >> 4 for tile in tiles_ab]
        words = {"da": (a, offsets[0]), "db": (b, offsets[1])}
        add = 0 if fresh and index == 0 else 1
        lines += _descriptors(words, [_product(64, result, "da", f"{add}, 1, 1, 0, 0", kind)])
    return lines


def values_from_registers(
    result: Sequence[str], a: Sequence[str], b: str, tiles: Sequence[Sequence[int]], *, kind: str = "bf16"
) -> list[str]:
    """result[64, columns] += A B: A in 16 registers of pairs, B the tiles after descriptor b, 64 rows each.

    tiles: neighbours, of which each group makes a product.
    """
    lines = []
    for step in range(4):
        registers = "{" + ",".join(a[4 * step : 4 * step + 4]) + "}"
        for group, part in _parts(result, tiles):
            product = _product(64 * len(group), part, registers, "1, 1, 1, 1", kind)
            lines += _descriptors({"db": (b, _value_offset(group[0], step))}, [product])
    return lines


def values_from_memory(
    result: Sequence[str], a: str, a_tile: int, b: str, tiles: Sequence[Sequence[int]], *, kind: str = "bf16"
) -> list[str]:
    """The same with A the tile `a_tile` after descriptor a."""
    lines = []
    for step in range(4):
        for group, part in _parts(result, tiles):
            words = {"da": (a, (a_tile * TILE_BYTES + 32 * step) >> 4), "db": (b, _value_offset(group[0], step))}
            lines += _descriptors(words, [_product(64 * len(group), part, "da", "1, 1, 1, 0, 1", kind)])
    return lines


def _parts(result: Sequence[str], tiles: Sequence[Sequence[int]]) -> Iterator[tuple[Sequence[int], Sequence[str]]]:
    """Each group of tiles with its registers of the result, 32 a tile."""
    first = tiles[0][0]
    for group in tiles:
        yield group, result[32 * (group[0] - first) : 32 * (group[-1] + 1 - first)]


def product(
    result: Sequence[str], a: tuple[str, int], b: tuple[str, int], *, adds: bool, a_transposed: bool = False
) -> list[str]:
    """result[64, N] (+)= A B^T over 16 columns of A[64, :] and B[N, :], N twice the registers of the result.

    a, b: a descriptor and how many bytes further the operand lies. a_transposed: A^T is what lies there, 16 rows of 64.
    """
    words = {"da": (a[0], (_ACROSS if a_transposed else 0) + (a[1] >> 4)), "db": (b[0], b[1] >> 4)}
    options = f"{int(adds)}, 1, 1, {int(a_transposed)}, 0"
    return _descriptors(words, [_product(2 * len(result), result, "da", options)])


def statement(
    code: Callable[[list[str], list[str], list[str]], Sequence[str]],
    *,
    changed: Sequence[Value] = (),
    fresh: int = 0,
    operands: Sequence["Operand | Pointer"] = (),
) -> list[Value]:
    """One asm statement: code(changed, fresh, operands) gives its lines from the names of the registers.

    changed: float registers that it reads and writes, wgmma's accumulators among them.
    fresh: how many more float registers it only writes.
    Returns the new `changed`, then the fresh ones.
    """
    values = [x.base if isinstance(x, Pointer) else as_value(x).ir for x in operands]
    inout, outputs = len(changed), len(changed) + fresh
    names = [f"${i}" for i in range(outputs + inout + len(values))]
    lines = code(names[:inout], names[inout:outputs], names[outputs + inout :])
    constraints = ["=f"] * outputs + [str(i) for i in range(inout)]
    constraints += [{"i32": "r", "f32": "f"}.get(str(x.type), "l") for x in values]
    float32 = ir.F32Type.get()
    kind = ir.Type.parse("!llvm.void") if not outputs else llvm.StructType.get_literal([float32] * outputs)
    # jaxlib before 0.11.2 has no such mark; every statement stands in uniform control flow.
    convergent: dict[str, Any] = {"convergent": True} if hasattr(llvm.InlineAsmOp, "convergent") else {}
    assert outputs != 1, "LLVM gives a single result without a struct"
    out: Any = llvm.inline_asm(
        kind,
        [x.ir for x in changed] + values,
        "\n".join(["{ .reg .b64 da, db; .reg .b32 la, lb;", *lines, "}"]),
        ",".join([*constraints, "~{memory}"]),
        has_side_effects=True,
        **convergent,
    )
    return [Value(llvm.extractvalue(float32, out, [i])) for i in range(outputs)]


def _value_offset(tile: int, step: int) -> int:
    """Low word of the descriptor of 16 rows of four tiles, less that of the first tile."""
    return _ACROSS + ((tile * TILE_BYTES + 2 * _ROWS_8 * step) >> 4)


def _descriptors(words: dict[str, tuple[str, int]], lines: list[str]) -> list[str]:
    """The lines with 64-bit descriptors da, db made from low words before them."""
    made = []
    for name, (register, offset) in words.items():
        low = "l" + name[1]
        made += [f"add.s32 {low}, {register}, {offset}; mov.b64 {name}, {{{low}, {_HIGH}}};"]
    return made + lines


def _product(columns: int, result: Sequence[str], a: str, options: str, kind: str = "bf16") -> str:
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind}"
    return f"{name} {{{','.join(result)}}}, {a}, db, {options};"
