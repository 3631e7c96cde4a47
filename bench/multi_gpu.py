"""Striped selection and the tensor-parallel attention layer on 2, 4 and 8 GPUs: the bits of one GPU, then the times.

On every number of GPUs that is visible: `striped_select_topk` for one causal prompt and for packed requests, with both
ways of merging and several stripes, must have the bits of `select_topk` on one GPU, on every GPU. Then the selection,
its exchange alone and a GLM-5 attention layer, in prefill and in decode, are timed against one GPU that does it all,
which is what each does where nothing is divided. The cost model's prediction stands beside.
"""

import argparse
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from bench import record
from bench.compiling import compiled
from bench.options import add_commit
from bench.report import markdown
from bench.stripes import INDEXER, burst, layout, prediction, prompt
from dsa_jax.config import DsaConfig
from dsa_jax.context import Options, PagedDecode, PagedPrefill, Stripes
from dsa_jax.layers import MlaAttention, Rope
from dsa_jax.model import new_cache, partition_spec
from dsa_jax.striped import packed_lanes, stripe_rows, striped_select_topk
from dsa_jax.topk import select_topk

PAGE = 64
VARIANTS = (("512", "max"), ("1024", "all_gather"), ("best", "max"), ("best", "all_gather"))
WHOLE = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Sizes:
    """lengths: of selection's prompts. chunks: rows of the layer's prefill. requests, context: of its decode."""

    lengths: tuple[int, ...] = (8192, 51200, 131072)
    chunks: tuple[int, ...] = (8192, 32768)
    requests: int = 64
    context: int = 32768
    config: DsaConfig = dataclasses.field(default_factory=DsaConfig.glm5)
    dtype: Any = jnp.bfloat16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tiny", action="store_true", help="small shapes on two virtual CPU devices")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON (default: bench/results/multi_gpu.json)")
    add_commit(parser)


def run(args: argparse.Namespace) -> int:
    sizes = Sizes()
    if args.tiny:
        jax.config.update("jax_num_cpu_devices", 2)
        sizes = Sizes((300, 1100), (64,), 4, 128, DsaConfig.tiny(), jnp.float32)
    counts = [count for count in (2, 4, 8) if count <= len(jax.devices())]
    if not counts:
        raise ValueError(f"this needs at least 2 devices, got {len(jax.devices())}")
    output, rows = args.output or record.RESULTS / "multi_gpu.json", []
    for count in counts:
        mesh = Mesh(np.array(jax.devices()[:count]), ("tp",), axis_types=(AxisType.Auto,))
        for row in itertools.chain(selections(mesh, sizes), layers(mesh, sizes)):
            rows.append(row)
            print(row, flush=True)
            record.write(output, "multi_gpu", rows, commit=args.commit)
    failed = [row["case"] for row in rows if not row.get("same_bits", True)]
    print("failed: " + ", ".join(failed) if failed else "every selection has the bits of one GPU", file=sys.stderr)
    return int(bool(failed))


Lowered = dict[Any, jax.stages.Lowered]


def placed(tree: Any, where: Sharding) -> Any:
    """Shapes of arrays that will lie there."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def lowered_selections(mesh: Mesh, length: int) -> Lowered:
    """By (length, what): one GPU's selection, the striped ones, their exchanges alone, and the comparison of bits."""
    first, everywhere = SingleDeviceSharding(mesh.devices.flat[0]), NamedSharding(mesh, WHOLE)
    inputs = jax.eval_shape(lambda: prompt(length))
    chosen = jax.ShapeDtypeStruct((length, INDEXER.topk), jnp.int32, sharding=everywhere)
    programs: Lowered = {
        "one": jax.jit(select).lower(*placed(inputs, first)),
        "same": jax.jit(same_on(mesh)).lower(chosen, chosen),
    }
    for name, combine in VARIANTS:
        striped = striped_on(mesh, combine=combine, **layout(name, length, mesh.size))
        programs[name, combine] = jax.jit(striped).lower(*placed(inputs, everywhere))
    for way, buffer in exchanged(mesh, length).items():
        programs["exchange", way] = jax.jit(exchange_on(mesh, way)).lower(placed(buffer, everywhere))
    return {(length, what): program for what, program in programs.items()}


