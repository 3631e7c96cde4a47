"""The model, the engine's shapes and the prompts of serving tests: one shape is one set of compiled programs."""

import dataclasses
import functools
from typing import Any

import numpy as np
from flax import nnx

from dsa_jax.config import DsaConfig
from dsa_jax.engine import Engine
from dsa_jax.model import CausalLM
from dsa_jax.requests import Output

NEW = 6
LENS = (5, 61, 130, 13)  # index_topk is 12
SHAPES: dict[str, Any] = dict(
    max_requests=3, max_len=256, page_size=16, num_pages=24, cache_dtype="float32", prefill_chunk=64
)


@functools.cache
def small() -> CausalLM:
    """One layer with an indexer and experts, and the multi-token prediction layer: what tests take is compilation."""
    config = dataclasses.replace(DsaConfig.tiny(num_hidden_layers=1, index_topk=12), mlp_layer_types=("sparse",))
    return CausalLM(config, rngs=nnx.Rngs(0))


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(1000 * seed + length).integers(0, 256, length).astype(np.int32)


PROMPTS = [prompt(length) for length in LENS]


def new_engine(model: CausalLM | None = None, **options: Any) -> Engine:
    return Engine(model or small(), **(SHAPES | options))


def serve(engine: Engine, prompts: Any, **options: Any) -> list[Output]:
    """All prompts at once."""
    ids = [engine.add(prompt, **(dict(max_new_tokens=NEW) | options)) for prompt in prompts]
    engine.run()
    return [engine.take(id) for id in ids]


def texts(outputs: list[Output]) -> list[list[int]]:
    return [output.tokens.tolist() for output in outputs]


@functools.cache
def solo(length: int, seed: int = 0, new: int = NEW) -> list[int]:
    """What a prompt gives alone, in an engine of its own."""
    return texts(serve(new_engine(), [prompt(length, seed)], max_new_tokens=new))[0]
