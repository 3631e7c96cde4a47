"""Many requests over one set of paged caches: what a server would wrap.

Every step computes the next token of all requests whose prompts are done, and as many rows of the prompts that are not
as the step has room for, in one program (`dsa_jax.batch`). Requests are taken up in the order they came, as soon as a
slot and the pages of their text so far are free, and get more pages as they grow. If there are none to get, the
request that was taken up last gives its pages back and waits; what it has written is computed again later, but for the
pages that nobody has overwritten. Requests whose texts begin in the same way share full pages (`dsa_jax.pages`).
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsa_jax.batch import Batch, Caches, ChunkRows, DecodeRows, run_step
from dsa_jax.cache import CACHE_DTYPES
from dsa_jax.checks import refuse, require
from dsa_jax.config import DsaConfig
from dsa_jax.context import Stripes
from dsa_jax.model import CausalLM, new_cache
from dsa_jax.pages import OutOfPages, PagePool, bytes_per_token, pages_within
from dsa_jax.requests import OnToken, Output, Request, check_length, check_prompt
from dsa_jax.sampling import Sampling, SamplingRows
from dsa_jax.scheduler import Plan, Scheduler
from dsa_jax.skeleton import Skeleton, build, mesh_of, place

MAX_DRAFTS = 5
FIRST_WIDTH, WIDTH_FACTOR = 4096, 16  # tokens that the narrowest block table reaches; each is so many times wider


@dataclasses.dataclass
class Stats:
    """Counts since the engine was made.

    steps: of them, those with rows of prompts are prefill_steps.
    prefilled, reused: tokens of prompts that were computed, and that were not because their pages were known.
    produced: new tokens. preempted: times that a request gave its pages back.
    verified: drafts' verifications, one a request and step. accepted: drafts that were right.
    programs: which programs ran: "decode", "mixed" or "dense", and the width of the block table.
    """

    steps: int = 0
    prefill_steps: int = 0
    prefilled: int = 0
    reused: int = 0
    produced: int = 0
    preempted: int = 0
    verified: int = 0
    accepted: int = 0
    programs: set[tuple[str, int]] = dataclasses.field(default_factory=set)

    @property
    def acceptance_length(self) -> float:
        """Tokens that a verification gave on average, 1 to 1 + drafts; 1 where there was none."""
        return 1.0 + self.accepted / max(self.verified, 1)


class Engine:
    """Serves requests. Not thread-safe: one thread adds, steps and cancels."""

    def __init__(
        self,
        model: CausalLM,
        *,
        max_requests: int = 8,
        max_len: int | None = None,
        page_size: int = 64,
        num_pages: int | None = None,
        cache_bytes: int | None = None,
        cache_dtype: Any = "bfloat16",
        prefill_chunk: int = 512,
        request_chunk: int | None = None,
        drafts: int = 0,
        dense_prefill: bool = False,
        implementation: str | None = None,
        stripes: Stripes | None = None,
    ):
        """
        max_requests: slots, the requests that a step can compute.
        max_len: tokens of a prompt and its continuation at most; None for the model's max_position_embeddings.
        num_pages, cache_bytes: of all caches together, on every device, allocated at once; give one. A page holds
            page_size tokens.
        cache_dtype: "float32", "bfloat16" or "float8_e4m3fn" (e4m3 latents and index keys with scales, bfloat16 rope).
        prefill_chunk: rows of prompts in a step.
        request_chunk: of these at most so many of one request; None for all.
        drafts: tokens that the multi-token prediction layer drafts in a step, 0 to 5.
        dense_prefill: rows of a step that only prefills requests of at most index_topk tokens attend in the dense form.
            It is faster and equal up to rounding, which then depends on the company.
        implementation: as the ops take it. stripes: divide prefill selection over a mesh axis.
        Raises ValueError for a bad argument and where the budget holds no page.
        """
        config = model.config
        max_len = config.max_position_embeddings if max_len is None else max_len
        request_chunk = prefill_chunk if request_chunk is None else request_chunk
        _check_sizes(max_requests=max_requests, max_len=max_len, page_size=page_size, prefill_chunk=prefill_chunk)
        longest = config.max_position_embeddings
        require(max_len <= longest, "max_len", max_len, f"at most max_position_embeddings = {longest}")
        require(1 <= request_chunk <= prefill_chunk, "request_chunk", request_chunk, f"in 1..{prefill_chunk}")
        require_drafts(config, drafts)
        self.config, self.max_len, self.stats = config, max_len, Stats()
        self._next_n, self._chunk, self._dense = drafts + 1, prefill_chunk, dense_prefill
        self._options = model.options(implementation=implementation, stripes=stripes)
        make = functools.partial(_new_caches, model, page_size, cache_dtype_of(cache_dtype), drafts > 0)
        self.bytes_per_token = cached_bytes(model, cache_dtype, drafts)
        if cache_bytes is not None and num_pages is None:
            num_pages = pages_within(cache_bytes, page_size, self.bytes_per_token)
        elif cache_bytes is not None or num_pages is None:
            refuse("num_pages and cache_bytes", (num_pages, cache_bytes), "one number and one None")
        self.pages = PagePool(num_pages, page_size, lookahead=1 if drafts else 0)
        self._skeleton, arrays = Skeleton.of(model)
        mesh = stripes.mesh if stripes is not None else mesh_of(arrays)
        self._caches = build(lambda: make(num_pages), mesh)
        self._arrays = arrays if mesh_of(arrays) is not None else place(arrays, mesh)
        self._widths = _widths(-(-max_len // page_size), page_size)
        self._scheduler = Scheduler(
            self.pages,
            max_requests=max_requests,
            prefill_chunk=prefill_chunk,
            request_chunk=request_chunk,
            next_n=self._next_n,
            max_keys=self._widths[-1] * page_size + prefill_chunk,
        )
        self._requests: dict[int, Request] = {}
        self._next_id = 0

    @property
    def busy(self) -> bool:
        """Whether some request is not finished."""
        return self._scheduler.busy

    def add(
        self,
        prompt: Any,
        *,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),  # noqa: B008 frozen
        stop_tokens: Sequence[int] | None = None,
        drafts: int | None = None,
        on_token: OnToken | None = None,
    ) -> int:
        """Queues a request and returns its id.

        prompt: 1-D integer array of token ids, at least one.
        max_new_tokens: tokens to write at most.
        stop_tokens: token ids that end the text; None takes the model's eos_token_ids.
        drafts: how many of the engine's drafts this request may accept in a step; None for all. The text is the same.
        on_token: called with the id and each new token at the end of the step that made it.
        Raises ValueError for a bad argument, and OutOfPages, a ValueError, for a request that all pages could not hold.
        """
        prompt = check_prompt(self.config, "prompt", prompt)
        check_length("prompt", prompt, max_new_tokens, self.max_len, "max_len")
        drafts = self._next_n - 1 if drafts is None else drafts
        require(0 <= drafts < self._next_n, "drafts", drafts, f"in 0..{self._next_n - 1}, the engine's")
        limit = len(prompt) + max_new_tokens
        needed = -(-limit // self.pages.page_size)
        if needed > self.pages.num_pages:
            legal = f"at most {self.pages.num_pages}, the pages there are"
            raise OutOfPages(f"the pages of {len(prompt)} + {max_new_tokens} tokens must be {legal}, got {needed}")
        text = np.zeros(limit, np.int32)
        text[: len(prompt)] = prompt
        request = Request(
            id=self._next_id,
            text=text,
            prompt_tokens=len(prompt),
            sampling=sampling,
            stop=frozenset(self.config.eos_token_ids if stop_tokens is None else map(int, stop_tokens)),
            drafts=drafts,
            on_token=on_token,
            lease=self.pages.lease(),
            length=len(prompt),
        )
        self._next_id += 1
        self._requests[request.id] = request
        self._scheduler.waiting.append(request)
        return request.id

    def cancel(self, id: int) -> None:
        """Ends a request now and frees its pages. One that is finished stays as it is. Raises ValueError for no id."""
        request = self._known(id)
        if request.finish is None:
            request.finish = "cancelled"
            self._scheduler.retire(request)

    def output(self, id: int) -> Output:
        """A request so far. Raises ValueError for an id that is not there."""
        return self._known(id).output()

    def take(self, id: int) -> Output:
        """A finished request, which the engine forgets. Raises ValueError for one that runs or is not there."""
        request = self._known(id)
        require(request.finish is not None, f"request {id}", "not finished", "finished")
        del self._requests[id]
        return request.output()

    def stream(self, id: int) -> Iterator[int]:
        """The request's tokens from the first one on, as they come; steps the engine when there are none."""
        request, seen = self._known(id), 0
        while True:
            new = request.text[request.prompt_tokens + seen : request.length].tolist()
            yield from new
            seen += len(new)
            if not new and request.finish is not None:
                return
            if not new:
                self.step()

    def run(self) -> None:
        """Steps until every request is finished."""
        while self.busy:
            self.step()

    def step(self) -> dict[int, list[int]]:
        """Computes one step and returns the new tokens of every request that has some.

        Callbacks run when the engine is ready for the next step. If one raises, its request is cancelled, the others'
        callbacks run, and the error is raised.
        """
        plan = self._scheduler.plan()
        self.stats.reused, self.stats.preempted = self._scheduler.reused, self._scheduler.preempted
        if not plan.requests:
            return {}
        result = self._compute(plan)
        new = {}
        for request, rows in plan.chunks:
            request.written += rows
            self.stats.prefilled += rows
            if request.written == request.length:
                new[request.id] = self._append(request, result, drafted=0)
        for request in plan.decoding:
            new[request.id] = self._append(request, result, drafted=min(request.drafts, len(request.drafted)))
        for request in plan.requests:
            request.lease.publish(request.text[: request.length], request.written)
            if request.finish is not None:
                self._scheduler.retire(request)
        self._call_back(new)
        return new

    def _append(self, request: Request, result: Any, drafted: int) -> list[int]:
        accepted = int(result.accepted[request.slot])
        added = request.append(result.tokens[request.slot, : accepted + 1].tolist())
        request.drafted = tuple(result.drafts[request.slot].tolist())
        if drafted:
            for counts in (request, self.stats):
                counts.verified += 1
                counts.accepted += accepted
        self.stats.produced += len(added)
        return added

    def _compute(self, plan: Plan) -> Any:
        """Runs the step's program and returns its Result on the host."""
        slots, topk, contexts = self._scheduler.slots, self.config.index_topk, plan.contexts
        dense = self._dense and not plan.decoding and max(contexts) <= topk and sum(contexts) <= self._chunk + topk
        width, keys = self._width(plan.requests, 0 if dense else sum(contexts))
        table = np.full((len(slots), width), -1, np.int32)
        for request in plan.requests:
            table[request.slot, : len(request.lease.pages)] = request.lease.pages
        batch = Batch(
            block_table=table,
            sampling=SamplingRows.of([Sampling() if request is None else request.sampling for request in slots]),
            decode=None if dense else self._decode_rows(plan.decoding),
            chunk=self._chunk_rows(plan.chunks) if plan.chunks else None,
        )
        self.stats.programs.add(("dense" if dense else "mixed" if plan.chunks else "decode", width))
        self.stats.steps += 1
        self.stats.prefill_steps += bool(plan.chunks)
        options = dataclasses.replace(self._options, dense=dense)
        capacity = self._chunk + topk if dense else keys
        result, self._caches = run_step(
            self._skeleton, self._arrays, batch, self._caches, self._next_n, capacity, options
        )
        return jax.device_get(result)

    def _width(self, active: list[Request], keys: int) -> tuple[int, int]:
        """The narrowest block table for these requests and for prompts with so many keys; the keys it has room for."""
        pages = max(len(request.lease.pages) for request in active)
        for width in self._widths:
            capacity = width * self.pages.page_size + self._chunk
            if width >= pages and capacity >= keys:
                return width, capacity
        raise AssertionError(f"{pages} pages and {keys} keys were planned for")

    def _decode_rows(self, decoding: list[Request]) -> DecodeRows:
        slots = len(self._scheduler.slots)
        tokens = np.zeros((slots, self._next_n), np.int32)
        seq_lens, drafts = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        for request in decoding:
            guesses = request.drafted[: self._next_n - 1]
            tokens[request.slot, : 1 + len(guesses)] = (request.text[request.length - 1], *guesses)
            seq_lens[request.slot] = request.written + self._next_n
            drafts[request.slot] = min(request.drafts, len(guesses))
        return DecodeRows(tokens, seq_lens, drafts)

    def _chunk_rows(self, chunks: list[tuple[Request, int]]) -> ChunkRows:
        size, slots = self._chunk, len(self._scheduler.slots)
        tokens, positions, following = (np.zeros(size, np.int32) for _ in range(3))
        owner = np.full(size, -1, np.int32)
        seq_lens, last_rows = np.zeros(slots, np.int32), np.full(slots, -1, np.int32)
        start = 0
        for request, count in chunks:
            rows, end = slice(start, start + count), request.written + count
            text = request.text[request.written : end]
            tokens[rows], positions[rows], owner[rows] = text, np.arange(request.written, end), request.slot
            following[start : start + count - 1] = text[1:]
            seq_lens[request.slot] = end
            start += count
            if end < request.length:
                following[start - 1] = request.text[end]
            else:
                following[start - 1], last_rows[request.slot] = -1, start - 1
        return ChunkRows(tokens, positions, following, owner, seq_lens, last_rows)

    def _call_back(self, new: dict[int, list[int]]) -> None:
        errors = []
        for id, tokens in new.items():
            request = self._requests.get(id)
            if request is None or request.on_token is None:
                continue
            try:
                for token in tokens:
                    request.on_token(id, token)
            except Exception as error:
                errors.append(error)
                if id in self._requests:
                    self.cancel(id)
        if errors:
            raise errors[0]

    def _known(self, id: int) -> Request:
        if id not in self._requests:
            refuse("id", id, "of a request that was added and not taken")
        return self._requests[id]


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        require(size >= 1, name, size, "at least 1")


