"""The code of one CUDA thread, for bodies of `plgpu.inline_mgpu`: what Pallas Mosaic GPU has no operation for.

A `Value` is a 32-bit integer, a float32 or a condition in a register of the thread; Python's operators emit
instructions on it. Integers are signed, except that `>>` shifts zeros in. A `Pointer` reads and writes shared or global
memory. Loops and branches take functions, as those of `jax.lax` do; `when` is a context manager. A warpgroup has 128
threads.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, scf
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

THREADS = 128
WARPS = THREADS // 32
SCALAR = plgpu.Layout.WG_SPLAT(())  # of an argument or a result of inline_mgpu that `scalar` reads

Operand: TypeAlias = "Value | int | float"


class Value:
    """A register."""

    def __init__(self, value: Any):
        self.ir = value

    def __add__(self, other: Operand) -> "Value":
        return self._binary(arith.addi, arith.addf, other)

    def __sub__(self, other: Operand) -> "Value":
        return self._binary(arith.subi, arith.subf, other)

    def __mul__(self, other: Operand) -> "Value":
        return self._binary(arith.muli, arith.mulf, other)

    def __truediv__(self, other: Operand) -> "Value":
        return self._binary(None, arith.divf, other)

    def __floordiv__(self, other: Operand) -> "Value":
        """Of numbers that are not negative."""
        return self._binary(arith.divui, None, other)

    def __mod__(self, other: Operand) -> "Value":
        """Of numbers that are not negative."""
        return self._binary(arith.remui, None, other)

    def __and__(self, other: Operand) -> "Value":
        return self._binary(arith.andi, None, other)

    def __or__(self, other: Operand) -> "Value":
        return self._binary(arith.ori, None, other)

    def __xor__(self, other: Operand) -> "Value":
        return self._binary(arith.xori, None, other)

    def __lshift__(self, other: Operand) -> "Value":
        return self._binary(arith.shli, None, other)

    def __rshift__(self, other: Operand) -> "Value":
        return self._binary(arith.shrui, None, other)

    def __invert__(self) -> "Value":
        return self ^ -1

    def __neg__(self) -> "Value":
        return as_value(0) - self

    def __lt__(self, other: Operand) -> "Value":
        return self._compare(arith.CmpIPredicate.slt, arith.CmpFPredicate.OLT, other)

    def __le__(self, other: Operand) -> "Value":
        return self._compare(arith.CmpIPredicate.sle, arith.CmpFPredicate.OLE, other)

    def __gt__(self, other: Operand) -> "Value":
        return self._compare(arith.CmpIPredicate.sgt, arith.CmpFPredicate.OGT, other)

    def __ge__(self, other: Operand) -> "Value":
        return self._compare(arith.CmpIPredicate.sge, arith.CmpFPredicate.OGE, other)

    def equals(self, other: Operand) -> "Value":
        return self._compare(arith.CmpIPredicate.eq, arith.CmpFPredicate.OEQ, other)

    def differs(self, other: Operand) -> "Value":
        return self._compare(arith.CmpIPredicate.ne, arith.CmpFPredicate.UNE, other)

    def below(self, other: Operand) -> "Value":
        """Less than, both read as unsigned."""
        return self._compare(arith.CmpIPredicate.ult, None, other)

    def bits(self) -> "Value":
        """A float's bits as an integer."""
        return Value(arith.bitcast(i32(), self.ir))

    def as_float(self) -> "Value":
        """The float whose bits these are."""
        return Value(arith.bitcast(f32(), self.ir))

    def to_float(self) -> "Value":
        return Value(arith.sitofp(f32(), self.ir))

    def to_int(self) -> "Value":
        """Towards zero."""
        return Value(arith.fptosi(i32(), self.ir))

    def _binary(self, of_ints: Any, of_floats: Any, other: Operand) -> "Value":
        return Value((of_floats if self.ir.type == f32() else of_ints)(self.ir, self._like(other)))

    def _compare(self, of_ints: Any, of_floats: Any, other: Operand) -> "Value":
        if self.ir.type == f32():
            return Value(arith.cmpf(of_floats, self.ir, self._like(other)))
        return Value(arith.cmpi(of_ints, self.ir, self._like(other)))

    def _like(self, other: Operand) -> ir.Value:
        if isinstance(other, Value):
            return other.ir
        return as_value(float(other) if self.ir.type == f32() else other).ir


