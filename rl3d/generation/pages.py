"""Who holds which page of the key/value pool, and which pages hold tokens seen before. No tensors.

A page is free, held (by one or several sequences), or kept: held by nobody, but its contents are known by the hash of
all tokens up to its end, so that a later prompt with the same beginning takes it instead of computing it. Kept pages
are given up when free ones run out, those longest unused first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

SCRATCH = 0
"""The page that unused entries of a block table name; reads of it are masked, no sequence owns it."""


def page_hashes(tokens: Sequence[int], page_size: int, pages: int) -> list[bytes]:
    """Hashes of the first ``pages`` full pages; each stands for its tokens and all before them."""
    out, last = [], b""
    for i in range(pages):
        page = array("q", tokens[i * page_size : (i + 1) * page_size]).tobytes()
        last = blake2b(last + page, digest_size=16).digest()
        out.append(last)
    return out


class PagePool:
    """Page numbers ``1 .. pages``; page 0 is :data:`SCRATCH`."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.reset(pages)

    def reset(self, pages: int) -> None:
        """Start over with so many pages: all sequences and all contents are forgotten."""
        self.pages = pages
        self._free = list(range(self.pages, SCRATCH, -1))
        self._holders = [0] * (self.pages + 1)
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # longest unused first

    def extend(self, pages: int) -> None:
        """Have so many pages, more than now; those that there are keep their holders and their contents."""
        self._free = list(range(pages, self.pages, -1)) + self._free
        self._holders += [0] * (pages - self.pages)
        self.pages = pages

    def forget(self) -> None:
        """Forget the contents (the weights changed); pages that sequences hold stay theirs."""
        self._free += self._kept
        self._kept.clear()
        self._hash_of.clear()
        self._page_of.clear()

    @property
    def available(self) -> int:
        """Pages that :meth:`allocate` can give."""
        return len(self._free) + len(self._kept)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self) -> int:
        """A page for one holder; IndexError when none is :attr:`available`."""
        if self._free:
            page = self._free.pop()
        elif self._kept:
            page, _ = self._kept.popitem(last=False)
            del self._page_of[self._hash_of.pop(page)]
        else:
            raise IndexError("no page is available")
        self._holders[page] = 1
        return page

    def retain(self, pages: Iterable[int]) -> None:
        """One more holder of each page."""
        for page in pages:
            if self._holders[page] == 0:
                del self._kept[page]
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less; a page's end goes before its beginning when room is made."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._hash_of:
                    self._kept[page] = None
                else:
                    self._free.append(page)

    def shared(self, page: int) -> bool:
        return self._holders[page] > 1

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Pages of the longest known beginning, not retained yet."""
        out = []
        for value in hashes:
            page = self._page_of.get(value)
            if page is None:
                break
            out.append(page)
        return out

    def publish(self, page: int, value: bytes) -> None:
        """Let a held, full page be found by its hash; a second page of the same contents stays private."""
        if value not in self._page_of and page not in self._hash_of:
            self._page_of[value] = page
            self._hash_of[page] = value
