"""The schedule that a block of the Hopper index scores makes for itself, its 128 threads run by numpy: every tile is
visited or filled by one block, in equal shares.
"""

import dataclasses

import numpy as np
import pytest
import simt_numpy

from pallas_kernels.indexer_logits import schedule
from pallas_kernels.indexer_logits.own_share import MAX_GROUPS, Sizes

KEYS = 64


@pytest.fixture
def on_numpy(monkeypatch):
    monkeypatch.setattr(schedule, "jnp", np)


def made(sizes: Sizes, seen: tuple[np.ndarray, ...]):
    """Each block's schedule."""

    def run(own_share):
        own_share.jnp = np
        own = own_share.Sizes(**dataclasses.asdict(sizes))
        for block in range(sizes.blocks):
            simt_numpy.start()
            counts = sizes.words(has_lengths=len(seen) == 1)
            arrays = [simt_numpy.Array.shared(f"made {i}", count, np.int32) for i, count in enumerate(counts)]
            given = [simt_numpy.Array(f"seen {i}", x.astype(np.int32)).pointer() for i, x in enumerate(seen)]
            pointers = own_share.Made(*(array.pointer() for array in arrays))
            own_share.write(own, given, pointers, simt_numpy.as_value(block))
            shares, before, _, *first = (array.words for array in arrays)
            yield block, own_share.OwnSchedule(shares, before, first[0] if first else None, own)

    return simt_numpy.emulate(["pallas_kernels.indexer_logits.own_share"], lambda own_share: list(run(own_share)))


def check(sizes: Sizes, seen: tuple[np.ndarray, ...]) -> None:
    """Against a search of every query's range."""
    visits, fills = np.zeros((2, sizes.groups, sizes.tiles), int)
    costs = []
    for block, plan in made(sizes, seen):
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
    check(Sizes(requests, queries, group, KEYS, 500, 3, 5), (lengths,))


@pytest.mark.parametrize("queries", [1, 7, 260, 1500])
@pytest.mark.parametrize("kind", ["causal", "random", "nothing"])
def test_prefill(on_numpy, queries, kind):
    rng = np.random.default_rng(queries)
    starts, ends = np.zeros(queries, np.int64), np.arange(queries) + 500 - queries + 1
    if kind == "random":
        starts, ends = rng.integers(-20, 520, queries), rng.integers(-20, 550, queries)
    if kind == "nothing":
        ends = starts - 1
    check(Sizes(1, queries, 4, KEYS, 500, 5, 5), (starts, ends))


def test_most_groups(on_numpy):
    rng = np.random.default_rng(0)
    check(Sizes(MAX_GROUPS, 1, 1, KEYS, 100, 2, 5), (rng.integers(0, 120, MAX_GROUPS),))
