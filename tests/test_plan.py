"""Schedules and prefill plans: fault kinds L (scoring skipped when it must not be) and N (IndexShare)."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax.config import DsaConfig
from dsa_jax.plan import Carry, IndexSharePlan, chunk_ranges, index_share_plan, plan_prefill, visible_indices

GLM_5_2 = [0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74]


def config(layers, **fields):
    return types.SimpleNamespace(num_hidden_layers=layers, **fields)


def test_plan_glm_5_2():
    """Every layer by name: another schedule of 78 layers has 21 full ones too."""
    plan = index_share_plan(config(78, index_topk_freq=4, index_skip_topk_offset=3))
    assert plan.types == tuple("full" if layer in GLM_5_2 else "shared" for layer in range(78))
    assert plan.full_layers == tuple(GLM_5_2)
    assert plan == index_share_plan(DsaConfig.glm5_2())
    assert plan != index_share_plan(config(78, index_topk_freq=4, index_skip_topk_offset=2))


def test_plan_source():
    plan = index_share_plan(DsaConfig.glm5_2())
    assert [plan.source(layer) for layer in (0, 2, 3, 5, 6, 9, 38, 39, 77)] == [0, 2, 2, 2, 6, 6, 38, 38, 74]
    with pytest.raises(ValueError, match=r"layer must be in 0\.\.77, got 78"):
        plan.source(78)


def test_plan_split():
    """A pipeline stage that starts with a shared layer needs its source's indices; with a full one, none."""
    plan = index_share_plan(DsaConfig.glm5_2())
    assert plan.split(38) is None
    assert plan.split(39) == Carry(source_layer=38, axes="[M, index_topk]", dtype="int32")
    with pytest.raises(ValueError, match=r"at must be in 0\.\.77, got -1"):
        plan.split(-1)


@pytest.mark.parametrize("constructor", ["glm5", "deepseek_v32"])
def test_plan_without_sharing(constructor):
    full = getattr(DsaConfig, constructor)()
    assert set(index_share_plan(full).types) == {"full"}


F, S = "full", "shared"


