"""Texts from prompts, and runs whose caller feeds the tokens: one answer, whatever the chunks, pages and devices."""

import functools
import importlib

import golden_data as golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from serving_cases import LENS, NEW, PROMPTS, new_engine, prompt, serve, small, solo, texts
from tolerances import GOLDEN_LOGITS

from dsa_jax.checkpoint import load_model
from dsa_jax.context import PagedDecode, PagedMixed, PagedPrefill, Stripes
from dsa_jax.generate import OutOfPages, Run, chunks, generate
from dsa_jax.model import parameter_sharding

generation = importlib.import_module("dsa_jax.generate")  # dsa_jax.generate may be the function


def greedy(prompts=PROMPTS, **options):
    options = dict(max_new_tokens=NEW, cache_dtype="float32", prefill_chunk=64) | options
    return [tokens.tolist() for tokens in generate(small(), prompts, **options)]


def expected():
    return [solo(length) for length in LENS]


@pytest.mark.parametrize("name", golden.NAMES)
def test_cached_steps_golden(name):
    """48 tokens prefilled in chunks and 16 decoded one by one: transformers' logits, and its selection in every layer.

    All steps are mixed ones, in one program: first chunks without rows that decode, then these with an empty chunk.
    """
    model = load_model(golden.FOLDER / name, latent_norm_eps=golden.TRANSFORMERS_LATENT_EPS)
    want, options, size = golden.outputs(name), model.options(), 40
    tokens = want["input_ids"]
    table = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
    forward = jax.jit(model.forward)
    caches, nobody = model.new_caches(8, 16, jnp.dtype("float32")), jnp.zeros(2, jnp.int32)

    def step(decoded, decode_lens, chunk, positions, request, seq_lens):
        nonlocal caches
        decode = PagedDecode(table, decode_lens, 1, options)
        prefill = PagedPrefill(*map(jnp.asarray, (positions, request)), table, jnp.asarray(seq_lens), 200, options)
        out = forward(jnp.concatenate([decoded, jnp.asarray(chunk)]), PagedMixed(decode, prefill), caches)
        caches = out.caches
        return out

    for chunk in chunks(list(tokens[:, :48]), size, model.config.index_topk):
        out = step(nobody, nobody, chunk.tokens, chunk.positions, chunk.request, chunk.seq_lens)
        for request, row in enumerate(chunk.last_rows):
            if row >= 0:
                logits = model.logits(out.hidden[2 + row][None])[0]
                np.testing.assert_allclose(logits, want["prefill_logits"][request, -1], atol=GOLDEN_LOGITS, rtol=0)
    padding = np.zeros(size, np.int32), np.zeros(size, np.int32), np.full(size, -1, np.int32), np.zeros(2, np.int32)
    for number in range(16):
        out = step(jnp.asarray(tokens[:, 48 + number]), jnp.full(2, 49 + number, jnp.int32), *padding)
        logits = model.logits(out.hidden[:2])
        np.testing.assert_allclose(logits, want["decode_logits"][:, number], atol=GOLDEN_LOGITS, rtol=0)
        for layer, indices in enumerate(out.indices):
            chosen = np.sort(want[f"decode_topk_idx_{layer}"][:, number], axis=-1)
            np.testing.assert_array_equal(indices[:2], chosen, err_msg=f"layer {layer}, step {number}")


def test_prompts_together_are_prompts_alone():
    """In another order too; short prompts first run dense."""
    seen = []
    assert greedy(progress=lambda *stage: seen.append(stage)) == expected()
    assert seen[-2:] == [("prefill", 209, 209), ("decode", 24, 24)]
    assert greedy(PROMPTS[::-1]) == expected()[::-1]


