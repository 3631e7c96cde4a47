"""`pallas_kernels.simt` by numpy: runs the code of a kernel's threads on a CPU, which Pallas cannot interpret.

All threads of a cluster's blocks go in step. A `Value` holds one number a thread, and a mask says which of them take
part. What a GPU would do silently raises AssertionError here: two warps that touch the same word of shared memory
between two barriers, one of them writing; addresses outside an array; a barrier that some threads do not reach; a copy
whose source or target is used too early; a wait that nothing ends.
"""

import contextlib
import functools
import importlib
import operator
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

THREADS = 128
WARPS = THREADS // 32
_QUIET_NAN = np.uint32(0x7FFFFFFF).view(np.float32)  # what the device makes of every NaN

Operand = Any


class Machine:
    """The state of a run: `parts` blocks, which threads are active, and when each kind of barrier was last passed."""

    def __init__(self, parts: int, threads: int):
        self.parts, self.threads = parts, threads
        self.lanes = parts * threads
        self.mask = np.ones(self.lanes, bool)
        self.warp = np.arange(self.lanes) // 32
        self.block = np.arange(self.lanes) // threads
        self.now = 1
        self.block_barrier = np.zeros(parts, np.int64)
        self.cluster_barrier = 0
        self.arrivals: dict[tuple[str, int], _Arrival] = {}
        self.arrays: list[Array] = []

    def window(self, array: "Array") -> int:
        """Where an array begins in the shared memory of each block."""
        if array not in self.arrays:
            self.arrays.append(array)
        return (1 + self.arrays.index(array)) << 24


_machine = Machine(1, THREADS)


def emulate(modules: Sequence[str], run: Callable[..., Any]) -> Any:
    """run(*modules), which are imported anew, in this order, over this one as their simt."""
    names = ["pallas_kernels.simt", *modules]
    saved = {name: importlib.import_module(name) for name in names}
    try:
        _put("pallas_kernels.simt", sys.modules[__name__])
        for name in modules:
            del sys.modules[name]
            _put(name, importlib.import_module(name))
        with np.errstate(all="ignore"):
            return run(*(sys.modules[name] for name in modules))
    finally:
        for name, module in saved.items():
            _put(name, module)


def _put(name: str, module: ModuleType) -> None:
    parent, _, leaf = name.rpartition(".")
    sys.modules[name] = module
    setattr(sys.modules[parent], leaf, module)


def start(parts: int = 1, threads: int = THREADS) -> "Value":
    """Begins a run of a cluster of so many blocks; returns each thread's block."""
    global _machine
    _machine = Machine(parts, threads)
    return Value(_machine.block.astype(np.int32))


