"""The schedule that a block of the Hopper index scores makes for itself, its 128 threads run by numpy: every tile is
visited or filled by one block, in equal shares, and no shared word is read before it was written.
"""

import types
from collections.abc import Callable

import numpy as np
import pytest

from pallas_kernels.indexer_logits import own_share, schedule

KEYS = 64
THREADS = 128


def i32(x):
    return (np.asarray(x, np.int64) + 2**31) % 2**32 - 2**31


def u32(x):
    return np.asarray(x, np.int64) % 2**32


class SharedWords:
    def __init__(self, count: int):
        self.values, self.is_written = np.zeros(count, np.int64), np.zeros(count, bool)


def every_thread(x) -> np.ndarray:
    return np.broadcast_to(np.asarray(x), (THREADS,))


def load_shared(ref: SharedWords, word, condition=True) -> np.ndarray:
    word, condition = every_thread(word), every_thread(condition)
    assert ref.is_written[word[condition]].all()
    return np.where(condition, ref.values[np.where(condition, word, 0)], 0)


def store_shared(ref: SharedWords, word, value, condition) -> None:
    word, value, condition = every_thread(word), every_thread(value), every_thread(condition)
    stored = {(int(at), int(x)) for at, x in zip(word[condition], value[condition], strict=True)}
    assert len(stored) == len({at for at, _ in stored}), "two threads write different values to one word"
    for at, x in stored:
        assert 0 <= at < len(ref.values)
        ref.values[at], ref.is_written[at] = x, True


def loop(count: int, *carried) -> Callable[[Callable], tuple]:
    def run(body):
        state = carried
        for turn in range(count):
            state = body(np.int64(turn), *state) or ()
        return tuple(state) if isinstance(state, list | tuple) else (state,)

    return run


def shuffle_up(x, step: int) -> np.ndarray:
    lanes = every_thread(x).reshape(-1, 32)
    return np.concatenate([lanes[:, :step], lanes[:, :-step]], axis=1).reshape(-1)


ARITH = types.SimpleNamespace(
    CmpIPredicate=types.SimpleNamespace(ult="ult"),
    addi=lambda a, b: i32(a + b),
    subi=lambda a, b: i32(a - b),
    muli=lambda a, b: i32(a * b),
    divui=lambda a, b: i32(u32(a) // u32(b)),
    remui=lambda a, b: i32(u32(a) % u32(b)),
    shrui=lambda a, b: i32(u32(a) >> u32(b)),
    andi=lambda a, b: a & b,
    minsi=np.minimum,
    maxsi=np.maximum,
    select=np.where,
    cmpi=lambda predicate, a, b: u32(a) < u32(b),
)
PTX = types.SimpleNamespace(
    WARPGROUP=THREADS,
    thread=lambda: np.arange(THREADS, dtype=np.int64),
    i32=np.int64,
    wide=u32,
    mul=lambda x, factor: i32(x * factor),
    less=np.less,
    equal=np.equal,
    at_least=np.greater_equal,
    loop=loop,
    load_shared=load_shared,
    store_shared=store_shared,
    load_global=lambda ref, word: ref[every_thread(word)],
    shuffle_up=shuffle_up,
)


@pytest.fixture
def on_numpy(monkeypatch):
    monkeypatch.setattr(own_share, "arith", ARITH)
    monkeypatch.setattr(own_share, "ptx", PTX)
    monkeypatch.setattr(own_share, "utils", types.SimpleNamespace(warpgroup_barrier=lambda: None))
    monkeypatch.setattr(own_share, "jnp", np)
    monkeypatch.setattr(schedule, "jnp", np)


def made(sizes: own_share.Sizes, seen: tuple[np.ndarray, ...], block: int) -> own_share.OwnSchedule:
    words = [SharedWords(count) for count in sizes.words(has_lengths=len(seen) == 1)]
    shares, before, sums, *first = words
    own_share._write_visits(sizes, seen, before, *first)
    own_share._write_shares(sizes, shares, before, sums, np.int64(block))
    assert shares.is_written.all() and before.is_written.all()
    return own_share.OwnSchedule(shares.values, before.values, first[0].values if first else None, sizes)


def check(sizes: own_share.Sizes, seen: tuple[np.ndarray, ...]) -> None:
    """Against a search of every query's range."""
    visits, fills = np.zeros((2, sizes.groups, sizes.tiles), int)
    costs = []
    for block in range(sizes.blocks):
        plan = made(sizes, seen, block)
        for count, share, walk in ((visits, plan.visits(block), plan.visited), (fills, plan.fills(block), plan.unseen)):
            steps = taken = 0
            for group in range(share.first, share.stop):
                part = walk(group, share)
                taken += part.begin < part.end
                for step in range(part.begin, part.end):
                    assert step == steps
                    steps += 1
                    count[group, part.tile(step)] += 1
            assert steps == share.end - share.begin
            if count is visits:
                costs.append(steps + sizes.group_cost * taken)
    wanted = np.zeros_like(visits)
    for group in range(sizes.groups):
        request, part = divmod(group, sizes.request_groups)
        ranges = []
        for query in range(part * sizes.group, min((part + 1) * sizes.group, sizes.queries)):
            if len(seen) == 1:
                start, end = 0, int(seen[0][request]) - sizes.queries + 1 + query
            else:
                start, end = max(int(seen[0][query]), 0), int(seen[1][query])
            if start < (end := min(end, sizes.columns)):
                ranges.append((start, end))
        if ranges:
            starts, ends = zip(*ranges, strict=True)
            wanted[group, min(starts) // KEYS : -(-max(ends) // KEYS)] = 1
    np.testing.assert_array_equal(visits, wanted)
    np.testing.assert_array_equal(fills, 1 - wanted)
    assert max(costs) - min(costs) <= 2 * sizes.group_cost + 1


@pytest.mark.parametrize("requests", [1, 5, 130, 300])
@pytest.mark.parametrize(("queries", "group"), [(1, 4), (2, 2), (6, 4)], ids=str)
def test_decode(on_numpy, requests, queries, group):
    rng = np.random.default_rng(requests + queries)
    lengths = rng.integers(-50, 700, requests)
    lengths[:: 3 + requests % 2] = rng.choice([0, -5, 1, 500, 10**9, -(10**9)], len(lengths[:: 3 + requests % 2]))
    check(own_share.Sizes(requests, queries, group, KEYS, 500, 3, 5), (lengths,))


@pytest.mark.parametrize("queries", [1, 7, 260, 1500])
@pytest.mark.parametrize("kind", ["causal", "random", "nothing"])
def test_prefill(on_numpy, queries, kind):
    rng = np.random.default_rng(queries)
    starts, ends = np.zeros(queries, np.int64), np.arange(queries) + 500 - queries + 1
    if kind == "random":
        starts, ends = rng.integers(-20, 520, queries), rng.integers(-20, 550, queries)
    if kind == "nothing":
        ends = starts - 1
    check(own_share.Sizes(1, queries, 4, KEYS, 500, 5, 5), (starts, ends))


def test_most_groups(on_numpy):
    rng = np.random.default_rng(0)
    check(own_share.Sizes(own_share.MAX_GROUPS, 1, 1, KEYS, 100, 2, 5), (rng.integers(0, 120, own_share.MAX_GROUPS),))
