"""Which shapes a benchmark runs: a model's at some lengths, those that peers were measured on, or the caller's own."""

import dataclasses
import math
import typing
from typing import Any

from bench.case import Case, length
from bench.ops import CASES
from bench.ops.attention import DenseMla, PagedSparseMla, SparseMla
from bench.ops.experts import GroupedMatmul
from bench.ops.scores import IndexerLogits, PagedIndexerLogits, SelectTopk
from bench.ops.topk import Topk
from dsa_jax import DsaConfig

_K = 1024

# What peers publish, or were measured on, on an H200.
ANCHORS: dict[str, tuple[Case, ...]] = {
    "topk": (
        Topk(rows=1, columns=64 * _K),
        Topk(rows=64, columns=8 * _K),
        Topk(rows=64, columns=64 * _K),
        Topk(rows=64, columns=128 * _K),
        Topk(rows=1024, columns=16 * _K),
        Topk(rows=1024, columns=64 * _K),
        Topk(rows=1024, columns=128 * _K),
        Topk(rows=4096, columns=16 * _K),
        Topk(rows=4096, columns=16 * _K, scores="relu"),
        Topk(rows=4096, columns=64 * _K),
        Topk(rows=4096, columns=64 * _K, scores="relu"),
    ),
    "indexer_logits": (
        IndexerLogits(heads=32, rows=4 * _K, columns=16 * _K, mask="none"),
        IndexerLogits(heads=32, rows=8 * _K, columns=8 * _K),
        IndexerLogits(heads=32, rows=32 * _K, columns=32 * _K),
        IndexerLogits(heads=32, rows=4 * _K, columns=64 * _K),
        IndexerLogits(heads=32, rows=4 * _K, columns=128 * _K),
        IndexerLogits(heads=64, rows=4 * _K, columns=16 * _K, mask="none"),
        IndexerLogits(heads=64, rows=8 * _K, columns=8 * _K),
        IndexerLogits(heads=64, rows=32 * _K, columns=32 * _K),
        IndexerLogits(heads=64, rows=4 * _K, columns=128 * _K),
    ),
    "paged_indexer_logits": (
        PagedIndexerLogits(heads=32, batch=1, length=4 * _K),
        PagedIndexerLogits(heads=32, batch=1, length=64 * _K),
        PagedIndexerLogits(heads=32, batch=8, length=64 * _K),
        PagedIndexerLogits(heads=32, batch=64, length=64 * _K),
        PagedIndexerLogits(heads=64, batch=64, length=64 * _K),
        PagedIndexerLogits(heads=64, batch=64, length=64 * _K, next_n=2),
        PagedIndexerLogits(heads=32, batch=128, length=8 * _K),
        PagedIndexerLogits(heads=32, batch=128, length=64 * _K, mixed=True),
        PagedIndexerLogits(heads=32, batch=16, length=64 * _K, next_n=6),
    ),
    "select_topk": tuple(
        SelectTopk(heads=heads, rows=n * _K, columns=n * _K) for heads in (64, 32) for n in (4, 8, 16, 32, 64)
    )
    + tuple(SelectTopk(heads=32, rows=n * _K, columns=n * _K, keys="bf16") for n in (8, 32)),
    "sparse_mla": (
        *(SparseMla(heads=64, keys=keys * _K) for keys in (8, 32, 128)),
        *(SparseMla(heads=128, keys=keys * _K) for keys in (8, 128)),
        *(SparseMla(heads=heads, keys=32 * _K) for heads in (8, 16)),
        *(SparseMla(heads=heads, keys=32 * _K, cache="e4m3") for heads in (8, 16, 32, 64, 128)),
    ),
    "paged_sparse_mla": (
        *(PagedSparseMla(heads=64, batch=batch) for batch in (1, 16, 64, 128)),
        PagedSparseMla(heads=64, batch=128, next_n=2),
        PagedSparseMla(heads=128, batch=128, next_n=2),
        *(PagedSparseMla(heads=heads, batch=128) for heads in (8, 16, 32)),
        *(PagedSparseMla(heads=heads, batch=128, cache="bf16") for heads in (16, 64)),
    ),
    "dense_mla": tuple(
        DenseMla(heads=heads, rows=rows * _K, qk_dim=qk_dim, v_dim=v_dim)
        for heads, qk_dim, v_dim in ((64, 256, 256), (128, 192, 128))
        for rows in (1, 2, 8)
    ),
    "grouped_matmul": tuple(
        GroupedMatmul(rows=8 * tokens, inner=inner, outer=outer)
        for tokens in (1, 32, _K, 8 * _K)
        for inner, outer in ((6144, 4096), (2048, 6144))
    ),
}

# For a CPU: they run in seconds and show that everything works, not how fast.
TINY: dict[str, tuple[Case, ...]] = {
    "topk": (Topk(rows=7, columns=300, k=16), Topk(rows=7, columns=300, k=16, scores="relu")),
    "indexer_logits": (IndexerLogits(heads=4, rows=33, columns=200, dim=32),),
    "paged_indexer_logits": (PagedIndexerLogits(heads=4, batch=2, length=200, next_n=2, dim=32, mixed=True),),
    "select_topk": tuple(SelectTopk(heads=4, rows=33, columns=200, dim=32, topk=16, keys=x) for x in ("e4m3", "bf16")),
    "sparse_mla": (SparseMla(heads=4, rows=9, keys=256, topk=16, latent=128, rope=16),),
    "paged_sparse_mla": (PagedSparseMla(heads=4, batch=2, length=256, topk=16, latent=128, rope=16),),
    "dense_mla": (DenseMla(heads=4, rows=40, qk_dim=24, v_dim=16),),
    "grouped_matmul": (GroupedMatmul(rows=40, inner=32, outer=48, experts=5),),
}


def cases(program: str, *, shapes: str, preset: str, seqs: list[int], custom: list[str]) -> tuple[Case, ...]:
    """The cases of one program.

    shapes: "model", "anchors" or "tiny"; custom: "rows=64,columns=8k,..." texts, which take their place.
    Raises ValueError for names and values that are none of a case's.
    """
    if custom:
        return tuple(_parse(CASES[program], text) for text in custom)
    if shapes == "anchors":
        return ANCHORS[program]
    if shapes == "tiny":
        return TINY[program]
    config = getattr(DsaConfig, preset)()
    return tuple(dict.fromkeys(case for seq in seqs for case in CASES[program].of_model(config, seq)))


def _parse(kind: type[Any], text: str) -> Case:
    types = typing.get_type_hints(kind)
    legal = {field.name: types[field.name] for field in dataclasses.fields(kind)}
    given: dict[str, Any] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        if name not in legal:
            raise ValueError(f"--shape's names must be among {', '.join(legal)}, got {name!r}")
        given[name] = _value(name, legal[name], value)
    missing = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING and f.name not in given]
    if missing:
        raise ValueError(f"--shape must name {', '.join(missing)} too, got {text!r}")
    return kind(**given)


def _value(name: str, kind: Any, text: str) -> Any:
    choices = (False, True) if kind is bool else typing.get_args(kind)
    if not choices:
        return length(text)
    by_name = {str(choice).lower(): choice for choice in choices}
    if text.lower() not in by_name:
        raise ValueError(f"--shape's {name} must be one of {', '.join(by_name)}, got {text!r}")
    return by_name[text.lower()]


def geometric_mean(ratios: list[float]) -> float:
    """Of positive ratios; 1 for none."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0
