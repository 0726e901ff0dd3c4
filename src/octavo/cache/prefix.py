"""PrefixIndex: exact token path → page.

A tree whose edges are whole pages of tokens, rooted per identity. An edge is found by comparing the tokens themselves,
so no two prompts can be taken for each other; a root is found by its identity tuple, so no tenant sees another's pages.
It knows which page a path leads to. It never counts references and never evicts on its own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

Tokens = tuple[int, ...]


class Node:
    """A page of tokens after its parent's; page -1 marks a root.

    `children` finds an edge; `ordered` holds the same keys sorted, because the longest common beginning with any other
    page of tokens is then found beside the place where that page would stand. `promised` holds edges that a running
    sequence is about to add.
    """

    __slots__ = ("__weakref__", "children", "ordered", "page", "parent", "promised", "tokens")

    def __init__(self, parent: Node | None, tokens: Tokens, page: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.page = page
        self.children: dict[Tokens, Node] = {}
        self.ordered: list[Tokens] = []
        self.promised: set[Tokens] = set()


class Match(NamedTuple):
    """The longest cached beginning of some tokens.

    `nodes`: whole pages found, first to last; `node`: the last of them or the root. `partial`: a page of which the
    first `num_partial` tokens come next. `promise`: the next whole page, if a running sequence is about to compute it.
    """

    node: Node
    nodes: list[Node]
    partial: Node | None
    num_partial: int
    promise: Tokens | None


class PrefixIndex:
    """Every findable page of one tier, by its exact tokens and all tokens before them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: WeakValueDictionary[tuple[str, ...], Node] = WeakValueDictionary()
        self._by_page: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self._by_page)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def node_of(self, page: int) -> Node:
        return self._by_page[page]

    def pages(self) -> list[int]:
        return list(self._by_page)

    def root(self, identity: tuple[str, ...]) -> Node:
        """The identity's root. It lives as long as a page below it or a table that began there."""
        root = self._roots.get(identity)
        if root is None:
            root = self._roots[identity] = Node(None, (), -1)
        return root

    def match(self, identity: tuple[str, ...], tokens: Sequence[int]) -> Match:
        """Find the longest cached beginning of `tokens`: whole pages, then a part of one more. Changes nothing."""
        size = self._block_size
        node = self.root(identity)
        nodes: list[Node] = []
        key: Tokens = ()
        for start in range(0, len(tokens), size):
            key = tuple(tokens[start : start + size])
            child = node.children.get(key)
            if child is None:
                break
            nodes.append(child)
            node = child
        else:
            return Match(node, nodes, None, 0, None)
        partial, num_partial = _longest_common(node, key)
        return Match(node, nodes, partial, num_partial, key if key in node.promised else None)

    def insert(self, parent: Node, tokens: Tokens, page: int) -> Node:
        """Make `page` findable as the page of `tokens` after `parent`. The path must be new."""
        node = Node(parent, tokens, page)
        parent.children[tokens] = node
        insort(parent.ordered, tokens)
        self._by_page[page] = node
        return node

    def remove(self, page: int) -> None:
        """Make a page unfindable. It must have no children: descendants go before their ancestors."""
        node = self._by_page.pop(page)
        parent = node.parent
        assert parent is not None and not node.children, f"page {page} is evicted before its descendants"
        del parent.children[node.tokens]
        del parent.ordered[bisect_left(parent.ordered, node.tokens)]


def _longest_common(node: Node, key: Tokens) -> tuple[Node | None, int]:
    """The child that agrees longest with the beginning of `key`, and on how many tokens."""
    at = bisect_left(node.ordered, key)
    best, length = None, 0
    for candidate in node.ordered[max(at - 1, 0) : at + 1]:
        common = 0
        for ours, theirs in zip(key, candidate, strict=False):
            if ours != theirs:
                break
            common += 1
        if common > length:
            best, length = node.children[candidate], common
    return best, length