class Pointer:
    """An array of 32-bit elements in memory."""

    def __init__(self, base: Any, element: ir.Type):
        self.base = base
        self.element = element

    @classmethod
    def to(cls, memref: ir.Value) -> "Pointer":
        """The first element of a Pallas ref without transforms."""
        return cls(utils.memref_ptr(memref), ir.MemRefType(memref.type).element_type)

    def at(self, index: Operand) -> "Pointer":
        """Past 2^31 bytes too, as long as `index` itself is in 32 bits."""
        return Pointer(utils.getelementptr(self.base, [as_value(index).ir], self.element), self.element)

    def past(self, offset: Value) -> "Pointer":
        """`offset` bytes further."""
        i8 = ir.IntegerType.get_signless(8)
        return Pointer(utils.getelementptr(self.base, [offset.ir], i8), self.element)

    def row(self, row: Value, length: int) -> "Pointer":
        """The start of a row of a matrix of any size."""
        offset = arith.muli(arith.extsi(i64(), row.ir), arith.constant(i64(), length))
        return Pointer(utils.getelementptr(self.base, [offset], self.element), self.element)

    @classmethod
    def of_words(cls, low: Value, high: Value, element: ir.Type) -> "Pointer":
        """The one whose address these are."""
        words = [arith.extui(i64(), word.ir) for word in (low, high)]
        address = arith.ori(words[0], arith.shli(words[1], arith.constant(i64(), 32)))
        return cls(llvm.inttoptr(llvm.PointerType.get(), address), element)

    def words(self) -> tuple[Value, Value]:
        """Its address in two words, the low one first."""
        address = llvm.ptrtoint(i64(), self.base)
        high = arith.shrui(address, arith.constant(i64(), 32))
        return Value(arith.trunci(i32(), address)), Value(arith.trunci(i32(), high))

    def __getitem__(self, index: Operand) -> Value:
        return Value(llvm.load(self.element, self.at(index).base))

    def __setitem__(self, index: Operand, value: Operand) -> None:
        llvm.store(as_value(value).ir, self.at(index).base)

    def load4(self, index: Operand) -> list[Value]:
        """Four neighbours, the first on a multiple of 16 bytes."""
        vector = llvm.load(ir.VectorType.get((4,), self.element), self.at(index).base, alignment=16)
        return [Value(llvm.extractelement(vector, as_value(i).ir)) for i in range(4)]

    def store4(self, index: Operand, values: Sequence[Operand]) -> None:
        vector = llvm.mlir_undef(ir.VectorType.get((4,), self.element))
        for i, value in enumerate(values):
            vector = llvm.insertelement(vector, as_value(value).ir, as_value(i).ir)
        llvm.store(vector, self.at(index).base, alignment=16)

    def take(self) -> Value:
        """The first element as it was; adds one to it, at once with respect to the other threads."""
        return ptx("atom.shared.add.u32 $0, [$1], 1;", self.shared(), result=i32())

    def shared(self) -> Value:
        """Its address within the block's shared memory, for PTX."""
        return Value(llvm.ptrtoint(i32(), self.base))

    def peer(self, rank: int) -> Value:
        """The address of the same element in the shared memory of block `rank` of the cluster."""
        return ptx(f"mapa.shared::cluster.u32 $0, $1, {rank};", self.shared(), result=i32())


def scalar(argument: Any) -> Value:
    """The number in a scalar argument of inline_mgpu."""
    return Value(argument.registers.item())


def as_value(operand: Operand) -> Value:
    if isinstance(operand, Value):
        return operand
    if isinstance(operand, float):
        return Value(arith.constant(f32(), operand))
    return Value(arith.constant(i32(), (operand + 2**31) % 2**32 - 2**31))  # any 32 bits, as a signed number


def select(condition: Value, yes: Operand, no: Operand) -> Value:
    return Value(arith.select(condition.ir, as_value(yes).ir, as_value(no).ir))


