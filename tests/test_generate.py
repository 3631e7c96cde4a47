"""Prefill, decode and sampling over paged caches: one answer, whatever the batch, the chunks, pages and devices."""

import dataclasses
import functools
import importlib

import golden_data as golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from tolerances import GOLDEN_LOGITS, cosine_distance

from dsa_jax.checkpoint import load_model
from dsa_jax.config import DsaConfig
from dsa_jax.context import PagedDecode, Stripes
from dsa_jax.generate import OutOfPages, PageAllocator, Run, generate
from dsa_jax.model import CausalLM, parameter_sharding

generation = importlib.import_module("dsa_jax.generate")  # dsa_jax.generate may be the function
NEW = 6
LENS = (5, 61, 130, 13)  # index_topk is 12


@functools.cache
def small() -> CausalLM:
    """One layer with an indexer and experts: what these tests take is compilation."""
    config = dataclasses.replace(DsaConfig.tiny(num_hidden_layers=1, index_topk=12), mlp_layer_types=("sparse",))
    return CausalLM(config, rngs=nnx.Rngs(0))


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(1000 * seed + length).integers(0, 256, length).astype(np.int32)


PROMPTS = [prompt(length) for length in LENS]


def greedy(prompts=PROMPTS, model=None, **options):
    options = dict(max_new_tokens=NEW, cache_dtype="float32", prefill_chunk=64) | options
    return generate(model or small(), prompts, **options)


@functools.cache
def expected():
    return greedy()


def assert_same_tokens(got, want):
    assert [tokens.tolist() for tokens in got] == [tokens.tolist() for tokens in want]


def new_run(model, lens, *, cache_dtype="float32", **options):
    return Run(model, lens, page_size=16, cache_dtype=cache_dtype, num_pages=None, options=model.options(**options))


def silent(*_):
    pass


@pytest.mark.parametrize("name", golden.NAMES)
def test_cached_decode_golden(name):
    """48 tokens prefilled and 16 decoded one by one: transformers' logits, and its selection in every layer."""
    model = load_model(golden.FOLDER / name, latent_norm_eps=golden.TRANSFORMERS_LATENT_EPS)
    want = golden.outputs(name)
    tokens = want["input_ids"]
    run = new_run(model, [64, 64])
    logits = run.prefill(list(tokens[:, :48]), 40, silent)
    np.testing.assert_allclose(logits, want["prefill_logits"][:, -1], atol=GOLDEN_LOGITS, rtol=0)
    forward, caches = jax.jit(model.forward), run.caches
    for step in range(16):
        lens = jnp.full(2, 49 + step, jnp.int32)
        out = forward(jnp.asarray(tokens[:, 48 + step]), PagedDecode(run.block_table, lens, 1, run.options), caches)
        caches = out.caches
        logits = model.logits(out.hidden)
        np.testing.assert_allclose(logits, want["decode_logits"][:, step], atol=GOLDEN_LOGITS, rtol=0)
        for layer, indices in enumerate(out.indices):
            chosen = np.sort(want[f"decode_topk_idx_{layer}"][:, step], axis=-1)
            np.testing.assert_array_equal(indices, chosen, err_msg=f"layer {layer}, step {step}")


def test_greedy_is_the_argmax_of_the_whole_sequence():
    model = small()
    for start, new in list(zip(PROMPTS, expected(), strict=True))[1:3]:  # each length is a program of its own
        logits = model(jnp.asarray(np.concatenate([start, new]))[None])[0]
        np.testing.assert_array_equal(new, jnp.argmax(logits[len(start) - 1 : -1], axis=-1))


def test_batch_invariant_prompts():
    """Prompts of unequal length give what one gives alone, and the same in another order."""
    assert_same_tokens(greedy(PROMPTS[2:3]), expected()[2:3])
    assert_same_tokens(greedy(PROMPTS[::-1]), expected()[::-1])


@pytest.mark.parametrize("chunk", [5, 7, 1000], ids=["5", "7", "whole"])
def test_chunk_equiv(chunk):
    assert_same_tokens(greedy(prefill_chunk=chunk), expected())


@pytest.mark.parametrize("page_size", [1, 61])
def test_pages(page_size):
    assert_same_tokens(greedy(page_size=page_size, num_pages=300), expected())


@pytest.mark.parametrize(("ranks", "stripe", "combine"), [(4, 8, "all_gather"), (8, 3, "max")])
def test_tp_rows_striped_selection(ranks, stripe, combine):
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("tp",))
    assert_same_tokens(greedy(stripes=Stripes(mesh, "tp", stripe=stripe, combine=combine)), expected())


def test_tensor_parallel_weights():
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    graph, state = nnx.split(small())
    placed = [
        (path, variable.replace(jax.device_put(value, parameter_sharding(small().config, mesh, path, value.shape))))
        for path, variable in nnx.to_flat_state(state)
        for value in [variable.get_value()]
    ]
    model = nnx.merge(graph, nnx.from_flat_state(placed))
    assert_same_tokens(greedy(model=model, stripes=Stripes(mesh, "tp", stripe=8)), expected())