@pytest.mark.parametrize(
    ("fields", "types_"),
    [
        ({}, (F, F, F, F)),
        (dict(index_topk_freq=2), (F, F, S, F)),
        (dict(index_topk_freq=2, index_skip_topk_offset=3), (F, F, F, S)),
        (dict(index_topk_freq=0), (F, F, F, F)),
        (dict(index_topk_pattern="FSSF", index_topk_freq=2), (F, S, S, F)),
        (dict(index_topk_pattern=["F", "F", "S", "S"]), (F, F, S, S)),
        (dict(index_topk_pattern=None, index_topk_freq=2), (F, F, S, F)),
        (dict(indexer_types=[F, S, F, S], index_topk_pattern="FFFF", index_topk_freq=2), (F, S, F, S)),
        (dict(indexer_types=None, index_topk_pattern="FSFF"), (F, S, F, F)),
    ],
    ids=["default", "freq", "offset", "freq-0", "pattern", "pattern-list", "null-pattern", "types", "null-types"],
)
def test_plan_precedence(fields, types_):
    assert index_share_plan(config(4, **fields)).types == types_


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(indexer_types=[S, F, F, F]), r"types\[0\] must be 'full'"),
        (dict(index_topk_pattern="SFFF"), r"types\[0\] must be 'full'"),
        (dict(index_topk_freq=2, index_skip_topk_offset=0), r"types\[0\] must be 'full'"),
        (dict(indexer_types=[F, F, F]), "indexer_types must be num_hidden_layers = 4 long, got 3"),
        (dict(index_topk_pattern="FSSFF"), "index_topk_pattern must be num_hidden_layers = 4 long, got 5"),
        (dict(index_topk_pattern="FXSF"), r"index_topk_pattern\[1\] must be 'full', 'shared', 'F' or 'S', got 'X'"),
        (dict(indexer_types=[F, "Full", F, F]), r"indexer_types\[1\]"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_plan_bad_schedule(fields, message):
    with pytest.raises(ValueError, match=message):
        index_share_plan(config(4, **fields))


def test_plan_bad_types():
    with pytest.raises(ValueError, match="types must be at least one layer"):
        IndexSharePlan(())
    with pytest.raises(ValueError, match=r"types\[1\]"):
        IndexSharePlan(("full", "dense"))


K = 2048


@pytest.mark.parametrize(
    ("prefix", "chunk", "skips"),
    [
        ([0], [K - 1], [True]),
        ([0], [K], [True]),
        ([0], [K + 1], [False]),
        ([1], [K - 1], [True]),
        ([1], [K], [False]),
        ([3000], [10], [False]),
        ([K - 10], [10], [True]),
        ([0, 0, 0, 0], [10, 9000, 7, K], [True, False, True, True]),
        ([0, 3000], [10, 10], [True, False]),
        ([0], [0], [True]),
        ([], [], []),
    ],
    ids=str,
)
def test_skip_truth_table(prefix, chunk, skips):
    """The whole context counts, prefix and chunk, and each request for itself."""
    plan = plan_prefill(prefix, chunk, K)
    assert plan.skips == tuple(skips)
    assert plan.scores == tuple(not skip for skip in skips)
    assert plan.dense == all(skips)
    assert plan_prefill(np.array(prefix, np.int32), np.array(chunk, np.int32), K) == plan


@pytest.mark.parametrize(
    "change", [dict(dense_path=False), dict(mtp_layer=True), dict(has_decodes=True)], ids=lambda x: next(iter(x))
)
def test_skip_needs_the_dense_path_alone(change):
    assert plan_prefill([0, 5], [10, 10], K).skips == (True, True)
    assert plan_prefill([0, 5], [10, 10], K, **change).skips == (False, False)


def test_skip_needs_known_lengths():
    plans = []

    @jax.jit
    def step(prefix, chunk):
        plans.append(plan_prefill(prefix, chunk, K))
        plans.append(plan_prefill(np.zeros(2, int), chunk, K))
        return prefix

    step(jnp.zeros(2, jnp.int32), jnp.ones(2, jnp.int32))
    assert [plan.skips for plan in plans] == [(False, False)] * 2


def test_skip_does_not_wrap():
    assert plan_prefill(np.array([2**31 - 1], np.int32), np.array([2**31 - 1], np.int32), K).skips == (False,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], [1, 2], K), "chunk_lens' shape"),
        (([-1], [1], K), "prefix_lens must be at least 0"),
        (([0], [-1], K), "chunk_lens must be at least 0"),
        (([0], [1], 0), "index_topk must be at least 1, got 0"),
    ],
    ids=["shape", "prefix", "chunk", "topk"],
)
def test_prefill_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_prefill(*arguments)


def test_visible_indices():
    got = visible_indices(jnp.array([0, 3, 5, -2]), jnp.array([2, 9, 5, 1]), 3)
    np.testing.assert_array_equal(got, [[0, 1, -1], [3, 4, 5], [-1, -1, -1], [0, -1, -1]])
    assert got.dtype == jnp.int32
    with pytest.raises(ValueError, match=r"topk must be in 1\.\.4096, got 0"):
        visible_indices(jnp.array([0]), jnp.array([2]), 0)


@pytest.mark.parametrize(("length", "chunk"), [(0, 5), (1, 5), (5, 5), (6, 5), (24000, 1024)], ids=str)
def test_chunk_ranges(length, chunk):
    ranges = chunk_ranges(length, chunk)
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(length))
    assert len({stop - start for start, stop in ranges}) <= 2
    assert all(stop - start == chunk for start, stop in ranges[:-1])


def test_chunk_ranges_bad_input():
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        chunk_ranges(5, 0)
    with pytest.raises(ValueError, match="prompt_len must be at least 0, got -1"):
        chunk_ranges(-1, 5)
