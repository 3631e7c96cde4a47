"""Selection over a mesh axis has the bits of one device: fault kinds J (ranks without rows), K (tiny chunks) and O."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import implementations
from index_cases import E4M3, Ragged, draw
from jax.sharding import AxisType, PartitionSpec

from dsa_jax import striped
from dsa_jax.indexer_xla import ROW_TILE
from dsa_jax.striped import check_one_owner, count_owners, stripe_owners, stripe_rows, striped_select_topk
from dsa_jax.topk import select_topk

TOPK = 32
over_implementations = pytest.mark.parametrize("implementation", implementations("select_topk"))


def mesh_of(ranks, kind=AxisType.Auto, names=("tp",)):
    shape = (ranks,) if len(names) == 1 else (2, ranks)
    needed = int(np.prod(shape))
    if len(jax.devices()) < needed:
        pytest.skip(f"needs {needed} devices")
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=jax.devices()[:needed])


def sharded(function, mesh, **options):
    replicated = PartitionSpec()
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=replicated, out_specs=replicated, **options))


def select_striped(case, mesh, *, check_vma=True, implementation=None, **options):
    """striped_select_topk of the case on `mesh`, over its axis tp."""

    def select(q, k, weights, starts, ends, k_scale):
        return striped_select_topk(
            q, k, weights, starts, ends, TOPK, axis_name="tp", k_scale=k_scale, implementation=implementation, **options
        )

    return sharded(select, mesh, check_vma=check_vma)(*case.args, case.k_scale)


@functools.cache
def packed(rows=43):
    """Rows of four packed requests with ties: the last `rows` // 4 or so positions of each."""
    lens, counts = [90, 40, 33, 137], [rows - 3 * (rows // 4), *[rows // 4] * 3]
    case = draw(0, rows, sum(lens), heads=4, dtype=E4M3)
    first = np.cumsum([0, *lens[:-1]])
    ends = [f + n - c + 1 + np.arange(c) for f, n, c in zip(first, lens, counts, strict=True)]
    case.starts = jnp.asarray(np.repeat(first, counts).astype(np.int32))
    case.ends = jnp.asarray(np.concatenate(ends).astype(np.int32))
    repeat = np.random.default_rng(1).integers(0, 40, sum(lens))
    case.k, case.k_scale = case.k[repeat], case.k_scale[repeat]
    return case


@functools.cache
def expected(rows=43):
    case = packed(rows)
    return np.asarray(select_topk(*case.args, TOPK, k_scale=case.k_scale))


@pytest.mark.parametrize("fold", [False, True], ids=["cyclic", "fold"])
@pytest.mark.parametrize(("ranks", "stripe"), [(1, 512), (2, 1), (3, 7), (4, 512), (8, 3), (8, 512)], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 512, 1537, 5000])
def test_stripe_rows(rows, ranks, stripe, fold):
    """Every row has one owner, (row // stripe) % ranks or its mirror image, and the ranks' lists are equally long."""
    lists = [np.asarray(stripe_rows(rows, ranks, stripe, rank, fold=fold)) for rank in range(ranks)]
    assert len({len(own) for own in lists}) == 1
    place = np.arange(rows) // stripe
    owner = place % ranks
    if fold:
        owner = np.where(place // ranks % 2, ranks - 1 - owner, owner)
    for rank, own in enumerate(lists):
        real = own[own >= 0]
        assert (own[len(real) :] == -1).all()
        np.testing.assert_array_equal(real, np.flatnonzero(owner == rank))
    np.testing.assert_array_equal(np.repeat(stripe_owners(rows, ranks, stripe, fold=fold), stripe)[:rows], owner)


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize(
    ("ranks", "stripe", "fold", "combine", "kind", "check_vma"),
    [
        (2, 7, True, "max", AxisType.Auto, True),
        (4, 1, False, "max", AxisType.Explicit, False),
        (8, 3, False, "max", AxisType.Auto, True),
        (8, 2, True, "all_gather", AxisType.Explicit, True),
        (4, 16, False, "all_gather", AxisType.Auto, False),
    ],
    ids=str,
)
def test_tp_rows(implementation, ranks, stripe, fold, combine, kind, check_vma):
    """Four packed requests, 43 rows, unequal numbers a rank; the last case leaves one without. Every device agrees."""
    got = select_striped(
        packed(),
        mesh_of(ranks, kind),
        check_vma=check_vma,
        implementation=implementation,
        stripe=stripe,
        fold=fold,
        combine=combine,
    )
    copies = [np.asarray(shard.data) for shard in got.addressable_shards]
    assert len(copies) == ranks
    for copy in copies:
        np.testing.assert_array_equal(copy, expected())


def test_chunks_inside_a_rank():
    """Loops over rows and columns inside shard_map, where their carries must vary over the axis."""
    case, budget = draw(2, 43, 2100, heads=2), 500_000
    case.starts = jnp.arange(43, dtype=jnp.int32)
    got = select_striped(case, mesh_of(2), stripe=3, memory_budget=budget)
    np.testing.assert_array_equal(got, select_topk(*case.args, TOPK))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_two_axes(kind):
    """Each half of a 2 x 4 mesh selects for its own batch: the exchange is over tp only."""
    batches = [packed(), packed().rows(np.arange(42, -1, -1))]
    both = Ragged(*(jnp.stack([getattr(b, f) for b in batches]) for f in ("q", "k", "weights", "starts", "ends")), None)

    def select(q, k, weights, starts, ends):
        own = (x[0] for x in (q, k, weights, starts, ends))
        return striped_select_topk(*own, TOPK, axis_name="tp", stripe=4)[None]

    mesh = mesh_of(4, kind, ("dp", "tp"))
    over_dp = PartitionSpec("dp")
    args = jax.device_put(both.args, jax.NamedSharding(mesh, over_dp))
    got = jax.jit(jax.shard_map(select, mesh=mesh, in_specs=over_dp, out_specs=over_dp))(*args)
    for part, case in zip(np.asarray(got), batches, strict=True):
        np.testing.assert_array_equal(part, select_topk(*case.args, TOPK))


def test_pmap():
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    case = packed()
    select = functools.partial(striped_select_topk, axis_name="tp", topk=TOPK, stripe=4)
    mapped = jax.pmap(lambda *x: select(*x[:5], k_scale=x[5]), axis_name="tp")
    got = np.asarray(mapped(*(jnp.stack([x] * 4) for x in (*case.args, case.k_scale))))
    assert got.shape == (4, 43, TOPK)
    for copy in got:
        np.testing.assert_array_equal(copy, expected())


@pytest.mark.parametrize("rows", [7, 8])
def test_tiny_chunks(rows):
    """Fewer rows than the 8 ranks: every rank selects them all. As many or more: each takes one."""
    got = select_striped(packed(rows), mesh_of(8), stripe=1)
    np.testing.assert_array_equal(got, expected(rows))


def test_no_rows():
    case = packed().rows(slice(0, 0))
    assert select_striped(case, mesh_of(4)).shape == (0, TOPK)


COLLECTIVE = re.compile(r"= \S+ (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


@pytest.mark.parametrize(
    ("ranks", "rows", "combine", "collectives"),
    [
        (4, 43, "max", ["all-reduce"]),
        (4, 43, "all_gather", ["all-gather"]),
        (8, 7, "max", []),
        (1, 43, "max", []),
    ],
    ids=["max", "all_gather", "fewer-rows", "one-rank"],
)
def test_collectives(ranks, rows, combine, collectives):
    """One exchange, or none where the work is replicated; and no scores of more rows than a rank's own."""
    case = packed(rows)

    def select(*x):
        return striped_select_topk(*x[:5], TOPK, axis_name="tp", k_scale=x[5], stripe=4, combine=combine)

    lowered = sharded(select, mesh_of(ranks), check_vma=False).lower(*case.args, case.k_scale)
    text = lowered.compile().as_text()
    assert COLLECTIVE.findall(text) == collectives
    scored = {int(count) for count in re.findall(rf"\[(\d+),{case.k.shape[0]}\]", text)}
    own = len(stripe_rows(rows, ranks, 4, 0)) if collectives else rows
    assert scored and max(scored) <= max(own, ROW_TILE)


def owners_of(case, mesh, monkeypatch, place=striped._place):
    """How many ranks write to each row of the buffers that MAX merges, and whether the row sees keys."""

    def counts(buffer, axis):
        return jnp.broadcast_to(count_owners(buffer, axis_name=axis)[:, None], buffer.shape)

    monkeypatch.setattr(striped, "_place", place)
    monkeypatch.setattr(striped.lax, "pmax", counts)
    got = np.asarray(select_striped(case, mesh, stripe=7))[:, 0]
    monkeypatch.undo()
    return got, np.asarray(case.ends > case.starts)


def test_one_owner(monkeypatch):
    """The third row sees nothing, and nobody writes to it."""
    case = packed()
    case = Ragged(case.q, case.k, case.weights, case.starts, case.ends.at[2].set(0), case.k_scale)
    counts, sees = owners_of(case, mesh_of(4), monkeypatch)
    check_one_owner(counts, sees)
    assert not sees[2]


def two_owners(chosen, owners, rank, num_rows, stripe):
    """Rank 1 also writes its rows in rank 0's places: MAX mixes the two without a sign of it."""
    return _place(chosen, np.where(owners == 0, 1, owners), jnp.maximum(rank, 1), num_rows, stripe)


def poisoned(chosen, owners, rank, num_rows, stripe):
    """A buffer that was not set to -1 first."""
    placed = _place(chosen, owners, rank, num_rows, stripe)
    return jnp.where(placed == -1, np.iinfo(np.int32).max, placed)


_place = striped._place


@pytest.mark.parametrize("fault", [two_owners, poisoned], ids=lambda fault: fault.__name__)
def test_faults_of_owners_are_caught(fault, monkeypatch):
    counts, sees = owners_of(packed(), mesh_of(2), monkeypatch, fault)
    with pytest.raises(ValueError, match=r"must be 1 for rows that see keys, 0 for others, got \{0: 2, 1: 2"):
        check_one_owner(counts, sees)


@pytest.mark.parametrize("columns", [1, 65535, 65536, 65537, 1 << 20])
def test_packed_columns_come_back(columns):
    """Two bytes an index: rows that end in a run of 65536 columns, skip runs, fill one, or hold nothing."""
    rng = np.random.default_rng(columns)
    rows = np.full((40, TOPK), -1, np.int32)
    for row, count in zip(rows, rng.integers(0, min(TOPK, columns) + 1, len(rows)), strict=True):
        row[:count] = np.sort(rng.choice(columns, count, replace=False))
    rows[:2], rows[0, 0], rows[1, 0] = -1, 0, columns - 1
    packed_rows = striped._pack(jnp.asarray(rows), columns)
    counts = 0 if columns < 65536 else -(-columns // 65536)
    assert packed_rows.dtype == jnp.uint16 and packed_rows.shape == (40, TOPK + counts)
    np.testing.assert_array_equal(striped._unpack(packed_rows, TOPK), rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(axis_name="ep"), "axis_name must be an axis of the shard_map or pmap around the call, got 'ep'"),
        (dict(combine="sum"), "combine must be 'max' or 'all_gather', got 'sum'"),
        (dict(stripe=0), "stripe must be at least 1, got 0"),
        (dict(min_rows=-1), "min_rows must be at least 0, got -1"),
        (dict(topk=0), "topk must be in 1..4096, got 0"),
        (dict(memory_budget=1), "memory_budget must be at least"),
        (dict(implementation="best"), "implementation must be"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_input(as_user, options, message):
    """No option is ignored."""
    case = packed()
    options = dict(axis_name="tp", topk=TOPK) | options
    with pytest.raises(ValueError, match=message):
        sharded(lambda *x: striped_select_topk(*x, **options), mesh_of(2))(*case.args)


def test_bad_stripes():
    for arguments, message in (((-1, 2, 3, 0), "num_rows"), ((5, 0, 3, 0), "num_ranks"), ((5, 2, 0, 0), "stripe")):
        with pytest.raises(ValueError, match=message):
            stripe_rows(*arguments)