def test_temperature_depends_on_seed_and_place_only():
    draw = functools.partial(greedy, temperature=1.5, seed=7)
    together = draw()
    assert draw() == together
    assert draw([*PROMPTS[:3], prompt(13, seed=1)])[:3] == together[:3]
    assert greedy(temperature=1.5, seed=8)[0] != together[0] != expected()[0]
    assert greedy(temperature=1.5, seed=7, top_k=1) == expected()


def test_stop_token_ends_one_request_only():
    want = expected()
    stop = want[0][2]
    cut = [new[: new.index(stop) + 1] if stop in new else new for new in want]
    assert len(cut[0]) <= 3
    assert greedy(stop_tokens=[stop]) == cut


def test_out_of_pages_before_anything_runs(monkeypatch):
    needed = sum(-(-(length + NEW) // 64) for length in LENS)
    assert greedy(num_pages=needed) == expected()
    monkeypatch.setattr(generation, "Engine", None)
    with pytest.raises(OutOfPages, match=rf"num_pages must be at least {needed} .* got {needed - 1}"):
        greedy(num_pages=needed - 1)


def test_a_budget_is_not_allocated_beyond_what_the_prompts_need():
    assert greedy(cache_bytes=10**15) == expected()


def test_no_prompts():
    assert greedy([]) == []


@pytest.mark.parametrize("page_size", [1, 61])
def test_pages(page_size):
    """A prompt of one token is a decode step from the start: one program a page size."""
    want = solo(1, 5, new=70)
    engine = new_engine(page_size=page_size, max_len=80, num_pages=-(-80 // page_size), max_requests=1)
    assert texts(serve(engine, [prompt(1, 5)], max_new_tokens=70)) == [want]
    assert [kind for kind, _ in engine.stats.programs] == ["decode"]


def test_tp_rows_striped_selection():
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
    engine = new_engine(stripes=Stripes(mesh, "tp", stripe=8, combine="all_gather"))
    assert texts(serve(engine, PROMPTS, max_new_tokens=1)) == [text[:1] for text in expected()]


def test_tensor_parallel_weights():
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    graph, state = nnx.split(small())
    placed = [
        (path, variable.replace(jax.device_put(value, parameter_sharding(small().config, mesh, path, value.shape))))
        for path, variable in nnx.to_flat_state(state)
        for value in [variable.get_value()]
    ]
    model = nnx.merge(graph, nnx.from_flat_state(placed))
    engine = new_engine(model, stripes=Stripes(mesh, "tp", stripe=8))
    assert texts(serve(engine, PROMPTS)) == expected()


def test_chunk_equiv_selection_and_two_programs():
    """Chunked prefill selects, bit for bit, what the whole sequence does, dense first chunk aside, in two programs."""
    model, start, kept = small(), PROMPTS[2], []
    generation._prefill_step.clear_cache()
    run = Run(
        model, [len(start)], page_size=16, cache_dtype="float32", num_pages=None, options=model.options(stripes=None)
    )
    run.prefill([start], 7, lambda *_: None, lambda step, indices: kept.append((step, indices[0])))
    assert generation._prefill_step._cache_size() == 2
    assert [step.dense for step, _ in kept] == [True] + [False] * 18
    assert kept[0][1] is None
    got = np.concatenate([indices[: step.num_rows] for step, indices in kept[1:]])
    np.testing.assert_array_equal(got, model.run(jnp.asarray(start)[None]).indices[0][7:])


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
    "top_p": (dict(top_p=0.0), "top_p must be more than 0 and at most 1, got 0.0"),
    "drafts": (dict(drafts=6), "drafts must be in 0..5, got 6"),
    "both_budgets": (dict(num_pages=9, cache_bytes=10**9), "num_pages and cache_bytes must be one number and one None"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_bad_input(options, message, as_user):
    with pytest.raises(ValueError, match=message):
        greedy(**options)


def test_unknown_implementation_names_the_legal_ones(as_user):
    with pytest.raises(ValueError, match="implementation must be None or one of 'hopper', 'portable', 'xla', got"):
        greedy(implementation="fast")
