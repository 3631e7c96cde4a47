"""The cost model counts what the split does, and agrees with the times that were measured."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from dsa_jax import stripe_cost
from dsa_jax.stripe_cost import H200, Indexer, best_stripe, causal, predict
from dsa_jax.striped import stripe_rows

RESULTS = Path(__file__).parent.parent / "bench" / "results"
INDEXER = Indexer()


@pytest.mark.parametrize("fold", [False, True], ids=["cyclic", "fold"])
@pytest.mark.parametrize(("rows", "ranks", "stripe"), [(1000, 4, 7), (1000, 3, 512), (8, 8, 1), (64, 1, 16)], ids=str)
def test_counts_are_the_splits(rows, ranks, stripe, fold):
    visible = np.random.default_rng(0).integers(0, 3000, rows)
    got = predict(visible, 3000, ranks, stripe=stripe, fold=fold)
    for rank in range(ranks):
        own = np.asarray(stripe_rows(rows, ranks, stripe, rank, fold=fold))
        own = own[own >= 0]
        assert got.rows[rank] == len(own) and got.pairs[rank] == visible[own].sum()
    assert got.replicated > 0 and (ranks > 1 or got.exchange == 0)


def test_fewer_rows_than_ranks_are_every_ranks():
    got = predict(causal(5, 3000), 3000, 8, stripe=1)
    assert got.rows.tolist() == [5] * 8 and got.pairs.tolist() == [causal(5, 3000).sum()] * 8
    assert got.exchanged == got.exchange == 0 and got.speed_up == got.imbalance == 1


@pytest.mark.parametrize(("rows", "columns", "ranks"), [(51200, 51200, 8), (8192, 131072, 2)], ids=str)
def test_bytes_of_a_ring(rows, columns, ranks):
    """Each rank sends all but its share of the result, twice for an all-reduce: its parts are added up, then spread."""
    share = (ranks - 1) / ranks
    counts = 2 if columns > 65535 else 0  # of the 131072
    for combine, each, passes in (("max", 4 * 2048, 2), ("all_gather", 2 * (2048 + counts), 1)):
        sent = stripe_cost.exchanged_bytes(rows, columns, ranks, combine, 2048)
        assert sent == pytest.approx(share * rows * each * passes, abs=1)


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("rows", [2048, 8192, 51200, 51201, 131072, 1 << 20])
def test_best_stripe_is_even(rows, ranks):
    """Within 5 % for a causal prompt; cyclic stripes of 512 rows leave ranks idle or a tenth ahead."""
    stripe = best_stripe(rows, ranks)
    assert 1 <= stripe <= stripe_cost.LONGEST_STRIPE
    assert predict(causal(rows, rows), rows, ranks, stripe=stripe, fold=True).imbalance < 1.05
    contiguous = predict(causal(rows, rows), rows, ranks, stripe=-(-rows // ranks))
    assert contiguous.imbalance == pytest.approx(2 - 1 / ranks, rel=0.02)


@pytest.mark.parametrize("combine", ["max", "all_gather"])
@pytest.mark.parametrize("columns", [8192, 32768, 51200])
def test_pays_where_the_prediction_is_a_speed_up(combine, columns):
    """Also where more rows pay less again, the early ones of a prompt."""
    indexer, seen = Indexer(heads=16), set()
    for rows in (1, 7, 8, 300, 1000, 3000, 8000, columns):
        stripe = best_stripe(rows, 8)
        options = dict(combine=combine, indexer=indexer)
        want = predict(causal(rows, columns), columns, 8, stripe=stripe, fold=True, **options)
        if abs(want.speed_up - 1) > 0.02 and rows >= 8:
            assert stripe_cost.pays(rows, columns, 8, **options) == (want.speed_up > 1), rows
            slower = dataclasses.replace(indexer, keys="bf16")  # which pay from fewer rows on
            assert stripe_cost.pays(rows, columns, 8, combine=combine, indexer=slower) or want.speed_up < 1, rows
            seen.add(want.speed_up > 1)
    assert False in seen and (True in seen) == (columns > 8192)
    assert not stripe_cost.pays(7, columns, 8, **options)
    slow = dataclasses.replace(H200, link=1e9)
    assert not any(stripe_cost.pays(rows, columns, 8, combine=combine, rates=slow) for rows in (300, 3000))


def test_rates_agree_with_measured_selections():
    found = json.loads((RESULTS / "select_topk.json").read_text())
    rows = [row for row in found["rows"] if row["implementation"] == "hopper" and row["shape"]["mask"] == "causal"]
    assert found["device"] == "NVIDIA H200" and len(rows) >= 2
    for row in rows:
        shape = row["shape"]
        indexer = Indexer(shape["heads"], shape["dim"], shape["topk"], shape.get("keys", "e4m3"))
        pairs = int(causal(shape["rows"], shape["columns"]).sum())
        got = stripe_cost.selection_seconds(shape["rows"], pairs, indexer, H200)
        assert 1e6 * got == pytest.approx(row["us"], rel=0.1), row["case"]


def test_fit_finds_the_rates():
    rng = np.random.default_rng(0)
    cases = [
        dict(rows=int(rows), pairs=int(rows * seen))
        for rows, columns in rng.integers(100, 50000, (12, 2))
        for seen in [rng.integers(1, columns)]
    ]
    for case in cases:
        case["seconds"] = stripe_cost.selection_seconds(case["rows"], case["pairs"], INDEXER, H200)
    start = dataclasses.replace(H200, flops={**H200.flops, "e4m3": H200.flops["e4m3"] / 3}, top_k=H200.top_k / 3)
    got, want = (dataclasses.asdict(rates) for rates in (stripe_cost.fit_rates(cases, INDEXER, start), H200))
    assert got.pop("flops") == pytest.approx(want.pop("flops"), rel=1e-3)
    assert got == pytest.approx(want, rel=1e-3)


def test_bad_input():
    with pytest.raises(ValueError, match=r"rows must be in 1\.\.5, the columns, got 6"):
        stripe_cost.pays(6, 5, 2)
    with pytest.raises(ValueError, match="num_ranks must be at least 2, got 1"):
        stripe_cost.pays(5, 5, 1)


def test_the_program_prints_and_draws(tmp_path, capsys):
    bench = pytest.importorskip("bench.__main__")
    picture = tmp_path / "stripes.png"
    assert bench.main(["stripes", "--lengths", "8192", "--ranks", "2", "8", "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    for ranks, fold, stripe in ((2, False, 4096), (8, True, best_stripe(8192, 8))):  # one run a rank; folded
        want = predict(causal(8192, 8192), 8192, ranks, stripe=stripe, fold=fold, combine="all_gather")
        assert f"{want.imbalance:.2f}  {want.speed_up:5.2f}x" in printed
    assert picture.stat().st_size > 10_000
    assert bench.main(["stripes", "--ranks", "0"]) == 2
