"""Cache pages: reference counts, reuse of full pages by their text, eviction, budgets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dsa_jax.cache import IndexCache, LatentCache
from dsa_jax.config import DsaConfig
from dsa_jax.context import LayerCache
from dsa_jax.pages import OutOfPages, PagePool, bytes_per_token, pages_within, parse_bytes


def filled(pool, tokens, written=None):
    """A lease with room for `tokens`, which are all in the caches."""
    lease = pool.lease(tokens)
    lease.grow(len(tokens))
    lease.publish(tokens, len(tokens) if written is None else written)
    return lease


def test_growth_is_all_or_nothing_and_moves_no_page():
    pool = PagePool(5, 4)
    lease = pool.lease()
    lease.grow(9)
    before = list(lease.pages)
    with pytest.raises(OutOfPages, match="3 pages are needed and 2 of 5 are free"):
        lease.grow(21)
    assert (lease.pages, pool.num_free) == (before, 2)
    lease.grow(20)
    assert lease.pages[:3] == before and sorted(lease.pages) == list(range(5)) and lease.capacity == 20
    lease.release()
    assert pool.num_free == 5 and lease.pages == []


def test_full_pages_are_shared_and_the_page_being_written_is_not():
    pool = PagePool(8, 4)
    first = filled(pool, [*range(10)])
    second = pool.lease([*range(10), 99])
    assert second.pages == first.pages[:2]
    second.grow(11)
    assert set(second.pages[2:]).isdisjoint(first.pages)
    first.release()
    assert pool.num_free == 5  # the shared two are still held
    second.release()
    assert pool.num_free == 8 and pool.num_known == 2


def test_a_text_that_is_all_known_keeps_one_token_to_compute():
    pool = PagePool(8, 4)
    filled(pool, [*range(8)])
    assert len(pool.lease([*range(8)]).pages) == 1
    assert len(pool.lease([*range(9)]).pages) == 2
    assert len(pool.lease([*range(3)]).pages) == 0
    assert len(pool.lease([]).pages) == 0


def test_a_page_is_known_by_the_whole_text_before_it():
    pool = PagePool(8, 2)
    filled(pool, [1, 2, 3, 4])
    assert pool.lease([9, 9, 3, 4, 5]).pages == []
    assert pool.lease([1, 2, 9, 9, 3, 4, 5]).pages == filled(pool, [1, 2, 8]).pages[:1]


def test_lookahead_makes_the_next_token_part_of_a_page():
    """Row t of a multi-token prediction layer's cache is made from token t + 1."""
    pool = PagePool(8, 2, lookahead=1)
    lease = filled(pool, [1, 2, 3, 4, 5])
    assert len(lease.keys) == 2
    assert len(filled(pool, [7, 7, 7, 7]).keys) == 1  # the token after its second page is not there yet
    assert len(pool.lease([1, 2, 3, 4, 5, 6]).pages) == 2
    assert len(pool.lease([1, 2, 3, 4, 6, 6]).pages) == 1


def test_written_is_what_counts():
    pool = PagePool(8, 2)
    lease = filled(pool, [*range(8)], written=5)
    assert len(lease.keys) == 2
    lease.publish([*range(8)], 6)
    assert len(lease.keys) == 3 and len(pool.lease([*range(9)]).pages) == 3


def test_same_text_written_twice_is_known_once():
    pool = PagePool(8, 2)
    first, second = pool.lease(), pool.lease()
    for lease in (first, second):
        lease.grow(4)
    for lease in (first, second):
        lease.publish([1, 2, 3, 4], 4)
    assert pool.num_known == 2
    second.release()
    assert pool.num_free == 6
    assert pool.lease([1, 2, 3, 4, 5]).pages == first.pages


def test_the_least_recently_used_text_is_overwritten_first_and_from_its_end():
    pool = PagePool(6, 2)
    old, new = filled(pool, [1, 1, 1, 1, 1, 1]), filled(pool, [2, 2, 2, 2, 2, 2])
    old.release()
    new.release()
    taken = pool.lease()
    taken.grow(4)
    assert len(pool.lease([1] * 7).pages) == 1
    assert len(pool.lease([2] * 7).pages) == 3
    with pytest.raises(OutOfPages):
        taken.grow(8)


def test_forgotten_pages_are_blank():
    pool = PagePool(4, 2)
    held = filled(pool, [1, 2, 3])
    filled(pool, [5, 6, 7]).release()
    pool.forget()
    assert (pool.num_known, pool.num_free) == (0, 2)
    assert pool.lease([1, 2, 3]).pages == pool.lease([5, 6, 7]).pages == []
    held.release()
    assert pool.num_free == 4


