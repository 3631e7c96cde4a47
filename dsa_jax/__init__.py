"""DeepSeek Sparse Attention for JAX: indexer logits, exact top-k, sparse latent attention, and models built on them."""

from dsa_jax.cache import IndexCache, LatentCache, gather_index_keys, to_slots, write_index_keys, write_latents
from dsa_jax.checkpoint import load_model
from dsa_jax.config import DsaConfig
from dsa_jax.dispatch import explain
from dsa_jax.engine import Engine
from dsa_jax.generate import generate
from dsa_jax.indexer import indexer_logits, paged_indexer_logits
from dsa_jax.mla import dense_mla, merge_attention, paged_sparse_mla, sparse_mla
from dsa_jax.model import CausalLM
from dsa_jax.plan import index_share_plan, plan_prefill
from dsa_jax.sampling import Sampling
from dsa_jax.striped import stripe_rows, striped_select_topk
from dsa_jax.topk import paged_select_topk, select_topk, topk_indices

__all__ = [
    "CausalLM",
    "DsaConfig",
    "Engine",
    "IndexCache",
    "LatentCache",
    "Sampling",
    "dense_mla",
    "explain",
    "gather_index_keys",
    "generate",
    "index_share_plan",
    "indexer_logits",
    "load_model",
    "merge_attention",
    "paged_indexer_logits",
    "paged_select_topk",
    "paged_sparse_mla",
    "plan_prefill",
    "select_topk",
    "sparse_mla",
    "stripe_rows",
    "striped_select_topk",
    "to_slots",
    "topk_indices",
    "write_index_keys",
    "write_latents",
]