class Value:
    """A register of every thread."""

    def __init__(self, numbers: np.ndarray):
        self.numbers = numbers

    def __add__(self, other: Operand) -> "Value":
        return self._join(operator.add, other)

    def __sub__(self, other: Operand) -> "Value":
        return self._join(operator.sub, other)

    def __mul__(self, other: Operand) -> "Value":
        return self._join(operator.mul, other)

    def __truediv__(self, other: Operand) -> "Value":
        assert self.numbers.dtype == np.float32
        return self._join(operator.truediv, other)

    def __floordiv__(self, other: Operand) -> "Value":
        return self._divide(operator.floordiv, other)

    def __mod__(self, other: Operand) -> "Value":
        return self._divide(operator.mod, other)

    def __and__(self, other: Operand) -> "Value":
        return self._join(operator.and_, other)

    def __or__(self, other: Operand) -> "Value":
        return self._join(operator.or_, other)

    def __xor__(self, other: Operand) -> "Value":
        return self._join(operator.xor, other)

    def __lshift__(self, other: Operand) -> "Value":
        return Value((self.unsigned << self._distance(other)).view(np.int32))

    def __rshift__(self, other: Operand) -> "Value":
        return Value((self.unsigned >> self._distance(other)).view(np.int32))

    def __invert__(self) -> "Value":
        return self ^ -1

    def __neg__(self) -> "Value":
        return as_value(0) - self

    def __lt__(self, other: Operand) -> "Value":
        return self._join(operator.lt, other)

    def __le__(self, other: Operand) -> "Value":
        return self._join(operator.le, other)

    def __gt__(self, other: Operand) -> "Value":
        return self._join(operator.gt, other)

    def __ge__(self, other: Operand) -> "Value":
        return self._join(operator.ge, other)

    def equals(self, other: Operand) -> "Value":
        return self._join(operator.eq, other)

    def differs(self, other: Operand) -> "Value":
        return self._join(operator.ne, other)

    def below(self, other: Operand) -> "Value":
        return Value(self.unsigned < Value(self._like(other)).unsigned)

    def bits(self) -> "Value":
        return Value(self.numbers.view(np.int32))

    def as_float(self) -> "Value":
        return Value(self.numbers.view(np.float32))

    def to_float(self) -> "Value":
        return Value(self.numbers.astype(np.float32))

    def to_int(self) -> "Value":
        fits = np.abs(self.numbers) < 2.0**31
        assert fits[_machine.mask].all(), "a float that no integer is near to"
        return Value(np.where(fits, self.numbers, 0).astype(np.int32))

    @property
    def unsigned(self) -> np.ndarray:
        assert self.numbers.dtype == np.int32
        return self.numbers.view(np.uint32)

    def _like(self, other: Operand) -> np.ndarray:
        if isinstance(other, Value):
            assert other.numbers.dtype == self.numbers.dtype, "operands of two types"
            return other.numbers
        assert self.numbers.dtype != np.bool_, "a condition and a number"
        return as_value(float(other) if self.numbers.dtype == np.float32 else other).numbers

    def _join(self, function: Callable, other: Operand) -> "Value":
        result = function(self.numbers, self._like(other))
        if result.dtype == np.float32:
            result = np.where(np.isnan(result), _QUIET_NAN, result)
        return Value(result)

    def _divide(self, function: Callable, other: Operand) -> "Value":
        divisor = self._like(other)
        assert ((self.numbers >= 0) & (divisor > 0))[_machine.mask].all(), "division of negative numbers, or by them"
        return Value(function(self.numbers, np.maximum(divisor, 1)))

    def _distance(self, other: Operand) -> np.ndarray:
        distance = self._like(other)
        assert ((distance >= 0) & (distance < 32))[_machine.mask].all(), "a shift by more than the word"
        return (distance & 31).view(np.uint32)


