"""Who takes part in a step, without a model: order, limits, pages, and that everyone comes to an end."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_jax.pages import PagePool
from dsa_jax.requests import Request
from dsa_jax.sampling import Sampling
from dsa_jax.scheduler import Scheduler


def new_request(pool, id, prompt, new):
    text = np.zeros(len(prompt) + new, np.int32)
    text[: len(prompt)] = prompt
    return Request(
        id=id,
        text=text,
        prompt_tokens=len(prompt),
        sampling=Sampling(),
        stop=frozenset(),
        drafts=0,
        on_token=None,
        lease=pool.lease(),
        length=len(prompt),
    )


def advance(scheduler, plan, accepted):
    """What an engine does with a step: the chunks are written, and requests get 1 + accepted tokens."""
    finished = []
    for request, rows in plan.chunks:
        request.written += rows
    for request in plan.requests:
        if request in plan.decoding or request.written == request.length:
            request.append([request.length % 3] * (1 + (accepted if request in plan.decoding else 0)))
        request.lease.publish(request.text[: request.length], request.written)
        if request.finish is not None:
            scheduler.retire(request)
            finished.append(request.id)
    return finished


sizes = st.tuples(st.integers(1, 30), st.integers(1, 12))


@settings(max_examples=80, deadline=None)
@given(
    requests=st.lists(sizes, min_size=1, max_size=12),
    slots=st.integers(1, 4),
    page_size=st.integers(1, 5),
    spare_pages=st.integers(0, 12),
    chunk=st.integers(1, 9),
    next_n=st.integers(1, 4),
    data=st.data(),
)
def test_everyone_ends_within_the_limits(requests, slots, page_size, spare_pages, chunk, next_n, data):
    longest = max(map(sum, requests))
    pool = PagePool(-(-longest // page_size) + spare_pages, page_size, lookahead=int(next_n > 1))
    request_chunk = data.draw(st.integers(1, chunk))
    max_keys = longest + chunk
    scheduler = Scheduler(
        pool, max_requests=slots, prefill_chunk=chunk, request_chunk=request_chunk, next_n=next_n, max_keys=max_keys
    )
    alphabet, finished, steps = np.random.default_rng(0), [], 0
    for id, (length, new) in enumerate(requests):
        prompt = alphabet.integers(0, 2, length)  # so that prefixes are shared now and then
        scheduler.waiting.append(new_request(pool, id, prompt, new))
    while scheduler.busy:
        plan = scheduler.plan()
        assert plan.requests, "a step without work while requests wait"
        first = min(request.id for request in [*scheduler.running, *scheduler.waiting])
        assert first in [request.id for request in plan.requests], "the first to come is never put off"
        assert sum(rows for _, rows in plan.chunks) <= chunk and sum(plan.contexts) <= max_keys
        assert all(1 <= rows <= request_chunk for _, rows in plan.chunks)
        taken = [request.slot for request in plan.requests]
        assert len(set(taken)) == len(taken) and all(0 <= slot < slots for slot in taken)
        for request in plan.requests:
            assert request.lease.capacity >= min(request.length + next_n, request.limit)
            writing = request.lease.pages[request.written // page_size :]
            assert all(pool._holders[page] == 1 for page in writing), "a page that is written is nobody else's"
        finished += advance(scheduler, plan, data.draw(st.integers(0, next_n - 1)))
        steps += 1
        assert steps < 2000
    assert sorted(finished) == list(range(len(requests)))
    assert pool.num_free == pool.num_pages and scheduler.slots == [None] * slots


def test_a_long_prompt_leaves_rows_for_others():
    pool = PagePool(100, 4)
    scheduler = Scheduler(pool, max_requests=3, prefill_chunk=8, request_chunk=5, next_n=1, max_keys=300)
    for id, length in enumerate((100, 3, 40)):
        scheduler.waiting.append(new_request(pool, id, [id] * length, 1))
    plan = scheduler.plan()
    assert [(request.id, rows) for request, rows in plan.chunks] == [(0, 5), (1, 3)]


def test_keys_of_all_chunks_are_limited():
    pool = PagePool(100, 4)
    scheduler = Scheduler(pool, max_requests=3, prefill_chunk=60, request_chunk=60, next_n=1, max_keys=70)
    for id, length in enumerate((40, 30, 5)):
        scheduler.waiting.append(new_request(pool, id, [id] * length, 1))
    assert [request.id for request, _ in scheduler.plan().chunks] == [0, 1]