class PoolMachine(RuleBasedStateMachine):
    """Random requests over a small alphabet, against a model that remembers the text in every page."""

    @initialize(pages=st.integers(1, 12), size=st.integers(1, 3), lookahead=st.integers(0, 1))
    def start(self, pages, size, lookahead):
        self.pool = PagePool(pages, size, lookahead=lookahead)
        self.live = []  # [lease, tokens, written]
        self.content = {}  # page: the text that was written through it, with its lookahead

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def add(self, tokens):
        lease = self.pool.lease(tokens)
        assert lease.capacity < len(tokens)
        for i, page in enumerate(lease.pages):
            end = (i + 1) * self.pool.page_size + self.pool.lookahead
            assert self.content[page] == tuple(tokens[:end])
        self.live.append([lease, tokens, lease.capacity])

    @rule(which=st.integers(0, 100), more=st.lists(st.integers(0, 1), max_size=6), step=st.integers(1, 9))
    def write(self, which, more, step):
        if not self.live:
            return
        entry = self.live[which % len(self.live)]
        lease, tokens, written = entry
        entry[1] = tokens = tokens + more
        before = list(lease.pages)
        try:
            lease.grow(min(written + step, len(tokens)))
        except OutOfPages:
            assert lease.pages == before
            return
        entry[2] = min(written + step, len(tokens), lease.capacity)
        for i in range(written // self.pool.page_size, -(-entry[2] // self.pool.page_size)):
            assert self.pool._holders[lease.pages[i]] == 1  # never shared while it is written
            self.content[lease.pages[i]] = None
        lease.publish(tokens, entry[2])
        for i in range(len(lease.keys)):
            if self.content[lease.pages[i]] is None:
                self.content[lease.pages[i]] = tuple(tokens[: (i + 1) * self.pool.page_size + self.pool.lookahead])

    @rule(which=st.integers(0, 100))
    def release(self, which):
        if self.live:
            self.live.pop(which % len(self.live))[0].release()

    @invariant()
    def every_page_is_counted(self):
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        held = [page for lease, *_ in self.live for page in lease.pages]
        assert [held.count(page) for page in range(pool.num_pages)] == pool._holders
        assert pool.num_free == pool.num_pages - len(set(held))
        assert sorted([*pool._blank, *pool._idle, *set(held)]) == list(range(pool.num_pages))
        assert set(pool._idle) == set(pool._key_of) - set(held)
        assert {page: key for key, page in pool._page_of.items()} == pool._key_of

    @rule()
    def forget(self):
        self.pool.forget()

    def teardown(self):
        for lease, *_ in getattr(self, "live", []):
            lease.release()
        if hasattr(self, "pool"):
            assert self.pool.num_free == self.pool.num_pages


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


@pytest.mark.parametrize(
    ("config", "dtype", "count"),
    [
        (DsaConfig.glm5_2(), "bfloat16", 95_232),
        (DsaConfig.glm5(), "bfloat16", 109_824),
        (DsaConfig.glm5_2(), "float8_e4m3fn", 78 * 656 + 21 * 132),
        (DsaConfig.deepseek_v32(), "float8_e4m3fn", 61 * (656 + 132)),
    ],
    ids=["glm5_2", "glm5", "glm5_2-fp8", "deepseek_v32-fp8"],
)
def test_bytes_a_token(config, dtype, count):
    """Shared layers hold no index keys; the caches' own arrays agree with the config's arithmetic."""

    def layer(kind):
        latent = LatentCache.zeros(1, 64, config.kv_lora_rank, config.qk_rope_head_dim, dtype=jnp.dtype(dtype))
        full = kind == "full"
        return LayerCache(latent, IndexCache.zeros(1, 64, config.index_head_dim, dtype=dtype) if full else None)

    caches = jax.eval_shape(lambda: tuple(map(layer, config.indexer_types)))
    assert bytes_per_token(caches) == config.cache_bytes_per_token(dtype) == count
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches)) == 64 * count


def test_budget():
    assert pages_within(95_232 * 64 * 3 + 1, 64, 95_232) == 3
    assert parse_bytes("80GiB") == 80 * 2**30 and parse_bytes("1.5 MB") == 1_500_000 and parse_bytes("4096") == 4096
    assert pages_within(parse_bytes("80GiB"), 64, 95_232) == 14_093


@pytest.mark.parametrize("text", ["", "GiB", "1 GiBB", "-1", "nan", "inf", "1e3x", "0", "0.5B", "1Gi"])
def test_bad_bytes(text, as_user):
    with pytest.raises(ValueError, match="the number of bytes must be"):
        parse_bytes(text)


def test_bad_pool(as_user):
    with pytest.raises(ValueError, match="num_pages must be at least 1, got 0"):
        PagePool(0, 4)
    with pytest.raises(ValueError, match="page_size must be at least 1, got -1"):
        PagePool(4, -1)
    with pytest.raises(ValueError, match="cache_bytes must be at least 640, the bytes of one page, got 639"):
        pages_within(639, 64, 10)


def test_keys_do_not_depend_on_the_integer_type():
    pool = PagePool(4, 2)
    lease = filled(pool, np.array([1, 2, 3], np.int64))
    assert pool.lease([1, 2, 3]).pages == lease.pages[:1]
