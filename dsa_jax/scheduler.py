"""Who takes part in the next step: slots, pages and rows for the requests of an engine. No arrays and no model."""

import collections
import dataclasses

from dsa_jax.pages import OutOfPages, PagePool
from dsa_jax.requests import Request


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step.

    decoding: the requests that get their next tokens. chunks: those of whose texts so many further rows are computed.
    """

    decoding: list[Request]
    chunks: list[tuple[Request, int]]

    @property
    def requests(self) -> list[Request]:
        return [*self.decoding, *(request for request, _ in self.chunks)]

    @property
    def contexts(self) -> list[int]:
        """The length that each chunk's request has with the chunk."""
        return [request.written + rows for request, rows in self.chunks]


class Scheduler:
    """First come, first served, and nobody starves: a request is only ever put off for those that came before it.

    max_requests: slots. prefill_chunk: rows of prompts in a step; request_chunk: of these, rows of one request at most.
    next_n: tokens that a step may add to a request.
    max_keys: keys of all requests of a step's chunks together; at least the longest text's.

    preempted, reused: counts of requests that gave their pages back, and of tokens whose pages were known.
    """

    def __init__(
        self,
        pages: PagePool,
        *,
        max_requests: int,
        prefill_chunk: int,
        request_chunk: int,
        next_n: int,
        max_keys: int,
    ):
        self.pages = pages
        self.waiting: collections.deque[Request] = collections.deque()
        self.slots: list[Request | None] = [None] * max_requests
        self.running: list[Request] = []  # in the order they were taken up
        self.preempted = self.reused = 0
        self._prefill_chunk, self._request_chunk = prefill_chunk, request_chunk
        self._next_n, self._max_keys = next_n, max_keys

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def plan(self) -> Plan:
        """The next step's requests. They have pages for what it may write."""
        self._admit()
        self._grow()
        return Plan([request for request in self.running if request.decodes], self._chunks())

    def retire(self, request: Request) -> None:
        """Lets a request go, wherever it is; its pages are free."""
        if request.slot >= 0:
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _admit(self) -> None:
        """Takes up waiting requests while there are a slot, pages for their text, and one for each that may grow."""
        while self.waiting and None in self.slots:
            request = self.waiting[0]
            lease = self.pages.lease(request.text[: request.length])
            missing = -(-self._room(request) // self.pages.page_size) - len(lease.pages)
            spare = sum(running.lease.capacity < running.limit for running in self.running)
            if missing > self.pages.num_free - spare:
                lease.release()
                return
            lease.grow(self._room(request))
            self.waiting.popleft()
            request.lease, request.slot = lease, self.slots.index(None)
            request.written = len(lease.keys) * self.pages.page_size
            request.reused = max(request.reused, min(request.written, request.prompt_tokens))
            self.reused += request.written
            self.slots[request.slot] = request
            self.running.append(request)

    def _room(self, request: Request) -> int:
        """Tokens that a request needs pages for: its text, and what a step may add."""
        return min(request.length + self._next_n, request.limit)

    def _grow(self) -> None:
        """Pages for what the step may add to each request, those of the last ones taken up if need be."""
        for request in list(self.running):
            while request.slot >= 0:
                try:
                    request.lease.grow(self._room(request))
                    break
                except OutOfPages:
                    self._preempt(self.running[-1])

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.written, request.drafted = 0, ()
        self.waiting.appendleft(request)
        self.preempted += 1

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.slots[request.slot] = None
        request.slot = -1
        request.lease.release()

    def _chunks(self) -> list[tuple[Request, int]]:
        chunks, rows, keys = [], self._prefill_chunk, self._max_keys
        for request in self.running:
            count = min(request.length - request.written, self._request_chunk, rows)
            if not request.decodes and count and request.written + count <= keys:
                chunks.append((request, count))
                rows, keys = rows - count, keys - (request.written + count)
        return chunks
