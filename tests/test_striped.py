"""Selection over a mesh axis has the bits of one device: fault kinds J (ranks without rows), K (tiny chunks) and O."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import implementations
from index_cases import E4M3, Ragged, draw
from jax.sharding import AxisType, PartitionSpec

from dsa_jax import striped
from dsa_jax.striped import check_one_owner, count_owners, stripe_rows, striped_select_topk
from dsa_jax.topk import select_topk

TOPK = 32
WORKER = Path(__file__).parent / "striped_worker.py"
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


@pytest.mark.parametrize(("ranks", "stripe"), [(1, 512), (2, 1), (3, 7), (4, 512), (8, 3), (8, 512)], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 512, 1537, 5000])
def test_stripe_rows(rows, ranks, stripe):
    """Every row has one owner, (row // stripe) % ranks, and every rank a list of the same length."""
    lists = [np.asarray(stripe_rows(rows, ranks, stripe, rank)) for rank in range(ranks)]
    assert len({len(own) for own in lists}) == 1
    for rank, own in enumerate(lists):
        real = own[own >= 0]
        assert (np.diff(real) > 0).all() and (own[len(real) :] == -1).all()
        np.testing.assert_array_equal(real, [row for row in range(rows) if row // stripe % ranks == rank])


@pytest.mark.gpu
@over_implementations
@pytest.mark.parametrize(
    ("ranks", "stripe", "combine", "kind"),
    [
        (2, 7, "max", AxisType.Auto),
        (4, 1, "max", AxisType.Explicit),
        (8, 3, "max", AxisType.Auto),
        (8, 2, "all_gather", AxisType.Explicit),
        (4, 16, "all_gather", AxisType.Auto),
    ],
    ids=str,
)
def test_tp_rows(implementation, ranks, stripe, combine, kind):
    """Four packed requests, 43 rows, unequal numbers a rank; the last case leaves one without. Every device agrees."""
    check_vma = implementation == "xla" and combine == "max"
    got = select_striped(
        packed(),
        mesh_of(ranks, kind),
        check_vma=check_vma,
        implementation=implementation,
        stripe=stripe,
        combine=combine,
    )
    copies = [np.asarray(shard.data) for shard in got.addressable_shards]
    assert len(copies) == ranks
    for copy in copies:
        np.testing.assert_array_equal(copy, expected())


def test_unchecked_varying_axes():
    got = select_striped(packed(), mesh_of(2), stripe=7, check_vma=False)
    np.testing.assert_array_equal(got, expected())


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
    """One exchange, or none where the work is replicated."""
    case = packed(rows)

    def select(*x):
        return striped_select_topk(*x[:5], TOPK, axis_name="tp", k_scale=x[5], stripe=4, combine=combine)

    lowered = sharded(select, mesh_of(ranks), check_vma=False).lower(*case.args, case.k_scale)
    assert COLLECTIVE.findall(lowered.compile().as_text()) == collectives


def owners(mesh, rows_of):
    """count_owners on the mesh, where rank r writes rows_of(r)."""
    count = lambda: count_owners(rows_of(jax.lax.axis_index("tp")), 43, axis_name="tp")  # noqa: E731
    return sharded(count, mesh)()


def test_one_owner():
    check_one_owner(owners(mesh_of(4), lambda rank: stripe_rows(43, 4, 3, rank)))


def test_two_owners_are_caught(monkeypatch):
    """Rank 1 also takes rank 0's rows, but sees other keys: MAX mixes the two without a sign of it."""
    mesh = mesh_of(2)
    real = stripe_rows

    def doubled(num_rows, num_ranks, stripe, rank):
        return real(num_rows, num_ranks, stripe, jnp.zeros_like(rank))

    with pytest.raises(ValueError, match=r"owners by row must be 1 for every row, got \{0: 2, 1: 2"):
        check_one_owner(owners(mesh, lambda rank: doubled(43, 2, 22, rank)))
    monkeypatch.setattr(striped, "stripe_rows", doubled)
    got = np.asarray(select_striped(packed(), mesh, stripe=22))
    assert (got[:22] == expected()[:22]).all() and (got[22:] == -1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(axis_name="ep"), "axis_name must be an axis of the shard_map or pmap around the call, got 'ep'"),
        (dict(combine="sum"), "combine must be 'max' or 'all_gather', got 'sum'"),
        (dict(stripe=0), "stripe must be at least 1, got 0"),
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


def test_two_processes():
    """Two processes of one CPU device each, joined by Gloo."""
    import socket

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "XLA_FLAGS": "",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(WORKER.parent), str(WORKER.parent.parent)]),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), f"localhost:{port}", str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(outputs)
    assert all("same bits" in output for output in outputs)
