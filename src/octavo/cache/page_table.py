"""PageTable: the pages of one sequence, in order of position."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from octavo.cache.prefix import Node

if TYPE_CHECKING:
    from octavo.cache.sessions import Session
    from octavo.cache.tiers import Load


class PageTable:
    """Which page holds which tokens of a sequence: position p lies in slot p mod B of pages[p // B].

        pages    │ findable, shared or own │ own, being filled │ reserved │
                 0                 num_indexed                          len(pages)

    `node` is the prefix-index node of the last findable page (the identity's root while there is none).
    `load` brings findable pages back from the tiers below; until it is done nobody may read or write them.
    `tail_shared` says that the page being filled may have other holders, so that writing it needs a copy first.
    `request`, of `session` if it is one's, and the tenant `owner` are who it is for.
    Only the CacheManager changes a table.
    """

    __slots__ = ("load", "node", "num_indexed", "owner", "pages", "promise", "request", "session", "tail_shared")

    def __init__(
        self, node: Node, pages: array[int], owner: str = "", request: str = "", session: Session | None = None
    ) -> None:
        self.node = node
        self.owner = owner
        self.request = request
        self.session = session
        self.pages = pages
        self.num_indexed = 0
        self.tail_shared = False
        self.load: Load | None = None
        self.promise: tuple[Node, tuple[int, ...]] | None = None