def exchanged(mesh: Mesh, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """What each GPU hands in, by how it is merged."""
    share = len(stripe_rows(length, mesh.size, rank=0, **layout("best", length, mesh.size)))
    return {
        "max": jax.ShapeDtypeStruct((length, INDEXER.topk), jnp.int32),
        "all_gather": jax.ShapeDtypeStruct((share, packed_lanes(INDEXER.topk, length)), jnp.uint16),
    }


def selections(mesh: Mesh, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Selection on one count of GPUs: bits, then times."""
    first, ranks = mesh.devices.flat[0], mesh.size
    spread = functools.partial(jax.device_put, device=NamedSharding(mesh, WHOLE))
    programs = compiled({k: p for length in sizes.lengths for k, p in lowered_selections(mesh, length).items()})
    for length in sizes.lengths:
        same, one = programs[length, "same"], programs[length, "one"]
        inputs = prompt(length)
        cases = [inputs, (*inputs[:3], *requests_of(length), *inputs[5:])]
        wanted = [spread(one(*jax.device_put(case, first))) for case in cases]
        alone = burst(one, *jax.device_put(inputs, first))
        exchange = {
            way: burst(programs[length, ("exchange", way)], spread(jnp.zeros(buffer.shape, buffer.dtype)))
            for way, buffer in exchanged(mesh, length).items()
        }
        for name, combine in VARIANTS:
            program = programs[length, (name, combine)]
            agree = [bool(same(program(*spread(case)), want)) for case, want in zip(cases, wanted, strict=True)]
            seconds = burst(program, *spread(inputs))
            yield dict(
                op="striped_select_topk",
                case=f"{length} tokens, {ranks} GPUs, {name}, {combine}",
                implementation="best",
                length=length,
                gpus=ranks,
                layout=name,
                combine=combine,
                us=round(1e6 * seconds, 1),
                one_gpu_us=round(1e6 * alone, 1),
                exchange_us=round(1e6 * exchange[combine], 1),
                speed_up=round(alone / seconds, 3),
                exchange_share=round(exchange[combine] / seconds, 3),
                same_bits=all(agree),
            )


def table(result: dict[str, Any]) -> str:
    """Selections beside what the cost model says of them now, and layers."""
    selected = [row for row in result["rows"] if row["op"] == "striped_select_topk"]
    body = []
    for row in selected:
        expected = prediction(row["layout"], row["length"], row["gpus"], row["combine"])
        body.append(
            [
                f"{row['length']:,}",
                str(row["gpus"]),
                {"best": "folded"}.get(row["layout"], row["layout"]),
                row["combine"],
                f"{row['one_gpu_us'] / 1e3:.2f}",
                f"{row['us'] / 1e3:.2f}",
                f"{row['speed_up']:.2f}x",
                f"{expected.speed_up:.2f}x",
                f"{row['exchange_us'] / 1e3:.2f}",
                f"{100 * row['exchange_share']:.0f} %",
                "same" if row["same_bits"] else "DIFFERENT",
            ]
        )
    head = ["tokens", "GPUs", "stripes", "merged by", "one GPU, ms", "ms", "speed-up", "predicted", "exchange, ms"]
    selections_ = markdown([*head, "its share", "bits"], body)
    layers_ = markdown(
        ["attention layer", "ms", "speed-up", "rows with one GPU's indices", "output's difference"],
        [
            [
                row["case"],
                f"{row['us'] / 1e3:.2f}",
                f"{row['speed_up']:.2f}x",
                f"{100 * row['same_rows']:.0f} %",
                f"{row['difference']:.4f}",
            ]
            for row in result["rows"]
            if row["op"] == "attention_layer"
        ],
    )
    return f"{selections_}\n\n{layers_}"


def requests_of(length: int) -> tuple[jax.Array, jax.Array]:
    """starts and ends of four packed requests of unequal lengths, whose first tokens came in an earlier step."""
    ends = np.arange(1, length + 1)
    begins = np.array([0, length // 10, length // 2, length // 2 + 7])
    starts = begins[np.searchsorted(begins, ends, side="left") - 1]
    return jnp.asarray(starts, jnp.int32), jnp.asarray(ends, jnp.int32)


def select(q, k, weights, starts, ends, k_scale):
    return select_topk(q, k, weights, starts, ends, INDEXER.topk, k_scale=k_scale)


def striped_on(mesh: Mesh, **options: Any) -> Callable:
    def striped(q, k, weights, starts, ends, k_scale):
        return striped_select_topk(
            q, k, weights, starts, ends, INDEXER.topk, axis_name="tp", k_scale=k_scale, **options
        )

    return jax.shard_map(striped, mesh=mesh, in_specs=WHOLE, out_specs=WHOLE)


def exchange_on(mesh: Mesh, combine: str) -> Callable:
    def exchange(rows):
        own = lax.pcast(rows, "tp", to="varying")
        return lax.pmax(own, "tp") if combine == "max" else lax.all_gather(own, "tp", to="invarying")

    return jax.shard_map(exchange, mesh=mesh, in_specs=WHOLE, out_specs=WHOLE)


def same_on(mesh: Mesh) -> Callable:
    """Whether every device's copies of two arrays are equal."""

    def same(a, b):
        different = lax.pcast(jnp.any(a != b).astype(jnp.int32), "tp", to="varying")
        return lax.psum(different, "tp") == 0

    return jax.shard_map(same, mesh=mesh, in_specs=WHOLE, out_specs=WHOLE)


def layers(mesh: Mesh, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """One attention layer: on one GPU, on all with heads divided, and with prefill's selection divided too."""
    config, dtype = sizes.config, sizes.dtype
    first, everywhere = SingleDeviceSharding(mesh.devices.flat[0]), NamedSharding(mesh, WHOLE)
    make = nnx.jit(lambda: MlaAttention(config, has_indexer=True, latent_norm_eps=1e-5, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(make())
    divided = nnx.from_flat_state(
        (path, variable.replace(jax.device_put(x, NamedSharding(mesh, partition_spec(path, x.shape, mesh)))))
        for path, variable in nnx.to_flat_state(state)
        for x in [variable.get_value()]
    )
    base = Options(config.index_topk, config.sm_scale)
    heads = dataclasses.replace(base, mesh=mesh)
    stripes = Stripes(mesh, "tp", combine="all_gather", min_rows=0)
    ways = {
        "one GPU": (jax.device_put(state, first), first, base),
        "heads": (divided, everywhere, heads),
        "heads and rows": (divided, everywhere, dataclasses.replace(heads, stripes=stripes)),
    }

    def step(state, h, context, cache):
        out, cache, indices = nnx.merge(graph, state)(h, context, cache, None, Rope(config))
        return out, indices, cache

    cases: dict[str, tuple[int, Callable]] = {
        f"prefill {rows}": (rows, functools.partial(prefill_of, rows)) for rows in sizes.chunks
    }
    cases[f"decode {sizes.requests} x {sizes.context}"] = (sizes.requests, functools.partial(decode_of, sizes))
    programs: Lowered = {}
    for case, (count, context_of) in cases.items():
        for name, (state, where, options) in ways.items():
            if case.startswith("decode") and options.stripes is not None:
                continue
            context, pages = context_of(options)
            h = jax.ShapeDtypeStruct((count, config.hidden_size), dtype)
            cache = jax.eval_shape(functools.partial(cache_of, sizes, pages))
            arguments = placed((h, context, cache), where)
            programs[case, name] = jax.jit(step, donate_argnums=3).lower(state, *arguments)
    one = None
    for (case, name), program in compiled(programs).items():
        (count, context_of), (state, where, options) = cases[case], ways[name]
        context, pages = context_of(options)
        h = jax.random.normal(jax.random.key(1), (count, config.hidden_size), dtype)
        arguments = jax.device_put((h, context, cache_of(sizes, pages)), where)
        seconds, out, indices = burst_step(program, state, *arguments)
        if one is None or name == "one GPU":
            one = (seconds, out, indices)
        yield dict(
            op="attention_layer",
            case=f"{case}, {mesh.size} GPUs, {name}",
            implementation="best",
            gpus=mesh.size,
            us=round(1e6 * seconds, 1),
            speed_up=round(one[0] / seconds, 3),
            same_rows=float((one[2] == indices).all(axis=1).mean()),
            difference=float(np.abs(one[1] - out).max() / np.abs(one[1]).max()),
        )


def burst_step(
    program: Callable, state: Any, h: jax.Array, context: Any, cache: Any
) -> tuple[float, np.ndarray, np.ndarray]:
    """Seconds of a step that gives its cache on; the first step's output and indices."""
    out, indices, cache = program(state, h, context, cache)
    result = np.asarray(out.astype(jnp.float32)), np.asarray(indices)
    kept = [cache]

    def again() -> jax.Array:
        out, _, kept[0] = program(state, h, context, kept[0])
        return out

    return burst(again), *result


def cache_of(sizes: Sizes, pages: int) -> Any:
    """Random keys and latents, so that there is something to select among."""

    @jax.jit
    def make() -> Any:
        cache = new_cache(sizes.config, pages, PAGE, sizes.dtype, True)
        return jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.shape[-1]), x.shape, x.dtype), cache)

    return make()


def prefill_of(rows: int, options: Options) -> tuple[PagedPrefill, int]:
    """A whole prompt of `rows` tokens, and its pages."""
    pages = -(-rows // PAGE)
    table = jnp.arange(pages, dtype=jnp.int32)[None]
    positions, request = jnp.arange(rows, dtype=jnp.int32), jnp.zeros(rows, jnp.int32)
    return PagedPrefill(positions, request, table, jnp.array([rows], jnp.int32), rows, options), pages


def decode_of(sizes: Sizes, options: Options) -> tuple[PagedDecode, int]:
    """One token of every request, and their pages."""
    pages = sizes.context // PAGE
    table = jnp.arange(sizes.requests * pages, dtype=jnp.int32).reshape(sizes.requests, pages)
    lens = jnp.full(sizes.requests, sizes.context, jnp.int32)
    return PagedDecode(table, lens, 1, options), sizes.requests * pages