def test_chunk_equiv_selection_and_two_programs():
    """Chunked prefill selects, bit for bit, what the whole sequence does, dense first chunk aside, in two programs."""
    model, start, kept = small(), PROMPTS[2], []
    generation._prefill_step.clear_cache()
    new_run(model, [len(start)]).prefill([start], 7, silent, lambda step, indices: kept.append((step, indices[0])))
    assert generation._prefill_step._cache_size() == 2
    assert [step.dense for step, _ in kept] == [True] + [False] * 18
    assert kept[0][1] is None
    got = np.concatenate([indices[: step.num_rows] for step, indices in kept[1:]])
    np.testing.assert_array_equal(got, model.run(jnp.asarray(start)[None]).indices[0][7:])


def test_temperature_depends_on_seed_and_place_only():
    draw = functools.partial(greedy, temperature=1.5, seed=7)
    together = draw()
    assert_same_tokens(draw(), together)
    assert_same_tokens(draw([*PROMPTS[:3], prompt(13, seed=1)])[:3], together[:3])
    assert greedy(temperature=1.5, seed=8)[0].tolist() != together[0].tolist()
    assert together[0].tolist() != expected()[0].tolist()


def test_stop_token_ends_one_request_only():
    want = expected()
    stop = int(want[0][2])
    cut = [new[: list(new).index(stop) + 1] if stop in new else new for new in want]
    assert len(cut[0]) <= 3
    assert_same_tokens(greedy(stop_tokens=[stop]), cut)


@pytest.mark.parametrize(("dtype", "distance"), [("bfloat16", 1e-3), ("float8_e4m3fn", 2e-2)])
def test_narrow_caches_stay_near(dtype, distance):
    """Logits after prefill and after decoded tokens over narrow caches, against float32 ones."""
    model, start = small(), PROMPTS[2]
    runs = [new_run(model, [140], cache_dtype=name) for name in ("float32", dtype)]
    want, got = (run.prefill([start], 64, silent) for run in runs)
    assert 0.0 < cosine_distance(got, want) < distance
    for length in (131, 132):
        want, got = (run.decode(jnp.asarray([65]), np.array([length], np.int32)) for run in runs)
        assert 0.0 < cosine_distance(got, want) < distance


def test_poison_in_unused_pages_is_never_read():
    model = small()
    poisoned = new_run(model, [140])
    poisoned.caches = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), poisoned.caches)
    clean = new_run(model, [140])
    first, want = (run.prefill([PROMPTS[2]], 64, silent) for run in (poisoned, clean))
    np.testing.assert_array_equal(first, want)
    decoded = [run.decode(jnp.asarray([65]), np.array([131], np.int32)) for run in (poisoned, clean)]
    np.testing.assert_array_equal(*decoded)


def test_out_of_pages_before_anything_runs(monkeypatch):
    needed = sum(-(-(length + NEW) // 16) for length in LENS)
    assert_same_tokens(greedy(page_size=16, num_pages=needed), expected())
    monkeypatch.setattr(generation, "Run", None)
    with pytest.raises(OutOfPages, match=rf"num_pages must be at least {needed} .* got {needed - 1}"):
        greedy(page_size=16, num_pages=needed - 1)


def test_allocator_takes_all_or_nothing():
    pages = PageAllocator(5)
    taken = pages.take(3)
    with pytest.raises(OutOfPages, match="3 pages are needed and 2 of 5 are free"):
        pages.take(3)
    assert pages.num_free == 2
    assert sorted(taken + pages.take(2)) == list(range(5))
    pages.give_back(taken)
    assert sorted(pages.take(3)) == sorted(taken)


def test_no_prompts():
    assert greedy([]) == []


BAD = {
    "too_long": (dict(prompts=[prompt(4091)]), r"length \+ max_new_tokens must be at most .* 4096, got 4091 \+ 6"),
    "token_256": (dict(prompts=[np.array([1, 256])]), r"prompts\[0\]'s tokens must be in 0..255, got \[256\]"),
    "token_-1": (dict(prompts=[prompt(3), np.array([-1])]), r"prompts\[1\]'s tokens must be in 0..255, got \[-1\]"),
    "empty": (dict(prompts=[np.array([], np.int32)]), r"prompts\[0\] must be a 1-D array of at least one token"),
    "two_axes": (dict(prompts=[np.zeros((1, 4), np.int32)]), r"prompts\[0\] must be a 1-D array"),
    "float": (dict(prompts=[np.ones(4)]), r"prompts\[0\]'s dtype must be an integer type, got float64"),
    "max_new_tokens": (dict(max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
    "page_size": (dict(page_size=0), "page_size must be at least 1, got 0"),
    "prefill_chunk": (dict(prefill_chunk=0), "prefill_chunk must be at least 1, got 0"),
    "cache_dtype": (dict(cache_dtype="int8"), "cache_dtype must be 'float32' or .* or 'float8_e4m3fn', got 'int8'"),
    "temperature": (dict(temperature=-1.0), "temperature must be at least 0 and finite, got -1.0"),
    "temperature_nan": (dict(temperature=float("nan")), "temperature must be at least 0 and finite, got nan"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_bad_input(options, message, as_user):
    with pytest.raises(ValueError, match=message):
        greedy(**options)


def test_unknown_implementation_names_the_legal_ones(as_user):
    with pytest.raises(ValueError, match="implementation must be None or one of 'hopper', 'portable', 'xla', got"):
        greedy(implementation="fast")
