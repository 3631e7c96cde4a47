"""Cache pages as a resource: who holds which page, which full pages can be used again, what a page costs.

A page holds the keys of `page_size` consecutive tokens of one text, in every layer's cache. Its content follows from
the text up to its end, so a full page is known by a hash over that text, chained page by page, and a request whose text
begins in the same way takes the page instead of computing it. Only full pages are known: a page that is still being
written is its writer's alone, and nothing is ever copied.

A page is in one of three states: held by one or more requests; known and held by none, to be taken by its content or,
least recently used first, overwritten; or blank.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dsa_jax.checks import refuse, require

_ROOT = b""


class OutOfPages(ValueError):
    """More pages were asked for than there are to take."""


class PagePool:
    """Pages 0..num_pages - 1, with reference counts.

    page_size: tokens a page holds.
    lookahead: tokens after a page that its content depends on too: 1 where a multi-token prediction layer is cached,
        whose row t is made from token t + 1, else 0.
    Raises ValueError for sizes below 1.
    """

    def __init__(self, num_pages: int, page_size: int, *, lookahead: int = 0):
        require(num_pages >= 1, "num_pages", num_pages, "at least 1")
        require(page_size >= 1, "page_size", page_size, "at least 1")
        self.num_pages, self.page_size, self.lookahead = num_pages, page_size, lookahead
        self._holders = [0] * num_pages
        self._blank = list(range(num_pages - 1, -1, -1))
        self._page_of: dict[bytes, int] = {}  # known pages by the hash of the text up to their end
        self._key_of: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}  # known pages that nobody holds, the least recently used first

    @property
    def num_free(self) -> int:
        """Pages that can be taken: blank ones, and known ones that nobody holds."""
        return len(self._blank) + len(self._idle)

    @property
    def num_known(self) -> int:
        """Full pages that another request could use."""
        return len(self._page_of)

    def lease(self, tokens: Sequence[int] | np.ndarray = ()) -> "Lease":
        """A lease of the known pages that `tokens` begins with, at least one token short of all of them."""
        lease = Lease(self)
        for key in self._keys(np.asarray(tokens, np.int32), len(tokens) - 1, _ROOT, 0):
            page = self._page_of.get(key)
            if page is None:
                break
            self._idle.pop(page, None)
            self._holders[page] += 1
            lease.pages.append(page)
            lease.keys.append(key)
        return lease

    def forget(self) -> None:
        """Makes no page known any more: the caches were filled anew, or other weights wrote them."""
        self._blank += self._idle
        self._idle.clear()
        self._page_of.clear()
        self._key_of.clear()

    def _keys(self, tokens: np.ndarray, written: int, key: bytes, first: int) -> Iterator[bytes]:
        """The chained hashes of the full pages from `first` on, of a text with `written` tokens in the caches."""
        last = min(written, len(tokens) - self.lookahead) // self.page_size
        for page in range(first, last):
            start = page * self.page_size
            text = tokens[start : start + self.page_size + self.lookahead]
            key = hashlib.sha256(key + text.astype("<i4").tobytes()).digest()
            yield key

    def _take(self, count: int) -> list[int]:
        """`count` pages for one holder, or OutOfPages with nothing taken."""
        if count > self.num_free:
            raise OutOfPages(f"{count} pages are needed and {self.num_free} of {self.num_pages} are free")
        taken = [self._blank.pop() if self._blank else self._forget_one() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def _forget_one(self) -> int:
        page = next(iter(self._idle))
        del self._idle[page]
        del self._page_of[self._key_of.pop(page)]
        return page

    def _give_back(self, pages: list[int]) -> None:
        for page in reversed(pages):  # a text's end becomes the older: it is of no use without what is before it
            self._holders[page] -= 1
            assert self._holders[page] >= 0
            if self._holders[page] == 0 and page in self._key_of:
                self._idle[page] = None
            elif self._holders[page] == 0:
                self._blank.append(page)

    def _publish(self, page: int, key: bytes) -> None:
        if key not in self._page_of:  # else another request has written the same text: this page stays its holder's
            self._page_of[key] = page
            self._key_of[page] = key


class Lease:
    """The pages that one request holds, in the order of its text. From `PagePool.lease`.

    pages: page numbers; positions [i * page_size, (i + 1) * page_size) lie in pages[i].
    keys: hashes of the first of them, which are full.
    """

    def __init__(self, pool: PagePool):
        self.pool = pool
        self.pages: list[int] = []
        self.keys: list[bytes] = []

    @property
    def capacity(self) -> int:
        """Tokens that the pages have room for."""
        return len(self.pages) * self.pool.page_size

    def grow(self, length: int) -> None:
        """Adds pages until there is room for `length` tokens; those that it has stay where they are.

        Raises OutOfPages, with nothing taken, if there are not enough.
        """
        missing = -(-length // self.pool.page_size) - len(self.pages)
        if missing > 0:
            self.pages += self.pool._take(missing)

    def publish(self, tokens: Sequence[int] | np.ndarray, written: int) -> None:
        """Makes the full pages of a text known, of whose tokens the first `written` are in the caches for good."""
        if written // self.pool.page_size <= len(self.keys):
            return
        last = self.keys[-1] if self.keys else _ROOT
        for key in self.pool._keys(np.asarray(tokens, np.int32), written, last, len(self.keys)):
            self.pool._publish(self.pages[len(self.keys)], key)
            self.keys.append(key)

    def release(self) -> None:
        """Gives every page back. The lease is empty then, and may grow again."""
        self.pool._give_back(self.pages)
        self.pages, self.keys = [], []


def bytes_per_token(caches: Any) -> int:
    """Bytes that caches, or their shapes, hold for a token: IndexShare layers hold no index keys.

    caches: a tree of LayerCache. A whole GLM-5.2 takes 95,232 in bfloat16, its multi-token prediction layer 1,408 more.
    """
    caches = _paged(caches)
    return sum(cache.bytes_per_token for cache in caches)


def pages_within(cache_bytes: int, page_size: int, token_bytes: int) -> int:
    """How many pages of `page_size` tokens, `token_bytes` each, a budget of `cache_bytes` holds.

    Raises ValueError where it holds none.
    """
    page_bytes = page_size * token_bytes
    require(cache_bytes >= page_bytes, "cache_bytes", cache_bytes, f"at least {page_bytes}, the bytes of one page")
    return cache_bytes // page_bytes


def parse_bytes(text: str) -> int:
    """ "80GiB", "1.5 MB" or "4096" as a number of bytes. Raises ValueError for anything else and for less than 1."""
    units = {"": 1} | {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}
    units |= {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")} | {"B": 1}
    digits = text.strip().rstrip("BKMGTi").rstrip()
    unit = text.strip()[len(digits) :].strip()
    try:
        number = float(digits) * units[unit]
        whole = int(number)
    except (KeyError, ValueError, OverflowError):
        refuse("the number of bytes", repr(text), "a number and nothing, B, KB, KiB, MB, MiB, GB, GiB, TB or TiB")
    require(whole >= 1, "the number of bytes", repr(text), "at least 1")
    return whole


def _paged(caches: Any) -> list[Any]:
    """The latent and index caches of a tree of LayerCache."""
    if dataclasses.is_dataclass(caches) and hasattr(caches, "bytes_per_token"):
        return [caches]
    children = vars(caches).values() if dataclasses.is_dataclass(caches) else caches or ()
    return [cache for child in children for cache in _paged(child)]
