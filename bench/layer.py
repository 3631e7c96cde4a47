"""One decoder layer at published widths, or a pair that shares an indexer: time by stage, memory, tokens a second."""

import argparse
import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bench import record, trace
from bench.case import length, quick_key, short
from bench.compiling import compiled
from bench.options import add_lock, add_results, turn
from bench.timing import Kernel, kernels_of
from bench.trace import Placed
from dsa_jax import DsaConfig
from dsa_jax.cli import PRESETS
from dsa_jax.context import Context, LayerCache, Options, PagedDecode, PagedPrefill
from dsa_jax.layers import DecoderLayer, Rope
from dsa_jax.model import new_cache
from dsa_jax.plan import chunk_ranges

_PAGE = 64
_DECODE_STEPS = 5
_DTYPES = {"bf16": "bfloat16", "e4m3": "float8_e4m3fn"}
# A kernel belongs to the first stage whose word is in the name stack of its instruction.
_STAGES = (
    ("MoE", "/mlp/"),
    ("top-k", "topk_indices"),
    ("indexer", "/indexer/"),
    ("indexer", "/index_projections/"),
    ("attention", "/sparse_mla/"),
    ("attention", "/dense_mla/"),
    ("projections", "/mla_projections/"),
    ("projections", "/o_proj/"),
    ("cache", "/cache/"),
)
# Kernels inside CUDA graphs carry no instruction's name, so the layers are compiled without graphs.
_NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 10**6}
# Products of thousands of rows reach 787 TFLOP/s on an H200 as cuBLAS chooses, and timing the choices takes minutes.
_AS_CUBLAS_CHOOSES = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=(*PRESETS, "tiny"), help="default: glm5_2, on a CPU tiny")
    parser.add_argument("--prefill", default="1k,8k,51k,128k", metavar="N,N", help="prompt lengths, or none")
    parser.add_argument("--decode", default="1700,65k,127k", metavar="N,N", help="context lengths, or none")
    parser.add_argument("--batch", default="1,32", metavar="N,N", help="requests of a decode step (default: 1,32)")
    parser.add_argument("--cache", default="bf16,e4m3", metavar="KIND,..", help="default: bf16,e4m3")
    parser.add_argument("--chunk", default="8k", metavar="N", help="rows of a prefill step (default: 8k)")
    parser.add_argument(
        "--dense-up-to", default="8k", metavar="N", help="also prefill densely up to here (default: 8k)"
    )
    parser.add_argument("--experts", type=int, metavar="N", help="routed experts, where all of them do not fit")
    parser.add_argument("--implementation", metavar="NAME", help="default: the best of every op")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a timeline by stage, for ui.perfetto.dev")
    add_results(parser, plot="the shares of the stages")
    add_lock(parser)


def run(args: argparse.Namespace) -> None:
    on_cpu = jax.default_backend() == "cpu"
    model = getattr(DsaConfig, args.preset or ("tiny" if on_cpu else "glm5_2"))()
    stack = Stack.of_model(model, experts=args.experts)
    steps = list(_steps(args, stack.config))
    with turn(args.lock, alone=False):
        weights, programs = _compiled(stack, steps)
    head = record.header(args.commit)
    print(f"{head['device']}, jax {jax.__version__}, commit {head['commit']}: {stack.describe()}")
    rows, runs = [], {}
    with turn(args.lock):
        state = jax.block_until_ready(weights())
        for step, (program, caches) in zip(steps, programs, strict=True):
            row, runs[step.name] = _measure(stack, step, program, state, caches())
            rows.append(row)
            print(line(rows[-1]), flush=True)
            if args.json:  # every time: a run that is cut off leaves what it has
                record.write(args.json, "layer", rows, commit=args.commit, stack=stack.describe())
    if args.trace:
        trace.write(args.trace, runs)
    if args.plot:
        from bench.plots import draw_stages

        draw_stages(args.plot, f"{stack.describe()} on {head['device']}", rows)


