"""The main job: a real text through a tiny GLM-5.2 on virtual devices, checked against the specification, and drawn.

Two requests share the paged caches: the whole text, after which tokens are generated, and its beginning, which the
specification computes too. Both are prefilled in chunks, every chunk's selection striped over the devices, and decoded
together; the second is fed the text's own tokens. The weights are random, so the generated words mean nothing.
"""

import argparse
import contextlib
import dataclasses
import functools
import inspect
import time
from collections.abc import Generator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import dsa_jax
from dsa_jax import reference, verify
from dsa_jax.calls import model_calls
from dsa_jax.checkpoint import Checkpoint, load_model
from dsa_jax.checks import require
from dsa_jax.config import DsaConfig
from dsa_jax.context import Stripes
from dsa_jax.dispatch import Explanation, explain
from dsa_jax.generate import Progress, Run
from dsa_jax.model import TENSOR_AXIS, CausalLM
from dsa_jax.picture import Kept, draw_selection, panels
from dsa_jax.tokenizer import load_tokenizer

NUM_TOKENS = 16384
NEW_TOKENS = 32
CHUNK = 2048
PAGE_SIZE = 64
STRIPE = 128  # rows: four stripes a device in every chunk
CHECKED = 2048  # tokens that the specification, which is dense, computes too


@dataclasses.dataclass(frozen=True)
class Demo:
    """What the demo did.

    text: where the text came from. num_tokens: prefilled, of both requests. produced: the generated text.
    seconds: by stage, compilation included. explanations: what ran where.
    bytes_per_token: of all caches, by cache dtype.
    check: the checked tokens without chunks, stripes and caches, layer by layer.
    rows: rows times selecting layers of the checked request's prefill.
    same_rows: how many of these selected exactly what the specification does.
    decoded: largest relative difference of the checked request's decoded logits from the specification's; judged where
        every row selected the same.
    picture: where the selection was drawn.
    """

    text: str
    num_tokens: tuple[int, int]
    num_devices: int
    produced: str
    seconds: dict[str, float]
    explanations: list[Explanation]
    bytes_per_token: dict[str, int]
    check: verify.Report
    rows: int
    same_rows: int
    decoded: float
    picture: Path

    @property
    def ok(self) -> bool:
        return self.check.ok and (self.decoded <= verify.HIDDEN or self.same_rows < self.rows)


def find_checkpoint() -> Path:
    """The tiny GLM-5.2 of this project's source tree. Raises ValueError where the package was installed without it."""
    path = Path(dsa_jax.__file__).parents[1] / "tests" / "golden" / "tiny_glm52"
    require(path.is_dir(), "--checkpoint", "none", f"given, because there is no {path}")
    return path


def demo_text() -> tuple[str, str]:
    """A name and NUM_TOKENS bytes of real text that every Python brings: the source of its argparse."""
    source = inspect.getsource(argparse).encode("ascii", "replace")[:NUM_TOKENS]
    require(len(source) == NUM_TOKENS, "the source of argparse", f"{len(source)} bytes", f"{NUM_TOKENS} bytes long")
    return "the source of Python's argparse", source.decode("ascii")


