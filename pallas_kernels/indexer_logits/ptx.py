"""Short names for what the Hopper kernel writes in PTX and MLIR, inside `plgpu.inline_mgpu`."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

SCALAR = plgpu.Layout.WG_SPLAT(())
WARPGROUP = 128


def asm(text: str, *operands: Any, results: Sequence[Any], pure: bool = False) -> list[Any]:
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


def asm1(text: str, *operands: Any, pure: bool = False) -> Any:
    """Inline PTX with one float32 result."""
    return asm(text, *operands, results=[f32_type()], pure=pure)[0]


def policy(priority: str) -> Any:
    """An L2 cache policy for loads or stores, an i64: "evict_first" or "evict_last"."""
    return asm(f"createpolicy.fractional.L2::{priority}.b64 $0;", results=[i64_type()], pure=True)[0]


def thread():
    """The thread's number in its warpgroup."""
    number = asm("mov.u32 $0, %tid.x;", results=[i32_type()], pure=True)[0]
    return arith.andi(number, i32(WARPGROUP - 1))


def shuffle_xor(x, mask: int):
    """A float32 of the lane whose number differs by `mask`."""
    return asm1(f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, 0xffffffff;", x)


def shuffle_up(x, step: int):
    """An i32 of the lane `step` below; the lowest lanes get their own."""
    return asm(f"shfl.sync.up.b32 $0, $1, {step}, 0, 0xffffffff;", x, results=[i32_type()])[0]


def shuffle_from(x, lane):
    """An i32 of a lane."""
    return asm("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", x, lane, results=[i32_type()])[0]


def load_global(ref, word):
    """An i32 of memory that no kernel writes meanwhile; word: an i64."""
    address = arith.addi(global_address(ref), arith.shli(word, i64(2)))
    return asm("ld.global.nc.b32 $0, [$1];", address, results=[i32_type()], pure=True)[0]


def load_shared(ref, word, condition=None):
    """An i32 of shared memory; where there is a condition, an i1, that does not hold: 0, and nothing is read."""
    address = arith.addi(shared_address(ref), arith.shli(word, i32(2)))
    if condition is None:
        return asm("ld.volatile.shared.b32 $0, [$1];", address, results=[i32_type()])[0]
    text = """{ .reg .pred p; .reg .b32 x;
        setp.ne.s32 p, $2, 0; mov.b32 x, 0; @p ld.volatile.shared.b32 x, [$1]; mov.b32 $0, x; }"""
    return asm(text, address, arith.extui(i32_type(), condition), results=[i32_type()])[0]


def store_shared(ref, word, value, condition) -> None:
    """Stores an i32 to shared memory where the condition, an i1, holds."""
    address = arith.addi(shared_address(ref), arith.shli(word, i32(2)))
    text = "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.volatile.shared.b32 [$0], $1; }"
    asm(text, address, value, arith.extui(i32_type(), condition), results=[])


def loop(count: int, *carried: Any) -> Callable[[Callable[..., Any]], tuple[Any, ...]]:
    """Decorates f(turn, *carried) -> the next ones, or None for none; leaves the last ones."""

    def run(body):
        @utils.fori(i32(count), list(carried))
        def done(turn, values):
            return list(body(turn, *values) or ())

        return tuple(done.results)

    return run


def scalar(x: Any) -> Any:
    """The MLIR value of a scalar argument."""
    return x.registers.item()


def global_address(ref):
    """An i64."""
    pointer = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(ref))
    return llvm.ptrtoint(i64_type(), pointer)


def shared_address(ref):
    """An i32."""
    return llvm.ptrtoint(i32_type(), utils.memref_ptr(ref))


def equal(a, b):
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def less(a, b):
    return arith.cmpi(arith.CmpIPredicate.slt, a, b)


def at_least(a, b):
    return arith.cmpi(arith.CmpIPredicate.sge, a, b)


def mul(x, factor: int):
    return arith.muli(x, i32(factor))


def wide(x):
    """An i32 that is not negative as i64."""
    return arith.extui(i64_type(), x)


def i32_type():
    return ir.IntegerType.get_signless(32)


def i64_type():
    return ir.IntegerType.get_signless(64)


def f32_type():
    return ir.F32Type.get()


def i32(value: int) -> Any:
    return utils.c(value, i32_type())


def i64(value: int) -> Any:
    return utils.c(value, i64_type())


def f32(value: float) -> Any:
    return utils.c(value, f32_type())