def _compiled(
    stack: "Stack", steps: list["Step"]
) -> tuple[jax.stages.Compiled, list[tuple[jax.stages.Compiled, jax.stages.Compiled]]]:
    """The weights' program, and each step's with its caches'.

    Decode steps of as many requests multiply the same shapes at every length: XLA times its choices for the first of
    them, and the others, which come after, know the result.
    """
    lowered = {step: stack.lowered(step) for step in steps}
    on_cpu = jax.default_backend() == "cpu"
    options: dict[Any, Any] = {} if on_cpu else {step: step.compiler_options for step in steps}
    first: dict[Any, Any] = {step.batch: step for step in reversed(steps) if step.kind == "decode"}
    now = {step: lowered[step] for step in steps if step.kind == "prefill" or first[step.batch] is step}
    small = {(step,): stack.lowered_caches(step) for step in steps} | {(): jax.jit(stack.weights).lower()}
    done: dict[Any, jax.stages.Compiled] = compiled(now | small, options)
    done |= compiled({step: lowered[step] for step in steps if step not in done}, options)
    return done[()], [(done[step], done[step,]) for step in steps]


@dataclasses.dataclass(frozen=True)
class Step:
    """What is timed: the whole prefill of one prompt in chunks, or one decode step.

    length: tokens of the prompt, or of every request's context, the decoded token included.
    batch: requests. cache: "bf16" or "e4m3". dense: through the expanded form, scoring nothing.
    """

    kind: str
    length: int
    cache: str
    options: Options
    batch: int = 1
    chunk: int = 0

    @property
    def name(self) -> str:
        if self.kind == "decode":
            return f"decode {self.batch} x {short(self.length)} {self.cache}"
        return f"prefill {short(self.length)} {self.cache}{' dense' if self.options.dense else ''}"

    @property
    def rows(self) -> int:
        """Rows of one call. A prefill's chunks are equally long; the last is moved back by what they exceed."""
        return self.batch if self.kind == "decode" else -(-self.length // -(-self.length // self.chunk))

    @property
    def calls(self) -> list[int]:
        """Where each call's rows end in the request."""
        if self.kind == "decode":
            return [self.length] * _DECODE_STEPS
        return [max(stop, self.rows) for _, stop in chunk_ranges(self.length, self.rows)]

    @property
    def compiler_options(self) -> dict[str, Any]:
        return _NO_GRAPHS | (_AS_CUBLAS_CHOOSES if self.kind == "prefill" else {})

    @property
    def pages(self) -> int:
        return self.batch * -(-self.length // _PAGE)

    def context(self, end: Any) -> Context:
        """What the rows see, when they end at `end` of the request."""
        table = jnp.arange(self.pages, dtype=jnp.int32).reshape(self.batch, -1)
        lens = jnp.full(self.batch, end, jnp.int32)
        if self.kind == "decode":
            return PagedDecode(table, lens, 1, self.options)
        positions = end - self.rows + jnp.arange(self.rows, dtype=jnp.int32)
        return PagedPrefill(positions, jnp.zeros(self.rows, jnp.int32), table, lens, self.length, self.options)


def _steps(args: argparse.Namespace, config: DsaConfig) -> Iterator[Step]:
    sparse = Options(config.index_topk, config.sm_scale, implementation=args.implementation)
    dense = dataclasses.replace(sparse, dense=True)
    kinds = args.cache.split(",")
    if unknown := set(kinds) - set(_DTYPES):
        raise ValueError(f"--cache must be among {', '.join(_DTYPES)}, got {', '.join(sorted(unknown))}")
    for kind in kinds:
        for tokens in _lengths(args.prefill):
            # In the models a step is dense exactly where every key is kept anyway; longer ones are for comparison.
            for choice in (dense, sparse) if tokens <= length(args.dense_up_to) else (sparse,):
                yield Step("prefill", tokens, kind, choice, chunk=length(args.chunk))
        for tokens in _lengths(args.decode):
            for batch in _lengths(args.batch):
                yield Step("decode", tokens, kind, sparse, batch=batch)


def _lengths(text: str) -> list[int]:
    return [] if text == "none" else [length(item) for item in text.split(",")]


class Stack:
    """The decoder layers that are timed, with random weights in bfloat16."""

    def __init__(self, config: DsaConfig, model: DsaConfig):
        self.config, self.model = config, model
        self._graph, self._state = nnx.split(nnx.eval_shape(self._layers))

    @classmethod
    def of_model(cls, model: DsaConfig, *, experts: int | None) -> "Stack":
        """A full layer, and where the model shares indexers a shared one after it."""
        types = ("full", "shared") if "shared" in model.indexer_types else ("full",)
        config = dataclasses.replace(
            model,
            num_hidden_layers=len(types),
            indexer_types=types,
            mlp_layer_types=("sparse",) * len(types),
            n_routed_experts=experts or model.n_routed_experts,
        )
        return cls(config, model)

    def describe(self) -> str:
        """What it is, in words."""
        config, model = self.config, self.model
        experts = f"{config.n_routed_experts} of {model.n_routed_experts}"
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self._state)) / 1e9
        return (
            f"{model.model_type} of width {config.hidden_size}, layers {' + '.join(config.indexer_types)}, "
            f"{experts} experts, {size:.1f} GB of weights"
        )

    def weights(self) -> Any:
        """Random matrices of standard deviation 0.02; norms of ones, biases of zeros."""
        leaves, tree = jax.tree_util.tree_flatten_with_path(self._state)
        keys = jax.random.split(quick_key(0), len(leaves))
        return jax.tree.unflatten(
            tree, [_initial(path, leaf, key) for (path, leaf), key in zip(leaves, keys, strict=True)]
        )

    def lowered(self, step: Step) -> jax.stages.Lowered:
        """(weights, x[T, hidden], end, caches) -> (x, caches), the caches in place."""

        def forward(state, x, end, caches):
            rope, context, indices, written = Rope(self.config), step.context(end), None, []
            for number, layer in enumerate(nnx.merge(self._graph, state)):
                with jax.named_scope(f"layer_{number}"):
                    x, cache, indices = layer(x, context, caches[number], indices, rope)
                written.append(cache)
            return x, tuple(written)

        x = jax.ShapeDtypeStruct((step.rows, self.config.hidden_size), jnp.bfloat16)
        caches = jax.eval_shape(lambda: self.caches(step))
        end = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.jit(forward, donate_argnums=3).lower(self._state, x, end, caches)

    def lowered_caches(self, step: Step) -> jax.stages.Lowered:
        return jax.jit(lambda: self.caches(step)).lower()

    def caches(self, step: Step) -> tuple[LayerCache, ...]:
        """Every layer's, filled with random rows, as if earlier steps had written them."""
        empty = [
            new_cache(self.config, step.pages, _PAGE, _DTYPES[step.cache], kind == "full")
            for kind in self.config.indexer_types
        ]
        keys = jax.random.split(quick_key(1), len(empty))
        return tuple(
            jax.tree.map(lambda x, key=key: _random_like(x, key), c) for c, key in zip(empty, keys, strict=True)
        )

    def _layers(self) -> nnx.List:
        rngs = nnx.Rngs(quick_key(0))
        return nnx.List(
            DecoderLayer(
                self.config,
                has_indexer=kind == "full",
                sparse_mlp=True,
                latent_norm_eps=self.config.rms_norm_eps,
                dtype=jnp.bfloat16,
                rngs=rngs,
            )
            for kind in self.config.indexer_types
        )


