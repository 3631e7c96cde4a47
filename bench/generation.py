"""Tokens a second of the engine, many requests decoding at long contexts.

Weights are random, and so are the caches: latents and index keys are drawn instead of prefilled, since a step's time
does not depend on what they hold but for how many scores tie. Everything else is what a server would see: every step
goes through `Engine.step`, with its host work, sampling, and the tokens' way to the host.
"""

import argparse
import dataclasses
import functools
import math
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench import record
from bench.case import length, quick_key, short
from bench.compiling import compiled
from bench.options import add_results
from bench.report import markdown
from dsa_jax import CausalLM, DsaConfig, Engine, Sampling
from dsa_jax.batch import Batch, Caches, DecodeRows, run_step
from dsa_jax.model import new_cache
from dsa_jax.sampling import SamplingRows
from dsa_jax.skeleton import Skeleton

_PAGE, _WARM_UP = 64, 3
_DTYPES = {"bf16": "bfloat16", "e4m3": "float8_e4m3fn", "f32": "float32"}


def four_layers() -> DsaConfig:
    """GLM-5.2's widths, all 256 experts, a dense layer and three sparse ones, one indexer that all of them share."""
    return dataclasses.replace(
        DsaConfig.glm5_2(),
        num_hidden_layers=4,
        mlp_layer_types=("dense", "sparse", "sparse", "sparse"),
        indexer_types=("full", "shared", "shared", "shared"),
    )


_MODELS = {
    "tiny": lambda: dataclasses.replace(DsaConfig.tiny(), max_position_embeddings=2**20),
    "glm5_2_4l": four_layers,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    on_cpu = jax.default_backend() == "cpu"
    parser.add_argument("--models", default="tiny" if on_cpu else "tiny,glm5_2_4l", metavar="NAME,..")
    parser.add_argument("--batch", default="1,8,32", metavar="N,N", help="requests (default: 1,8,32)")
    parser.add_argument("--context", default="8k,64k", metavar="N,N", help="tokens of each (default: 8k,64k)")
    parser.add_argument("--cache", default="bf16,e4m3", metavar="KIND,..", help="default: bf16,e4m3")
    parser.add_argument("--drafts", type=int, default=0, metavar="N", help="verified and drafted anew in every step")
    parser.add_argument("--experts", type=int, metavar="N", help="routed experts, where all of them do not fit")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="that are timed (default: 20)")
    add_results(parser)


def run(args: argparse.Namespace) -> None:
    batches, contexts = ([length(text) for text in value.split(",")] for value in (args.batch, args.context))
    rows: list[dict[str, Any]] = []
    print(
        f"{'model':>12} {'cache':>6} {'requests':>8} {'context':>8} {'ms a step':>10} {'tokens/s':>9} {'cache GB':>9}"
    )
    for name in args.models.split(","):
        model = _model(_MODELS[name](), args)
        for kind in args.cache.split(","):
            longest = max(contexts)
            shapes = [dict(cache_dtype=_DTYPES[kind], **_shapes(longest, batch, args)) for batch in batches]
            _compile(model, shapes)
            for row in (row for shape in shapes for row in _measure(model, shape, contexts, args.steps)):
                rows.append({"model": name, **row})
                print(_line(rows[-1]), flush=True)
                if args.json:  # what is measured is kept, whatever comes next
                    record.write(args.json, "generation", rows, commit=args.commit, caches="random", weights="random")


def _line(row: dict[str, Any]) -> str:
    kind = next(kind for kind, dtype in _DTYPES.items() if dtype == row["cache_dtype"])
    gigabytes = row["bytes_per_token"] * row["context"] * row["requests"] / 1e9
    what = f"{row['model']:>12} {kind:>6} {row['requests']:>8} {short(row['context']):>8}"
    return f"{what} {1e3 * row['seconds_per_step']:10.2f} {row['tokens_per_second']:9.0f} {gigabytes:9.2f}"


def table(result: dict[str, Any]) -> str:
    """A row a model, cache and number of requests."""
    body = [
        [
            row["model"],
            next(kind for kind, dtype in _DTYPES.items() if dtype == row["cache_dtype"]),
            str(row["requests"]),
            short(row["context"]),
            f"{1e3 * row['seconds_per_step']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['bytes_per_token'] * row['context'] * row['requests'] / 1e9:.2f}",
        ]
        for row in result["rows"]
    ]
    return markdown(["model", "cache", "requests", "context", "ms a step", "tokens/s", "cache, GB"], body)


