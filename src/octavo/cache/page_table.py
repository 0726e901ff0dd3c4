"""PageTable: the pages of one sequence, in order of position."""

from __future__ import annotations

from array import array

from octavo.cache.prefix import Node


class PageTable:
    """Which page holds which tokens of a sequence: position p lies in slot p mod B of pages[p // B].

        pages    │ findable, shared or own │ own, being filled │ reserved │
                 0                 num_indexed                          len(pages)

    `node` is the prefix-index node of the last findable page (the identity's root while there is none).
    `tail_shared` says that the page being filled may have other holders, so that writing it needs a copy first.
    Only the CacheManager changes a table.
    """

    __slots__ = ("node", "num_indexed", "pages", "promise", "tail_shared")

    def __init__(self, node: Node, pages: array[int]) -> None:
        self.node = node
        self.pages = pages
        self.num_indexed = 0
        self.tail_shared = False
        self.promise: tuple[Node, tuple[int, ...]] | None = None