class Array:
    """32-bit words in memory: one array for all blocks, or in shared memory `per_block` words for each of them."""

    def __init__(self, name: str, words: np.ndarray, per_block: int = 0):
        self.name, self.words, self.per_block = name, words, per_block
        shape = (len(words) if per_block else 0, 2)
        # For [:, 0] plain and [:, 1] atomic accesses: when the last ones were, and a bit for each warp that made them.
        self._read_at, self._read_by = (np.zeros(len(words) if per_block else 0, np.int64) for _ in range(2))
        self._written_at, self._written_by = (np.zeros(shape, np.int64) for _ in range(2))

    @classmethod
    def shared(cls, name: str, per_block: int, dtype: Any) -> "Array":
        """Uninitialised shared memory of every block."""
        per_block = -(-per_block // 4) * 4
        return cls(name, np.full(per_block * _machine.parts, 12345, dtype), per_block)

    def pointer(self) -> "Pointer":
        return Pointer(self, _machine.block.astype(np.int64) * self.per_block * 4)

    def load(self, places: np.ndarray) -> np.ndarray:
        mask = _machine.mask
        self.touch(places[mask], _machine.warp[mask], "reads")
        out = np.zeros(_machine.lanes, self.words.dtype)
        out[mask] = self.words[places[mask]]
        return out

    def store(self, places: np.ndarray, numbers: np.ndarray) -> None:
        places, numbers = places[_machine.mask], numbers[_machine.mask]
        self.touch(places, _machine.warp[_machine.mask], "writes")
        self.words[places] = numbers
        assert np.array_equal(self.words[places], numbers, equal_nan=True), f"threads write two things to {self.name}"

    def increment(self, places: np.ndarray) -> None:
        self.touch(places[_machine.mask], _machine.warp[_machine.mask], "increments")
        np.add.at(self.words, places[_machine.mask], 1)

    def touch(self, places: np.ndarray, warps: np.ndarray, how: str) -> None:
        """Notes that warps access words. Raises where another did, with no barrier since, and one of the two wrote."""
        assert ((places >= 0) & (places < len(self.words))).all(), f"a thread {how} outside {self.name}"
        if not self.per_block or not len(places):
            return
        places, warps = np.unique(np.stack([places, warps]), axis=1)
        self._check(places, warps, self._written_at[:, 0], self._written_by[:, 0], how, "wrote it")
        if how != "increments":
            self._check(places, warps, self._written_at[:, 1], self._written_by[:, 1], how, "incremented it")
        if how != "reads":
            self._check(places, warps, self._read_at, self._read_by, how, "read it")
        kind = 1 if how == "increments" else 0
        when, who = self._written_at[:, kind], self._written_by[:, kind]
        if how == "reads":
            when, who = self._read_at, self._read_by
        old = np.unique(places[when[places] < self._barrier_of(places // self.per_block)])
        who[old] = 0
        np.bitwise_or.at(who, places, 1 << warps)
        when[places] = _machine.now

    def _check(self, places, warps, when, who, how: str, did: str) -> None:
        per = _machine.threads // 32
        for rank in range(_machine.lanes // 32):
            theirs = (who[places] >> rank & 1 == 1) & (warps != rank)
            own = warps // per == rank // per
            race = theirs & (when[places] >= np.where(own, self._barrier_of(warps // per), _machine.cluster_barrier))
            assert not race.any(), f"a race: warp {warps[race][0]} {how} {self.name}[{places[race][0]}], {rank} {did}"

    def _barrier_of(self, blocks: np.ndarray) -> np.ndarray:
        return _machine.block_barrier[blocks]


class Pointer:
    """An address for every thread, in bytes from the beginning of an array."""

    def __init__(self, array: Array, offset: np.ndarray):
        self.array, self.offset = array, offset

    def at(self, index: Operand) -> "Pointer":
        return Pointer(self.array, self.offset + 4 * as_value(index).numbers.astype(np.int64))

    def past(self, offset: Value) -> "Pointer":
        return Pointer(self.array, self.offset + offset.numbers)

    def row(self, row: Value, length: int) -> "Pointer":
        return Pointer(self.array, self.offset + 4 * length * row.numbers.astype(np.int64))

    def places(self, alignment: int = 4) -> np.ndarray:
        assert (self.offset[_machine.mask] % alignment == 0).all(), f"an address no multiple of {alignment} bytes"
        return self.offset // 4

    def __getitem__(self, index: Operand) -> Value:
        pointer = self.at(index)
        return Value(pointer.array.load(pointer.places()))

    def __setitem__(self, index: Operand, value: Operand) -> None:
        pointer = self.at(index)
        pointer.array.store(pointer.places(), as_value(value).numbers)

    def load4(self, index: Operand) -> list[Value]:
        self.at(index).places(16)
        return [self.at(index)[i] for i in range(4)]

    def store4(self, index: Operand, values: Sequence[Operand]) -> None:
        self.at(index).places(16)
        for i, value in enumerate(values):
            self.at(index)[i] = value

    def take(self) -> Value:
        places = self.places()
        self.array.touch(places[_machine.mask], _machine.warp[_machine.mask], "increments")
        out = np.zeros(_machine.lanes, np.int32)
        for lane in np.flatnonzero(_machine.mask)[::-1]:  # in no order that a kernel may rely on
            out[lane] = self.array.words[places[lane]]
            self.array.words[places[lane]] += 1
        return Value(out)

    def shared(self) -> Value:
        """An address within the block."""
        own = self.offset - _machine.block * self.array.per_block * 4
        return Value((_machine.window(self.array) + own).astype(np.int32))

    def peer(self, rank: int) -> "Pointer":
        per_block = 4 * self.array.per_block
        return Pointer(self.array, self.offset % per_block + rank * per_block)


def as_value(operand: Operand) -> Value:
    if isinstance(operand, Value):
        return operand
    if isinstance(operand, float):
        return Value(np.full(_machine.lanes, operand, np.float32))
    return Value(np.full(_machine.lanes, (operand + 2**31) % 2**32 - 2**31, np.int32))


def select(condition: Value, yes: Operand, no: Operand) -> Value:
    yes, no = as_value(yes).numbers, as_value(no).numbers
    assert yes.dtype == no.dtype and condition.numbers.dtype == np.bool_
    return Value(np.where(condition.numbers, yes, no))


def minimum(a: Value, b: Operand) -> Value:
    return a._join(np.minimum, b)


def maximum(a: Value, b: Operand) -> Value:
    return a._join(np.maximum, b)


def total(values: Sequence[Value]) -> Value:
    return functools.reduce(operator.add, values)


def ones(word: Value) -> Value:
    return Value(np.bitwise_count(word.unsigned).astype(np.int32))


def leading_zeros(word: Value) -> Value:
    return Value(31 - highest_bit(word).numbers)


def highest_bit(word: Value) -> Value:
    """-1 for none."""
    return Value(np.array([int(x).bit_length() - 1 for x in word.unsigned], np.int32))


def push_sign(word: Value, number: Value) -> Value:
    return (word << 1) | (number >> 31)


def square_root(x: Value) -> Value:
    return Value(np.sqrt(x.numbers))


def _fused(a: Value, b: Value, c: Value) -> np.ndarray:
    return a.numbers.astype(np.float64) * b.numbers + c.numbers


def fma(a: Value, b: Value, c: Value) -> Value:
    return Value(_fused(a, b, c).astype(np.float32))


def opaque(x: Value) -> Value:
    return x


def fma_up(a: Value, b: Value, c: Value) -> Value:
    exact = _fused(a, b, c)
    near = exact.astype(np.float32)
    return Value(np.where(near < exact, np.nextafter(near, np.float32(np.inf)), near).astype(np.float32))


def lesser(a: Value, b: Value) -> Value:
    return Value(np.fmin(a.numbers, b.numbers))


def greater(a: Value, b: Value) -> Value:
    return Value(np.fmax(a.numbers, b.numbers))


def round_up(x: Value) -> Value:
    """With the device's limits, and 0 for NaN."""
    whole = np.nan_to_num(np.ceil(x.numbers.astype(np.float64)), nan=0.0, posinf=2.0**31, neginf=-(2.0**31))
    return Value(np.clip(whole, -(2**31), 2**31 - 1).astype(np.int32))


def while_loop(condition: Callable, body: Callable, init: Sequence[Operand]) -> list[Value]:
    state, outer = [as_value(x) for x in init], _machine.mask
    active = outer
    while True:
        _machine.mask = active
        active = active & condition(*state).numbers
        if not active.any():
            break
        _machine.mask = active
        new = [as_value(x) for x in body(*state)]
        state = [select(Value(active), after, before) for after, before in zip(new, state, strict=True)]
    _machine.mask = outer
    return state


def for_loop(stop: Operand, body: Callable, init: Sequence[Operand] = ()) -> list[Value]:
    _, *state = while_loop(lambda i, *_: i < stop, lambda i, *s: [i + 1, *(body(i, *s) or ())], [0, *init])
    return state


def branch(condition: Value, yes: Callable, no: Callable, example: Sequence[Operand]) -> list[Value]:
    outer, results = _machine.mask, [list(map(as_value, example))] * 2
    for i, (chosen, function) in enumerate(((condition.numbers, yes), (~condition.numbers, no))):
        _machine.mask = outer & chosen
        if _machine.mask.any():
            results[i] = list(map(as_value, function()))
    _machine.mask = outer
    return [select(condition, *both) for both in zip(*results, strict=True)]


@contextlib.contextmanager
def when(condition: Value) -> Generator[None]:
    outer = _machine.mask
    _machine.mask = outer & condition.numbers
    yield
    _machine.mask = outer


def thread() -> Value:
    return Value((np.arange(_machine.lanes) % _machine.threads).astype(np.int32))


def _together(size: int) -> None:
    """All threads of a group of this size must be active, or none."""
    groups = _machine.mask.reshape(-1, size)
    assert (groups.all(1) | ~groups.any(1)).all(), "some threads come to a barrier or a shuffle, and some do not"


def barrier() -> None:
    _together(_machine.threads)
    _machine.now += 1
    _machine.block_barrier[np.unique(_machine.block[_machine.mask])] = _machine.now


def warpgroup_barrier() -> None:
    barrier()  # a block is one warpgroup here


def cluster_barrier() -> None:
    _together(_machine.lanes)
    if _machine.mask.any():
        _machine.now += 1
        _machine.block_barrier[:] = _machine.cluster_barrier = _machine.now


def add_from_below(x: Value, distance: int) -> Value:
    _together(32)
    lanes = x.numbers.reshape(-1, 32)
    out = lanes.copy()
    out[:, distance:] += lanes[:, :-distance]
    return Value(out.reshape(-1))


def of_lane(x: Value, lane: Value) -> Value:
    _together(32)
    lanes = np.arange(_machine.lanes) & ~31 | lane.numbers & 31
    return Value(x.numbers[lanes])


def ballot(condition: Value) -> Value:
    _together(32)
    bits = (condition.numbers & _machine.mask).reshape(-1, 32) @ (1 << np.arange(32, dtype=np.int64))
    return Value(np.repeat(bits.astype(np.uint32).view(np.int32), 32))


def warp_maximum(x: Value) -> Value:
    _together(32)
    return Value(np.repeat(x.numbers.reshape(-1, 32).max(1), 32))


def load_peer(address: Pointer, offset: int = 0) -> Value:
    return address.past(as_value(offset))[0]


def _pointers(address: Value) -> Iterator[tuple[Value, Pointer]]:
    """Where an address of shared memory lies in an array, and there."""
    for i, array in enumerate(_machine.arrays):
        own = address.numbers.astype(np.int64) - ((1 + i) << 24)
        yield Value(address.numbers >> 24 == 1 + i), Pointer(array, own + _machine.block * array.per_block * 4)


def increment(address: Value) -> None:
    for inside, pointer in _pointers(address):
        with when(inside):
            pointer.array.increment(pointer.places())


def store_two(address: Value, word: Value, bit: int, first: Value, second: Value, offset: int) -> Value:
    marked = (word & (1 << bit)).differs(0)
    for inside, pointer in _pointers(address):
        with when(marked & inside):
            pointer[0], pointer[offset // 4] = first, second
    return select(marked, address + 4, address)


def store_peer(address: Pointer, value: Value, offset: int = 0) -> None:
    address.past(as_value(offset))[0] = value


def load_peer4(address: Pointer) -> list[Value]:
    return address.load4(0)


class _Arrival:
    """An mbarrier."""

    def __init__(self, needed: int):
        self.needed, self.arrived, self.phase, self.bytes = needed, 0, 0, 0
        self.copies: list[Callable[[], None]] = []

    def settle(self) -> None:
        """Lets what was started come to its end."""
        for copy in self.copies:
            copy()
        self.copies.clear()
        if self.arrived == self.needed and self.bytes == 0:
            self.phase, self.arrived = self.phase + 1, 0


def _arrivals(pointer: Pointer) -> Iterator[tuple[int, _Arrival]]:
    for lane in np.flatnonzero(_machine.mask):
        yield lane, _machine.arrivals[pointer.array.name, int(pointer.offset[lane])]


def init_barrier(barrier: Pointer, arrivals: int = 1) -> None:
    for lane in np.flatnonzero(_machine.mask):
        _machine.arrivals[barrier.array.name, int(barrier.offset[lane])] = _Arrival(arrivals)


def publish_barriers() -> None:
    pass


def expect_bytes(barrier: Pointer, count: Operand) -> None:
    for lane, arrival in _arrivals(barrier):
        assert arrival.arrived < arrival.needed, "a phase begins before the one before it was waited for"
        arrival.arrived, arrival.bytes = arrival.arrived + 1, arrival.bytes + int(as_value(count).numbers[lane])


def wait_phase(barrier: Pointer, parity: Value) -> None:
    for lane, arrival in _arrivals(barrier):
        if arrival.phase % 2 == parity.numbers[lane]:
            arrival.settle()
        assert arrival.phase % 2 != parity.numbers[lane], "a wait that nothing ends"


def bulk_copy(target: Pointer, source: Pointer, count: Value, barrier: Pointer) -> None:
    source_places, target_places = source.places(16), target.places(16)
    for lane, arrival in _arrivals(barrier):
        size = int(count.numbers[lane])
        assert size > 0 and size % 16 == 0
        places = target_places[lane] + np.arange(size // 4)
        taken = source.array.words[source_places[lane] :][: size // 4].copy()
        assert len(taken) == len(places), f"a copy reads outside {source.array.name}"
        target.array.touch(places, np.full(len(places), _machine.warp[lane]), "writes")
        target.array.words[places] = 1e30  # whoever reads too early will notice

        def arrive(places=places, taken=taken, arrival=arrival, size=size):
            target.array.words[places] = taken
            target.array._written_by[places] = 0
            arrival.bytes -= size

        arrival.copies.append(arrive)