def cached_bytes(model: CausalLM, cache_dtype: Any, drafts: int) -> int:
    """What all caches hold for a token, the MTP layer's included where it drafts."""
    return bytes_per_token(jax.eval_shape(lambda: _new_caches(model, 1, cache_dtype_of(cache_dtype), drafts > 0, 1)))


def _new_caches(model: CausalLM, page_size: int, dtype: Any, has_mtp: bool, num_pages: int) -> Caches:
    mtp = new_cache(model.config, num_pages, page_size, dtype, True) if has_mtp else None
    return Caches(model.new_caches(num_pages, page_size, dtype), mtp)


def cache_dtype_of(dtype: Any) -> Any:
    """The dtype of caches that a dtype or its name means. Raises ValueError for one that caches do not have."""
    legal = [known.name for known in reversed(CACHE_DTYPES)]
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", getattr(dtype, "__name__", dtype))
    require(name in legal, "cache_dtype", repr(dtype), " or ".join(map(repr, legal)))
    return jnp.dtype(name)


def require_drafts(config: DsaConfig, drafts: int) -> None:
    """Raises ValueError for a number of drafts that a model of this config cannot make."""
    require(0 <= drafts <= MAX_DRAFTS, "drafts", drafts, f"in 0..{MAX_DRAFTS}")
    legal = "0: the model has no multi-token prediction layer"
    require(drafts == 0 or config.num_nextn_predict_layers > 0, "drafts", drafts, legal)


def _widths(max_pages: int, page_size: int) -> list[int]:
    """Widths of the block table in pages, so that short texts do not pay for the longest; one for up to 8K tokens."""
    widths, width = [], -(-FIRST_WIDTH // page_size)
    while 2 * width < max_pages:
        widths.append(width)
        width *= WIDTH_FACTOR
    return [*widths, max_pages]