def _initial(path: Any, leaf: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    """Random numbers are drawn in the weight's own type: as float32, an expert layer's are tens of gigabytes."""
    if leaf.ndim == 1:
        return jnp.full(leaf.shape, 0.0 if "bias" in jax.tree_util.keystr(path) else 1.0, leaf.dtype)
    return jax.random.normal(key, leaf.shape, leaf.dtype) * jnp.asarray(0.02, leaf.dtype)


def _random_like(x: jax.Array, key: jax.Array) -> jax.Array:
    """Normal rows; scales, which are float32, are one."""
    if x.dtype == jnp.float32:
        return jnp.ones_like(x)
    return jax.random.normal(key, x.shape, jnp.bfloat16).astype(x.dtype)


def _measure(
    stack: Stack, step: Step, program: jax.stages.Compiled, state: Any, caches: Any
) -> tuple[dict[str, Any], list[Placed]]:
    """One row of results: the step's time, by stage and by layer; and every kernel's run."""
    x = jax.random.normal(quick_key(2), (step.rows, stack.config.hidden_size), jnp.bfloat16)
    ends = [jnp.int32(end) for end in step.calls]
    _, caches = jax.block_until_ready(program(state, x, ends[-1], caches))  # the first call loads the kernels

    def calls():
        nonlocal caches
        out = None
        for end in ends:
            out, caches = program(state, x, end, caches)
        return out

    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None and memory is not None, "XLA's compilers for CPU and GPU tell both"
    times = _Times.of(calls, text, steps=len(ends) if step.kind == "decode" else 1)
    by_layer = [times.layers.get(number, 0.0) for number in range(len(stack.config.indexer_types))]
    per_kind = dict(zip(stack.config.indexer_types, by_layer, strict=True))
    whole = sum(per_kind[kind] for kind in stack.model.indexer_types)
    tokens = step.batch if step.kind == "decode" else step.length
    row = {
        "op": "layer",
        "case": step.name,
        "implementation": "layer",
        "us": round(times.us, 1),
        "busy_us": round(times.busy_us, 1),
        "stages": {name: round(us, 1) for name, us in times.stages.items()},
        "layers_us": [round(us, 1) for us in by_layer],
        "temporary_gb": round(memory.temp_size_in_bytes / 1e9, 3),
        "cache_gb": round(sum(leaf.nbytes for leaf in jax.tree.leaves(caches)) / 1e9, 3),
        "model_tokens_per_s": round(tokens / whole * 1e6, 1) if whole else None,
    }
    return row, times.runs


@dataclasses.dataclass(frozen=True)
class _Times:
    """Microseconds of a step. us: from the first kernel to the last. busy_us: the kernels' own time, which the stages
    and, with the gaps shared out, the layers divide among themselves."""

    us: float
    busy_us: float
    stages: dict[str, float]
    layers: dict[int, float]
    runs: list[Placed]

    @classmethod
    def of(cls, calls: Callable[[], Any], hlo: str, *, steps: int) -> "_Times":
        """hlo: the program's optimised text, which names every instruction's place in the model."""
        if jax.default_backend() == "cpu":
            return cls._of_wall(calls, steps)
        places = instruction_places(hlo)
        runs = [placed(kernel, places) for kernel in kernels_of(calls)]
        stages: dict[str, float] = {}
        layers: dict[int, float] = {}
        for kernel, stage, layer, _ in runs:
            us = (kernel.end_ns - kernel.begin_ns) / 1e3 / steps
            stages[stage] = stages.get(stage, 0.0) + us
            if layer is not None:
                layers[layer] = layers.get(layer, 0.0) + us
        us = (max(run.kernel.end_ns for run in runs) - runs[0].kernel.begin_ns) / 1e3 / steps
        busy = sum(stages.values())
        stretch = us / max(sum(layers.values()), 1e-9)
        return cls(us, busy, stages, {number: own * stretch for number, own in layers.items()}, runs)

    @classmethod
    def _of_wall(cls, calls: Callable[[], Any], steps: int) -> "_Times":
        """The whole by the host's clock: a CPU's profile has no kernels."""
        begin = time.perf_counter()
        jax.block_until_ready(calls())
        us = 1e6 * (time.perf_counter() - begin) / steps
        return cls(us, us, {"all": us}, {}, [])


def instruction_places(hlo: str) -> dict[str, str]:
    """Each instruction of an optimised program and the name stack it came from, "" where it has none.

    A fusion without one has that of the first instruction inside that does.
    """
    places: dict[str, str] = {}
    inside: dict[str, str] = {}
    calls: dict[str, str] = {}
    computation = ""
    for text in hlo.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", text):
            computation = header[1]
        elif found := re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = ", text):
            place, call = re.search(r'op_name="([^"]*)"', text), re.search(r"calls=%?([\w.\-]+)", text)
            places[found[1]] = place[1] if place else ""
            if place:
                inside.setdefault(computation, place[1])
            elif call:
                calls[found[1]] = call[1]
    return places | {name: inside.get(called, "") for name, called in calls.items()}


def placed(kernel: Kernel, places: dict[str, str]) -> Placed:
    """A kernel with its stage and its layer: "rest" and None where its instruction does not say."""
    place = places.get(kernel.hlo) or places.get(kernel.name, "")
    layer = re.search(r"layer_(\d+)/", place)
    stage = next((stage for stage, word in _STAGES if word in f"{place}/"), "rest")
    return Placed(kernel, stage, int(layer[1]) if layer else None, place)


def line(row: dict[str, Any]) -> str:
    """A row as one line of the table."""
    stages = ", ".join(f"{name} {us / 1e3:.2f}" for name, us in row["stages"].items())
    rate = f"{row['model_tokens_per_s']:.0f} tokens/s of the model" if row["model_tokens_per_s"] else ""
    return f"{row['case']:26} {row['us'] / 1e3:9.2f} ms ({stages}) temporary {row['temporary_gb']:.2f} GB {rate}"