def _shapes(context: int, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    longest = context + (args.steps + _WARM_UP + 2) * (1 + args.drafts)
    pages = batch * math.ceil(longest / _PAGE)
    return dict(max_requests=batch, max_len=longest, page_size=_PAGE, num_pages=pages, drafts=args.drafts)


def _model(config: DsaConfig, args: argparse.Namespace) -> CausalLM:
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    experts = config.n_routed_experts if args.experts is None else args.experts
    config = dataclasses.replace(config, n_routed_experts=experts, num_nextn_predict_layers=min(args.drafts, 1))
    return CausalLM(config, dtype=dtype, rngs=nnx.Rngs(quick_key(0)))


def _compile(model: CausalLM, shapes: list[dict[str, Any]]) -> None:
    """All programs side by side: the engines' steps find them in jax's compilation cache."""
    jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compiled({number: _lower(model, **shape) for number, shape in enumerate(shapes)})


def _lower(model: CausalLM, *, max_requests, max_len, page_size, num_pages, cache_dtype, drafts) -> Any:
    """The engine's decode step over its widest block table."""
    (skeleton, arrays), width = Skeleton.of(model), -(-max_len // page_size)
    mtp = (
        functools.partial(new_cache, model.config, num_pages, page_size, cache_dtype, True) if drafts else lambda: None
    )
    caches = jax.eval_shape(lambda: Caches(model.new_caches(num_pages, page_size, cache_dtype), mtp()))
    row = np.zeros(max_requests, np.int32)
    batch = Batch(
        block_table=np.zeros((max_requests, width), np.int32),
        sampling=SamplingRows.of([Sampling()] * max_requests),
        decode=DecodeRows(np.zeros((max_requests, drafts + 1), np.int32), row, row),
        chunk=None,
    )
    return run_step.lower(skeleton, arrays, batch, caches, drafts + 1, width * page_size, model.options())


def _measure(model: CausalLM, shape: dict[str, Any], contexts: list[int], steps: int) -> list[dict[str, Any]]:
    engine = Engine(model, **shape)
    keys = iter(jax.random.split(quick_key(1), len(jax.tree.leaves(engine._caches))))
    engine._caches = jax.tree.map(lambda x: _random(next(keys), x), engine._caches)
    rng, rows = np.random.default_rng(0), []
    for context in contexts:
        prompts = rng.integers(0, model.config.vocab_size, (shape["max_requests"], context))
        ids = _add_decoding(engine, prompts, shape["max_len"] - max(contexts))
        for _ in range(_WARM_UP):
            engine.step()
        begin, before = time.perf_counter(), engine.stats.produced
        for _ in range(steps):
            engine.step()
        seconds = time.perf_counter() - begin
        rows.append(
            {
                "cache_dtype": shape["cache_dtype"],
                "requests": len(ids),
                "context": context,
                "drafts": shape["drafts"],
                "seconds_per_step": seconds / steps,
                "tokens_per_second": (engine.stats.produced - before) / seconds,
                "bytes_per_token": engine.bytes_per_token,
            }
        )
        for id in ids:
            engine.cancel(id)
        engine.pages.forget()
    return rows


def _add_decoding(engine: Engine, prompts: np.ndarray, new: int) -> list[int]:
    """Requests whose prompts count as written, all but their last tokens."""
    ids = [engine.add(prompt, max_new_tokens=new, stop_tokens=[]) for prompt in prompts]
    engine._scheduler.plan()
    for id in ids:
        engine._requests[id].written = prompts.shape[1] - 1
    return ids


@functools.partial(jax.jit, donate_argnums=1)
def _random(key: jax.Array, x: jax.Array) -> jax.Array:
    """Numbers as a cache holds: standard normal values, scales of 1/64."""
    if x.dtype == jnp.float32 and (x.ndim == 2 or x.shape[-1] < 8):  # scales of an e4m3 cache
        return jnp.full_like(x, 2.0**-6)
    return jax.random.normal(key, x.shape, jnp.bfloat16).astype(x.dtype)
