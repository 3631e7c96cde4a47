"""The benchmarks of every op, by the public function's name, and the shapes to run them on."""

from bench.ops.attention import DenseMla, PagedSparseMla, SparseMla
from bench.ops.experts import GroupedMatmul
from bench.ops.scores import IndexerLogits, PagedIndexerLogits, SelectTopk
from bench.ops.topk import Topk

# By the name on the command line: "topk" is topk_indices.
CASES = {
    "topk": Topk,
    "indexer_logits": IndexerLogits,
    "paged_indexer_logits": PagedIndexerLogits,
    "select_topk": SelectTopk,
    "sparse_mla": SparseMla,
    "paged_sparse_mla": PagedSparseMla,
    "dense_mla": DenseMla,
    "grouped_matmul": GroupedMatmul,
}