def minimum(a: Value, b: Operand) -> Value:
    return a._binary(arith.minsi, None, b)


def maximum(a: Value, b: Operand) -> Value:
    return a._binary(arith.maxsi, None, b)


def total(values: Sequence[Value]) -> Value:
    return functools.reduce(operator.add, values)


def ones(word: Value) -> Value:
    """How many bits are set."""
    return Value(llvm.intr_ctpop(word.ir))


def leading_zeros(word: Value) -> Value:
    return Value(llvm.intr_ctlz(word.ir, False))


def highest_bit(word: Value) -> Value:
    """The place of the highest bit set."""
    return ptx("bfind.u32 $0, $1;", word, result=i32())


def push_sign(word: Value, number: Value) -> Value:
    """`word` shifted left by one, with the sign bit of `number` moved in."""
    return Value(llvm.intr_fshl(word.ir, number.ir, as_value(1).ir))


def square_root(x: Value) -> Value:
    return ptx("sqrt.approx.f32 $0, $1;", x, result=f32())


def while_loop(condition: Callable, body: Callable, init: Sequence[Operand]) -> list[Value]:
    """body(*state) -> state, as long as condition(*state) holds."""
    state = [as_value(x).ir for x in init]
    types = [x.type for x in state]
    loop = scf.WhileOp(types, state)
    before = loop.before.blocks.append(*types)
    with ir.InsertionPoint(before):
        scf.condition(condition(*map(Value, before.arguments)).ir, list(before.arguments))
    after = loop.after.blocks.append(*types)
    with ir.InsertionPoint(after):
        scf.yield_([as_value(x).ir for x in body(*map(Value, after.arguments))])
    return [Value(x) for x in loop.results]


def for_loop(stop: Operand, body: Callable, init: Sequence[Operand] = ()) -> list[Value]:
    """body(i, *state) -> state for i from 0 to stop - 1; a body without state may return None."""
    _, *state = while_loop(
        lambda i, *state: i < stop, lambda i, *state: [i + 1, *(body(i, *state) or ())], [as_value(0), *init]
    )
    return state


def branch(condition: Value, yes: Callable, no: Callable, example: Sequence[Operand]) -> list[Value]:
    """yes() where the condition holds, else no(); both return as many values as `example`, of the same types."""
    op: Any = scf.IfOp(condition.ir, [as_value(x).ir.type for x in example], has_else=True)
    for block, function in ((op.then_block, yes), (op.else_block, no)):
        with ir.InsertionPoint(block):
            scf.yield_([as_value(x).ir for x in function()])
    return [Value(x) for x in op.results]


@contextlib.contextmanager
def when(condition: Value) -> Generator[None]:
    """Runs the block in the threads where the condition holds."""
    op: Any = scf.IfOp(condition.ir)
    with ir.InsertionPoint(op.then_block):
        yield
        scf.yield_([])


def ptx(code: str, *operands: "Operand | Pointer", result: ir.Type | None = None, collective: bool = False) -> Any:
    """One PTX statement: $0 is the result where there is one, then the operands.

    collective: all threads of the warp or the block must come here together.
    """
    out = _asm(code, operands, [] if result is None else [result], collective)
    return None if result is None else Value(out)


def ptx_floats(code: str, *operands: "Operand | Pointer", count: int, collective: bool = False) -> list[Value]:
    """The same with `count` floats as results, two or more."""
    out = _asm(code, operands, [f32()] * count, collective)
    return [Value(llvm.extractvalue(f32(), out, [i])) for i in range(count)]


def _asm(code: str, operands: Sequence["Operand | Pointer"], results: Sequence[ir.Type], collective: bool) -> Any:
    values = [x.base if isinstance(x, Pointer) else as_value(x).ir for x in operands]
    letters = {i32(): "r", f32(): "f", i64(): "l"}
    constraints = ["=" + letters[x] for x in results] + [letters.get(x.type, "l") for x in values]
    single = results[0] if results else ir.Type.parse("!llvm.void")
    # jaxlib before 0.11.2 has no such mark; only barriers and shuffles in uniform control flow are at stake.
    convergent: dict[str, Any] = {"convergent": collective} if hasattr(llvm.InlineAsmOp, "convergent") else {}
    return llvm.inline_asm(
        single if len(results) < 2 else llvm.StructType.get_literal(list(results)),
        values,
        code,
        ",".join([*constraints, "~{memory}"]),
        has_side_effects=True,
        **convergent,
    )


