"""Many requests over one set of pages: every text is what the request writes alone, whatever happens around it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving_cases import LENS, NEW, PROMPTS, SHAPES, new_engine, prompt, serve, small, solo, texts

from dsa_jax.batch import Batch, ChunkRows, DecodeRows, run_step
from dsa_jax.engine import _widths
from dsa_jax.pages import OutOfPages
from dsa_jax.sampling import Sampling, SamplingRows

FREE = SHAPES["num_pages"]


@pytest.fixture
def engine():
    """Fresh, and empty of requests and pages at the end."""
    engine = new_engine()
    yield engine
    engine.run()
    assert engine.pages.num_free == FREE and not any(engine._scheduler.slots)


def alone(lens=LENS):
    return [solo(length) for length in lens]


def test_alone_is_the_argmax_of_the_whole_sequence():
    model = small()
    for start, new in [(PROMPTS[1], solo(61)), (PROMPTS[2], solo(130))]:
        logits = model(jnp.asarray(np.concatenate([start, np.array(new, np.int32)]))[None])[0]
        np.testing.assert_array_equal(new, jnp.argmax(logits[len(start) - 1 : -1], axis=-1))


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_batched_and_chunked_in_two_programs(chunk):
    """Four requests over three slots, prompts cut anywhere: two programs, whatever the traffic."""
    solo(LENS[0])
    programs = run_step._cache_size()
    engine = new_engine(request_chunk=chunk)
    assert texts(serve(engine, PROMPTS)) == alone()
    assert texts(serve(engine, [prompt(1, 4), prompt(3, 4)])) == [solo(1, 4), solo(3, 4)]
    assert engine.stats.programs == {("mixed", 16), ("decode", 16)}
    assert run_step._cache_size() == programs
    assert engine.stats.produced == 6 * NEW and engine.stats.preempted == 0


def test_arrivals_in_any_step(engine):
    ids = [engine.add(PROMPTS[2], max_new_tokens=NEW)]
    for start in PROMPTS[:2]:
        engine.step()
        ids.append(engine.add(start, max_new_tokens=NEW))
    engine.run()
    assert texts([engine.take(id) for id in ids]) == [solo(130), solo(5), solo(61)]


def test_a_known_prefix_is_not_computed_again(engine):
    """The pages of a text are used by another that begins in the same way, also while the first one is running."""
    longer = np.concatenate([PROMPTS[2], prompt(7, seed=2)])
    want = texts(serve(new_engine(), [longer]))[0]
    first = engine.add(PROMPTS[2], max_new_tokens=40)
    while engine.output(first).tokens.size < 2:
        engine.step()
    held = list(engine._requests[first].lease.pages)
    second = engine.add(longer, max_new_tokens=NEW)
    engine.step()
    shared = engine._requests[second].lease.pages
    assert shared[:8] == held[:8] and set(shared[8:]).isdisjoint(held)
    engine.run()
    first, second = engine.take(first), engine.take(second)
    assert (first.reused, second.reused) == (0, 128)
    assert first.tokens[:NEW].tolist() == solo(130) and second.tokens.tolist() == want
    again = serve(engine, [PROMPTS[2]])[0]
    assert again.reused == 128 and again.tokens.tolist() == solo(130)
    assert engine.stats.prefilled == 130 + 9 + 2 and engine.stats.reused == 2 * 128


def test_a_conversation_reuses_what_was_written_before(engine):
    """The next turn's prompt is the last one, its answer and more: the answer's full pages are known too."""
    first = serve(engine, [PROMPTS[1]], max_new_tokens=30)[0]
    turn = np.concatenate([PROMPTS[1], first.tokens, prompt(4)])
    second = serve(engine, [turn])[0]
    assert second.reused == (61 + 29) // 16 * 16
    assert second.tokens.tolist() == texts(serve(new_engine(), [turn]))[0]


def test_cancelled_neighbours_change_nothing_and_free_their_pages(engine):
    keep = engine.add(PROMPTS[1], max_new_tokens=NEW)
    waiting = [engine.add(prompt(200, seed), max_new_tokens=50) for seed in range(4)]
    engine.cancel(waiting[3])  # before it was taken up
    engine.step()
    engine.cancel(waiting[0])  # in its prefill
    for _ in range(6):
        engine.step()
    engine.cancel(waiting[1])
    engine.cancel(waiting[2])
    engine.run()
    assert engine.take(keep).tokens.tolist() == solo(61)
    assert {engine.take(id).finish for id in waiting} == {"cancelled"}
    assert engine.pages.num_free == FREE


def test_a_full_cache_makes_requests_wait_and_give_their_pages_back(engine):
    """Three requests that need 16, 10 and 10 of 24 pages in the end: the last one is put off and computed again."""
    wanted = [(160, 90), (70, 90), (70, 90)]
    want = [solo(length, seed, new) for seed, (length, new) in enumerate(wanted)]
    ids = [engine.add(prompt(length, seed), max_new_tokens=new) for seed, (length, new) in enumerate(wanted)]
    engine.run()
    assert texts([engine.take(id) for id in ids]) == want
    assert engine.stats.preempted > 0
    assert {kind for kind, _ in engine.stats.programs} == {"mixed", "decode"}


def test_draws_depend_on_the_request_only(engine):
    draws = [Sampling(1.5, 0, 1.0, 7), Sampling(1.5, 20, 1.0, 7), Sampling(2.0, 0, 0.8, 9), Sampling()]
    together = [engine.add(PROMPTS[1], max_new_tokens=NEW, sampling=draw) for draw in draws]
    engine.run()
    together = texts([engine.take(id) for id in together])
    assert together == [texts(serve(new_engine(), [PROMPTS[1]], sampling=draw))[0] for draw in draws]
    assert together[3] == solo(61) and len({tuple(text) for text in together}) >= 3
    other = texts(serve(engine, [PROMPTS[1]], sampling=Sampling(1.5, 0, 1.0, 8)))[0]
    assert other != together[0]


def test_stop_tokens_and_lengths(engine):
    text = solo(61)
    stop = text[2]
    end = text.index(stop) + 1
    ids = [
        engine.add(PROMPTS[1], max_new_tokens=NEW, stop_tokens=[stop]),
        engine.add(PROMPTS[1], max_new_tokens=1),
        engine.add(PROMPTS[2], max_new_tokens=NEW, stop_tokens=[]),
    ]
    engine.run()
    outputs = [engine.take(id) for id in ids]
    assert texts(outputs) == [text[:end], text[:1], solo(130)]
    assert [output.finish for output in outputs] == ["stop", "length", "length"]


def test_nothing_to_do(engine):
    assert engine.step() == {} and not engine.busy
    engine.run()
    id = engine.add(PROMPTS[0], max_new_tokens=NEW)
    engine.cancel(id)
    assert engine.step() == {} and list(engine.stream(id)) == [] and engine.take(id).finish == "cancelled"


def test_stream_and_callbacks(engine):
    heard = []
    first = engine.add(PROMPTS[1], max_new_tokens=NEW, on_token=lambda id, token: heard.append((id, token)))
    second = engine.add(PROMPTS[0], max_new_tokens=NEW)
    stream = engine.stream(second)
    assert next(stream) == solo(5)[0]
    engine.step()
    assert list(stream) == solo(5)[1:]
    engine.run()
    assert heard == [(first, token) for token in solo(61)]
    assert list(engine.stream(first)) == solo(61)


def test_a_callback_that_raises_ends_its_own_request_only(engine):
    def fail(id, token):
        raise RuntimeError("the client has gone")

    bad = engine.add(PROMPTS[0], max_new_tokens=NEW, on_token=fail)
    good = engine.add(PROMPTS[1], max_new_tokens=NEW)
    with pytest.raises(RuntimeError, match="the client has gone"):
        engine.run()
    engine.run()
    assert engine.take(bad).finish == "cancelled" and engine.take(good).tokens.tolist() == solo(61)


BAD = {
    "empty": (dict(prompt=[]), r"prompt must be a 1-D array of at least one token, got shape \[0\]"),
    "token": (dict(prompt=[3, 256]), r"prompt's tokens must be in 0..255, got \[256\]"),
    "negative": (dict(prompt=[-1]), r"prompt's tokens must be in 0..255, got \[-1\]"),
    "axes": (dict(prompt=np.zeros((1, 2), np.int32)), "prompt must be a 1-D array"),
    "float": (dict(prompt=[1.5]), "prompt's dtype must be an integer type, got float64"),
    "too_long": (dict(prompt=prompt(251)), r"length \+ max_new_tokens must be at most max_len = 256, got 251 \+ 6"),
    "no_tokens": (dict(max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
    "drafts": (dict(drafts=1), "drafts must be in 0..0, the engine's, got 1"),
}


def test_bad_requests_harm_no_neighbour(engine, as_user):
    running = engine.add(PROMPTS[1], max_new_tokens=NEW)
    for options, message in BAD.values():
        engine.step()
        with pytest.raises(ValueError, match=message):
            engine.add(**(dict(prompt=PROMPTS[0], max_new_tokens=NEW) | options))
    with pytest.raises(ValueError, match="id must be of a request that was added and not taken, got 99"):
        engine.cancel(99)
    assert engine.output(running).tokens.tolist() == solo(61)
    few = new_engine(num_pages=4)  # never steps: compiles nothing
    with pytest.raises(OutOfPages, match=r"the pages of 61 \+ 6 tokens must be at most 4, the pages there are, got 5"):
        few.add(PROMPTS[1], max_new_tokens=NEW)
    with pytest.raises(ValueError, match="request 0 must be finished, got not finished"):
        id = few.add(PROMPTS[0], max_new_tokens=NEW)
        few.take(id)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_requests=0), "max_requests must be at least 1, got 0"),
        (dict(max_len=4097), "max_len must be at most max_position_embeddings = 4096, got 4097"),
        (dict(page_size=0), "page_size must be at least 1, got 0"),
        (dict(num_pages=None), r"num_pages and cache_bytes must be one number and one None, got \(None, None\)"),
        (dict(cache_bytes=10**9), "num_pages and cache_bytes must be one number and one None"),
        (dict(num_pages=None, cache_bytes=9), "cache_bytes must be at least .*, the bytes of one page, got 9"),
        (dict(cache_dtype="int8"), "cache_dtype must be 'float32' or 'bfloat16' or 'float8_e4m3fn', got 'int8'"),
        (dict(prefill_chunk=0), "prefill_chunk must be at least 1, got 0"),
        (dict(request_chunk=65), "request_chunk must be in 1..64, got 65"),
        (dict(drafts=6), "drafts must be in 0..5, got 6"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_bad_engine(options, message, as_user):
    with pytest.raises(ValueError, match=message):
        new_engine(**options)


def test_budget_in_bytes():
    engine = new_engine(num_pages=None, cache_bytes=10_000_000)
    config = small().config
    assert engine.bytes_per_token == 4 * (config.latent_dim + config.index_head_dim)
    assert engine.pages.num_pages == 10_000_000 // (16 * engine.bytes_per_token)
    with_mtp = new_engine(drafts=1)
    assert with_mtp.bytes_per_token == 2 * engine.bytes_per_token


def test_poison_in_pages_is_never_read(engine):
    """Whatever pages hold that no text has written: rows of earlier texts, NaN."""
    engine._caches = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), engine._caches)
    assert texts(serve(engine, PROMPTS)) == alone()


def test_a_step_of_padding_writes_nothing():
    """Slots with pages and without a request, rows without a slot: every byte of the caches stays."""
    engine, nobody, rows = new_engine(), np.zeros(3, np.int32), np.zeros(64, np.int32)
    batch = Batch(
        block_table=np.arange(48, dtype=np.int32).reshape(3, 16) % FREE,
        sampling=SamplingRows.of([Sampling()] * 3),
        decode=DecodeRows(nobody[:, None], nobody, nobody),
        chunk=ChunkRows(rows, rows, rows, rows - 1, nobody, nobody - 1),
    )
    poisoned = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), engine._caches)
    _, caches = run_step(engine._skeleton, engine._arrays, batch, poisoned, 1, 16 * 16 + 64, engine._options)
    assert all(np.isnan(x).all() for x in jax.tree.leaves(caches))


def test_a_step_does_not_ask_the_host(engine, monkeypatch):
    lowered = []

    def record(*arguments):
        lowered.append(run_step.lower(*arguments).as_text())
        return run_step(*arguments)

    monkeypatch.setattr("dsa_jax.engine.run_step", record)
    engine.add(PROMPTS[3], max_new_tokens=1)
    engine.run()
    assert len(lowered) == 1
    assert not any(word in lowered[0] for word in ("callback", "infeed", "outfeed"))
    assert lowered[0].count("tf.aliasing_output") + lowered[0].count("jax.buffer_donor") == len(
        jax.tree.leaves(engine._caches)
    )


def test_widths_of_the_block_table():
    assert _widths(16, 16) == [16] and _widths(8192 // 64, 64) == [128]
    assert _widths(65536 // 64, 64) == [64, 1024]
    assert _widths(1048576 // 64, 64) == [64, 1024, 16384]
