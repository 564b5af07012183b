"""Which sequence holds which pages of a cache, counted on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PagePool:
    """The pages of each sequence in order, how many sequences hold each page, and the pages that nobody holds."""

    def __init__(self, num_pages: int, of: Iterable[Sequence[int]]):
        self.of = [list(pages) for pages in of]
        self.holders = [0] * num_pages
        for page in (page for pages in self.of for page in pages):
            self.holders[page] += 1
        self.free = [page for page in reversed(range(num_pages)) if not self.holders[page]]

    def copy(self) -> PagePool:
        """The same, to be changed apart."""
        new = PagePool(len(self.holders), self.of)
        new.free = list(self.free)
        return new

    def take(self) -> int:
        """A page that nobody held, held once."""
        page = self.free.pop()
        self.holders[page] = 1
        return page

    def share(self, row: int, pages: Sequence[int]) -> None:
        """A sequence without pages gets these, which others hold."""
        for page in pages:
            self.holders[page] += 1
        self.of[row] = list(pages)

    def release(self, pages: Iterable[int]) -> None:
        """One holder fewer for each of the pages."""
        for page in pages:
            self.holders[page] -= 1
            if not self.holders[page]:
                self.free.append(page)

    def keep(self, row: int, count: int) -> None:
        """Gives back the pages of a sequence behind its first `count`."""
        self.release(self.of[row][count:])
        del self.of[row][count:]

    def shared(self, row: int) -> int:
        """Pages of a sequence up to the last one that others hold too."""
        return max((i + 1 for i, page in enumerate(self.of[row]) if self.holders[page] > 1), default=0)

    def written(self, pages: Sequence[int], lengths: Sequence[int], size: int) -> int:
        """How many tokens of a prefix in these pages have been written; of lengths[b] tokens, size a page."""
        pages = list(pages)
        whole = [n for own, n in zip(self.of, lengths, strict=True) if own[: len(pages)] == pages]
        if whole:  # the usual prefix is that of one sequence
            return min(max(whole), len(pages) * size)
        found = dict.fromkeys(pages, 0)  # tokens of each page
        for own, n in zip(self.of, lengths, strict=True):
            for i, page in enumerate(own):
                if page in found:
                    found[page] = max(found[page], min(size, max(0, n - i * size)))
        for i, page in enumerate(pages):
            if found[page] < size:
                return i * size + found[page]
        return len(pages) * size

    def reserve(self, lengths: Sequence[int], counts: Sequence[int], size: int) -> list[tuple[int, int]]:
        """Gives every sequence of lengths[b] tokens pages of its own for counts[b] more. Returns (from, to) of the
        pages whose content is to be copied."""
        wanted = []  # sequence, place among its pages, whether the content is needed
        for b, (length, more) in enumerate(zip(lengths, counts)):
            if more == 0:
                continue
            first, last = length // size, -(-(length + more) // size)
            for i in range(first, max(last, len(self.of[b]))):
                held = i < len(self.of[b])
                if not held or self.holders[self.of[b][i]] > 1:
                    wanted.append((b, i, held and i == first and length % size > 0))
        # A page that two sequences are about to leave is free for the last of them, which is not counted on here.
        if len(wanted) > len(self.free):
            many = f"{len(self.free)} of {len(self.holders)} are free"
            raise RuntimeError(f"reserve: {len(wanted)} pages are needed, {many}")
        copies = []
        for b, i, needed in wanted:
            page = self.take()
            if i == len(self.of[b]):
                self.of[b].append(page)
                continue
            if needed:
                copies.append((self.of[b][i], page))
            self.release([self.of[b][i]])
            self.of[b][i] = page
        return copies

    def reorder(self, source: Sequence[int], lengths: Sequence[int], size: int) -> list[tuple[int, int]]:
        """Sequence b gets the pages of source[b], whose length is lengths[source[b]]. Pages full of tokens are shared;
        the others go to the first that takes them, and the next get pages of their own. Returns the copies, as
        `reserve` does."""
        taken: set[int] = set()
        needed = 0
        for s in source:
            needed += len(self.of[s]) - lengths[s] // size if s in taken else 0
            taken.add(s)
        lost = [page for s, pages in enumerate(self.of) if s not in taken for page in pages]
        free = len(self.free) + sum(self.holders[page] == lost.count(page) for page in set(lost))
        if needed > free:
            raise RuntimeError(f"reorder: {needed} pages are needed, {free} are free")
        self.release(lost)
        taken.clear()
        rows, copies = [], []
        for s in source:
            pages, full = list(self.of[s]), lengths[s] // size
            if s in taken:
                for page in pages[:full]:
                    self.holders[page] += 1
                for i in range(full, len(pages)):
                    page = self.take()
                    if i == full and lengths[s] % size:
                        copies.append((pages[i], page))
                    pages[i] = page
            taken.add(s)
            rows.append(pages)
        self.of = rows
        return copies