def pure(code: str, *operands: Operand, result: ir.Type | None = None) -> Any:
    """A PTX instruction without effects, $0 its result: a float unless `result` says otherwise."""
    result = result or f32()
    letters = {i32(): "r", f32(): "f", i64(): "l"}
    values = [as_value(x).ir for x in operands]
    constraints = ",".join(["=" + letters[result], *(letters[x.type] for x in values)])
    return Value(llvm.inline_asm(result, values, code, constraints))


def policy(priority: str) -> Value:
    """An L2 cache policy for loads or stores, 64 bits: "evict_first" or "evict_last"."""
    return pure(f"createpolicy.fractional.L2::{priority}.b64 $0;", result=i64())


def exp2(x: Value) -> Value:
    return pure("ex2.approx.ftz.f32 $0, $1;", x)


def log2(x: Value) -> Value:
    return pure("lg2.approx.f32 $0, $1;", x)


def fma(a: Value, b: Value, c: Value) -> Value:
    return pure("fma.rn.f32 $0, $1, $2, $3;", a, b, c)


def opaque(x: Value) -> Value:
    """The same integer, of which the compiler knows nothing: it will not be taken apart."""
    return pure("mov.b32 $0, $1;", x, result=i32())


def fma_up(a: Value, b: Value, c: Value) -> Value:
    """`fma` rounded up."""
    return pure("fma.rp.f32 $0, $1, $2, $3;", a, b, c)


def lesser(a: Value, b: Value) -> Value:
    """The lesser of two floats; NaN is passed over."""
    return pure("min.f32 $0, $1, $2;", a, b)


def greater(a: Value, b: Value) -> Value:
    """The greater of two floats; NaN is passed over."""
    return pure("max.f32 $0, $1, $2;", a, b)


def round_up(x: Value) -> Value:
    """The least integer that is not below, or the nearest that there is; 0 for NaN."""
    return pure("cvt.rpi.s32.f32 $0, $1;", x, result=i32())


def pack_bf16(low: Value, high: Value) -> Value:
    """Two floats rounded to bf16, in one word."""
    return pure("cvt.rn.bf16x2.f32 $0, $2, $1;", low, high, result=i32())


def lane_across(x: Value, distance: int) -> Value:
    """A float of the lane whose number differs in one bit."""
    return ptx(f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;", x, result=f32(), collective=True)


def of_lane(x: Value, lane: Value) -> Value:
    """An integer of a lane of the warp."""
    return ptx("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", x, lane, result=i32(), collective=True)


def ballot(condition: Value) -> Value:
    """Of which lanes of the warp the condition holds, a bit a lane."""
    code = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1; }"
    return ptx(code, select(condition, 1, 0), result=i32(), collective=True)


def warp_barrier() -> None:
    """Waits for the lanes of the warp, and makes their writes to shared memory visible to each other."""
    ptx("bar.warp.sync -1;", collective=True)


