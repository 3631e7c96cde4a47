"""Drafts of the multi-token prediction layer: the same text in fewer steps, and the drafts that the layer must give."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from serving_cases import LENS, NEW, PROMPTS, new_engine, prompt, serve, small, solo, texts

from bench import soak
from dsa_jax.batch import run_step
from dsa_jax.context import Sequences
from dsa_jax.model import CausalLM
from dsa_jax.sampling import Sampling

DRAFTS = 3


def test_the_same_texts_with_any_number_of_drafts():
    """Requests that accept 0 to 3 drafts side by side, in two programs."""
    want = [solo(length) for length in LENS]
    programs, engine = run_step._cache_size(), new_engine(drafts=DRAFTS)
    for drafts in range(DRAFTS + 1):
        assert texts(serve(engine, PROMPTS, drafts=drafts)) == want
    ids = [
        engine.add(start, max_new_tokens=NEW, drafts=drafts)
        for start, drafts in zip(PROMPTS, (1, 0, 3, 2), strict=True)
    ]
    engine.run()
    outputs = [engine.take(id) for id in ids]
    assert texts(outputs) == want
    assert outputs[1].verified == 0 and outputs[1].acceptance_length == 1.0
    longest = prompt(256 - NEW)  # the last drafts would be past the end of the block table
    assert texts(serve(engine, [longest])) == [solo(256 - NEW)]
    assert run_step._cache_size() <= programs + 2
    assert engine.pages.num_free == engine.pages.num_pages


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.5, 0, 0.95, 5)], ids=["greedy", "drawn"])
def test_every_pattern_of_right_and_wrong_drafts(sampling):
    """Drafts put in by hand, the first `right` of them right: each step gives right + 1 tokens of the same text."""
    long = 40
    want = texts(serve(new_engine(), [PROMPTS[1]], max_new_tokens=long, sampling=sampling))[0]
    engine = new_engine(drafts=DRAFTS)
    id = engine.add(PROMPTS[1], max_new_tokens=long, sampling=sampling)
    company = engine.add(PROMPTS[2], max_new_tokens=long)  # another request, with its own drafts
    request, pattern, given = engine._requests[id], [3, 0, 2, 1, 3, 3, 0, 0, 2], []
    engine.step()  # the prompts of 61 and 130 tokens take three steps
    while request.length == request.prompt_tokens:
        engine.step()
    for right in pattern:
        done = request.length - request.prompt_tokens
        drafts = want[done : done + DRAFTS]
        drafts[right:] = [(token + 1) % 256 for token in drafts[right:]]
        request.drafted = tuple(drafts)
        given.append(len(engine.step()[id]))
        if right in (0, 2):  # what comes next is drafted from the row of the last right draft, in every slot its own
            so_far = request.text[: request.length - 1]
            assert request.drafted == drafts_after(new_engine(drafts=DRAFTS), so_far, sampling=sampling)
    assert given == [right + 1 for right in pattern]
    assert (request.verified, request.accepted) == (len(pattern), sum(pattern))
    engine.run()
    assert engine.take(id).tokens.tolist() == want
    assert engine.take(company).tokens[:NEW].tolist() == solo(130)


def test_the_text_ends_inside_accepted_drafts():
    want = solo(61)
    stop = next(token for place, token in enumerate(want) if place >= 1 and token not in want[:place])
    for options, end in ((dict(stop_tokens=[stop]), want.index(stop) + 1), (dict(max_new_tokens=3), 3)):
        engine = new_engine(drafts=DRAFTS)
        id = engine.add(PROMPTS[1], **(dict(max_new_tokens=NEW) | options))
        engine.step()
        engine._requests[id].drafted = tuple(want[1 : 1 + DRAFTS])
        engine.run()
        assert engine.take(id).tokens.tolist() == want[:end]


def drafts_after(engine, start, cut=None, **options) -> tuple[int, ...]:
    """What is drafted beside the first token after `start`, of which `cut` tokens were known."""
    id = engine.add(start, max_new_tokens=NEW, **options)
    while engine.output(id).tokens.size == 0:
        engine.step()
    drafted = engine._requests[id].drafted
    engine.cancel(id)
    assert engine.take(id).reused == (cut or 0)
    return drafted


def test_reused_pages_draft_as_computed_ones_do():
    """The last key of a page is made from the next token too: a text that goes on in another way must not use it."""
    start = prompt(100)
    other = start.copy()
    other[48] = (other[48] + 1) % 256  # the first token of the fourth page
    want = [drafts_after(new_engine(drafts=DRAFTS), text) for text in (start, other)]
    engine = new_engine(drafts=DRAFTS)
    assert drafts_after(engine, start) == want[0]
    assert drafts_after(engine, start, cut=96) == want[0]
    assert drafts_after(engine, other, cut=32) == want[1]


def test_a_dense_prefill_drafts_the_same():
    """The layer itself scores there too."""
    engine = new_engine(drafts=DRAFTS, dense_prefill=True)
    assert drafts_after(engine, prompt(9)) == drafts_after(new_engine(drafts=DRAFTS), prompt(9))
    assert {kind for kind, _ in engine.stats.programs} == {"dense"}


@pytest.mark.parametrize("shares", [True, False], ids=["index_share", "own_selection"])
def test_drafts_against_the_layer_over_whole_sequences(shares):
    """Recycled hidden states after the shared head's norm; the first draft's indices, or a selection of their own."""
    config = dataclasses.replace(small().config, index_share_for_mtp_iteration=shares)
    model = small() if shares else CausalLM(config, rngs=nnx.Rngs(0))
    start = prompt(40, seed=3)
    engine = new_engine(model, drafts=DRAFTS)
    id = engine.add(start, max_new_tokens=NEW)
    first = engine.step()[id][0]
    assert engine._requests[id].drafted == reference_drafts(model, start, first, shares)


def reference_drafts(model, start, first, shares) -> tuple[int, ...]:
    length, rows = len(start), len(start) + DRAFTS
    hidden = jnp.pad(model.run(jnp.asarray(start)[None]).hidden, ((0, DRAFTS), (0, 0)))
    tokens = jnp.asarray(np.concatenate([start[1:], [first], np.zeros(DRAFTS, np.int32)]).astype(np.int32))

    @jax.jit
    def layer(tokens, hidden, indices=None):
        context = Sequences.of_batch(1, rows, model.options(reuse_indices=indices is not None))
        out, _, indices = model.draft(tokens, hidden, context, None, indices)
        return out, model.logits(out), indices

    drafts, kept = [], None
    for row in range(length - 1, length - 1 + DRAFTS):
        out, logits, indices = layer(tokens, hidden, kept)
        if shares and kept is None:
            kept = jnp.where(jnp.arange(rows)[:, None] < length, indices, indices[length - 1][None])
        drafts.append(int(jnp.argmax(logits[row])))
        tokens, hidden = tokens.at[row + 1].set(drafts[-1]), hidden.at[row + 1].set(out[row])
    return tuple(drafts)


def test_a_model_without_the_layer_refuses(as_user):
    config = dataclasses.replace(small().config, num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match="drafts must be 0: the model has no multi-token prediction layer, got 1"):
        new_engine(CausalLM(config, rngs=None), drafts=1)


def test_soak():
    """60 random requests; `python -m bench soak` has 2000 of up to 4000 tokens."""
    requests = soak.cases(60, 256, 200, 12, DRAFTS, np.random.default_rng(1))
    report = soak.soak(lambda: new_engine(drafts=DRAFTS), requests)
    assert report.ok, report
    assert report.programs <= 2
    assert {"length", "stop", "cancelled"} == set(report.finishes)
    assert report.reused > 0 and report.acceptance_length > 1.0