def run_demo(checkpoint: Path, output: Path, mesh: Mesh, progress: Progress) -> Demo:
    """Runs everything, writes `output`/selection.png and returns the findings.

    checkpoint: a Hugging Face directory. mesh: one axis, TENSOR_AXIS; the weights are replicated over it.
    Raises ValueError for a checkpoint that cannot be read.
    """
    seconds: dict[str, float] = {}
    timed = functools.partial(_timed, seconds, progress)
    stripes = Stripes(mesh, TENSOR_AXIS, stripe=STRIPE, min_rows=0)
    with timed("read the checkpoint"):
        model = _load(checkpoint)
    config = model.config
    tokenizer = load_tokenizer(checkpoint, config.vocab_size)
    name, text = demo_text()
    tokens = tokenizer.encode(text)
    checked = tokens[:CHECKED]
    prompts = [tokens, checked[:-NEW_TOKENS]]
    run = Run(
        model,
        [len(prompt) + NEW_TOKENS for prompt in prompts],
        page_size=PAGE_SIZE,
        cache_dtype="float32",
        num_pages=None,
        options=model.options(stripes=stripes),
    )
    drawn = panels(config.indexer_types)
    kept = Kept([layers[0] for layers in drawn], config.index_topk)
    with timed(f"prefill in chunks of {CHUNK} rows"):
        logits = run.prefill(prompts, CHUNK, progress, kept)
    with timed(f"decode {NEW_TOKENS} tokens"):
        produced, logits = _decode(run, logits, prompts, checked, progress)
    with timed(f"specification, {len(checked)} tokens"):
        tensors = Checkpoint.open(checkpoint)
        want = reference.forward(tensors, config, jnp.asarray(checked)[None])
    with timed(f"sparse path, layer by layer, {len(checked)} tokens"):
        report = verify.check(model, tensors, checked, want=want, decode_steps=0)
    with timed("drawing"):
        picture = draw_selection(
            output / "selection.png",
            {layers: kept.layer(layers[0])[: len(tokens)] for layers in drawn},
            title=f"Positions kept by {checkpoint.name}",
            caption=f"{len(tokens)} tokens, {name}; each query keeps {config.index_topk} of the positions it sees",
        )
    same = [_same_rows(kept.layer(layers[0])[len(tokens) :], want.indices[layers[0]][0]) for layers in drawn]
    return Demo(
        text=name,
        num_tokens=(len(prompts[0]), len(prompts[1])),
        num_devices=mesh.size,
        produced=tokenizer.decode(produced),
        seconds=seconds,
        explanations=_explanations(config, len(tokens)),
        bytes_per_token={dtype: config.cache_bytes_per_token(dtype) for dtype in ("bfloat16", "float8_e4m3fn")},
        check=report,
        rows=len(prompts[1]) * len(drawn),
        same_rows=sum(same),
        decoded=verify.relative_difference(logits, want.logits[0, -len(logits) :]),
        picture=picture,
    )


def _load(checkpoint: Path) -> CausalLM:
    """The model in float32, with room for the text: rotary embedding without scaling has no limit of its own."""
    model = load_model(checkpoint, dtype=jnp.float32)
    limit = max(model.config.max_position_embeddings, NUM_TOKENS + NEW_TOKENS)
    model.config = dataclasses.replace(model.config, max_position_embeddings=limit)
    return model


def _decode(
    run: Run, logits: jax.Array, prompts: list[np.ndarray], checked: np.ndarray, progress: Progress
) -> tuple[np.ndarray, jax.Array]:
    """NEW_TOKENS greedy tokens of the first request, and the second's logits while it is fed the rest of `checked`."""
    produced, seen = [], [logits[1]]
    for count in range(NEW_TOKENS):
        produced.append(int(jnp.argmax(logits[0])))
        lens = np.array([len(prompt) + count + 1 for prompt in prompts], np.int32)
        logits = run.decode(jnp.array([produced[-1], checked[lens[1] - 1]], jnp.int32), lens)
        seen.append(logits[1])
        progress("decode", count + 1, NEW_TOKENS)
    return np.array(produced, np.int32), jnp.stack(seen)


def _same_rows(got: np.ndarray, want: jax.Array) -> int:
    """How many rows of `got` are bit for bit those that `want` begins with."""
    return int(np.all(got == np.asarray(want)[: len(got)], axis=-1).sum())


def _explanations(config: DsaConfig, context: int) -> list[Explanation]:
    calls = model_calls(
        config, dtype=jnp.float32, cache_dtype=jnp.float32, rows=CHUNK, context=context, requests=1, page_size=PAGE_SIZE
    )
    return [explain(call.op, *call.arguments, device="cpu", **call.options) for call in calls]


@contextlib.contextmanager
def _timed(seconds: dict[str, float], progress: Progress, stage: str) -> Generator[None, None, None]:
    begin = time.perf_counter()
    progress(stage, 0, 1)
    yield
    progress(stage, 1, 1)
    seconds[stage] = time.perf_counter() - begin