def thread(*, anew: bool = False) -> Value:
    """The thread's number in its block. Read anew, it need not stay in a register until then."""
    return Value(llvm.inline_asm(i32(), [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=anew))


def block() -> Value:
    """The block's number in a grid of one axis, read anew at each call."""
    return ptx("mov.u32 $0, %ctaid.x;", result=i32())


def barrier() -> None:
    """Waits for all threads of the block, and makes their writes to shared memory visible."""
    ptx("bar.sync 0;", collective=True)


def warpgroup_barrier() -> None:
    """Waits for the threads of the warpgroup, and makes their writes to shared memory visible to each other."""
    ptx(f"bar.sync $0, {THREADS};", (thread() >> 7) + 1, collective=True)  # 0 is the whole block's


def add_from_below(x: Value, distance: int) -> Value:
    """x plus x of the lane `distance` below, where there is one."""
    shuffle = f"shfl.sync.up.b32 t|p, $1, {distance}, 0, -1;"
    code = "{ .reg .pred p; .reg .b32 t; " + shuffle + " mov.b32 $0, $1; @p add.s32 $0, $1, t; }"
    return ptx(code, x, result=i32(), collective=True)


def warp_maximum(x: Value) -> Value:
    return ptx("redux.sync.max.s32 $0, $1, -1;", x, result=i32(), collective=True)


def init_barrier(barrier: Pointer, arrivals: int = 1) -> None:
    """Readies an mbarrier for `arrivals` a phase; `publish_barriers` must follow before it is used."""
    ptx(f"mbarrier.init.shared.b64 [$0], {arrivals};", barrier.shared())


def publish_barriers() -> None:
    ptx("fence.mbarrier_init.release.cluster;")


def arrive(barrier: Pointer) -> None:
    """Arrives at an mbarrier, after all this thread wrote to shared memory."""
    ptx("mbarrier.arrive.shared::cta.b64 _, [$0];", barrier.shared())


def arrive_after_copies(barrier: Pointer) -> None:
    """Arrives at an mbarrier when what this thread copied by cp.async so far is there."""
    ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", barrier.shared())


def expect_bytes(barrier: Pointer, count: Operand) -> None:
    """Arrives; the phase ends when copies have brought `count` bytes."""
    ptx("mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", barrier.shared(), count)


def wait_phase(barrier: Pointer, parity: Value) -> None:
    """Waits until the phase of this parity has ended."""
    code = "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [$1], $2; selp.b32 $0, 1, 0, p; }"
    address = barrier.shared()
    while_loop(lambda done: done.equals(0), lambda done: [ptx(code, address, parity, result=i32())], [0])


def bulk_copy(target: Pointer, source: Pointer, count: Value, barrier: Pointer) -> None:
    """Starts a copy of `count` bytes from global to shared memory, all multiples of 16, that reports to an mbarrier."""
    ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        target.shared(),
        source,
        count,
        barrier.shared(),
    )


def cluster_barrier() -> None:
    """Waits for all threads of the cluster, and makes their writes to shared memory visible."""
    ptx("barrier.cluster.arrive.aligned;", collective=True)
    ptx("barrier.cluster.wait.aligned;", collective=True)


def load_peer(address: Value, offset: int = 0) -> Value:
    """An integer in another block's shared memory, at an address that Pointer.peer gave, plus `offset` bytes."""
    return ptx(f"ld.shared::cluster.b32 $0, [$1+{offset}];", address, result=i32())


def increment(address: Value) -> None:
    """Adds one to a word at an address that Pointer.shared gave, at once with respect to the other threads."""
    ptx("red.shared.add.u32 [$0], 1;", address)


def store_two(address: Value, word: Value, bit: int, first: Value, second: Value, offset: int) -> Value:
    """Where the bit of `word` is set, stores one word at an address that Pointer.shared gave, another `offset` bytes
    past it. Returns the address of the next: four bytes further, or the same where nothing was stored.
    """
    shift = bit - 2  # what turns the bit into 4 bytes
    move = f"shr.u32 t, t, {shift};" if shift >= 0 else f"shl.b32 t, t, {-shift};"
    # Into another register: the stores still read the address.
    code = f"""{{ .reg .pred p; .reg .b32 t; and.b32 t, $2, {1 << bit}; setp.ne.b32 p, t, 0;
    @p st.shared.b32 [$1], $3; @p st.shared.b32 [$1+{offset}], $4; {move} add.s32 $0, $1, t; }}"""
    return ptx(code, address, word, first, second, result=i32())


def store_peer(address: Value, value: Value, offset: int = 0) -> None:
    """Stores an integer in another block's shared memory, as `load_peer` loads it."""
    ptx(f"st.shared::cluster.b32 [$0+{offset}], $1;", address, value)


def load_peer4(address: Value) -> list[Value]:
    """Four integers at an address that Pointer.peer gave, a multiple of 16."""
    out = _asm("ld.shared::cluster.v4.b32 {$0, $1, $2, $3}, [$4];", [address], [i32()] * 4, collective=False)
    return [Value(llvm.extractvalue(i32(), out, [i])) for i in range(4)]


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def f32() -> ir.Type:
    return ir.F32Type.get()
