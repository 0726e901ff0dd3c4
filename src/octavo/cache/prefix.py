"""PrefixIndex: exact token path → page, on any tier.

A tree whose edges are whole pages of tokens, rooted per identity. An edge is found by comparing the tokens themselves,
so no two prompts can be taken for each other; a root is found by its identity tuple, so no tenant sees another's pages.
It knows where the page of a path lies. It never counts references and never evicts on its own.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from octavo.types import PageLabel, Place, Tier

if TYPE_CHECKING:
    from octavo.cache.sessions import Session
    from octavo.cache.tiers import Load, Move

Tokens = tuple[int, ...]
NOWHERE = -1
TIERS = tuple(Tier)  # an enumeration is slow to go through


_NO_KEYS: list[Tokens] = []
_NO_PROMISE: set[Tokens] = set()


class Node:
    """A page of tokens after its parent's.

    `places` holds its page on each tier, or NOWHERE; on the device tier, whoever has a page has ancestors with pages.
    `children` finds an edge; `ordered` holds the same keys sorted, because the longest common beginning with any other
    page of tokens is then found beside the place where that page would stand. `promised` holds edges that a running
    sequence is about to add. `load` is bringing the page back to the device; `moves` copy it to tiers below.
    `unmoved`: the last copy to a tier below failed. `kept`: it was on the path of a session; `num_sessions`: of so many
    it is now, `led_by`: their numbers, one exclusive-or the other; `sessions`: those that end here. `owner`: the tenant
    who computed it. `root` is None of a root.
    """

    __slots__ = (
        *("__weakref__", "children", "digest", "kept", "led_by", "load", "moves", "num_sessions", "ordered", "owner"),
        *("parent", "places", "promised", "root", "sessions", "tokens", "unmoved"),
    )

    def __init__(self, parent: Node | None, tokens: Tokens, owner: str = "") -> None:
        self.parent = parent
        self.root: Root | None = None if parent is None else parent if isinstance(parent, Root) else parent.root
        self.tokens = tokens
        self.owner = owner
        self.places = [NOWHERE, NOWHERE, NOWHERE]
        self.children: dict[Tokens, Node] = {}
        self.ordered: list[Tokens] = _NO_KEYS  # its own where it has a child; nodes are many
        self.promised: set[Tokens] = _NO_PROMISE  # likewise
        self.load: Load | None = None
        self.moves: tuple[Move, ...] = ()
        self.unmoved = False
        self.kept = False
        self.num_sessions = self.led_by = 0
        self.sessions: dict[Session, None] | None = None
        self.digest: bytes | None = None

    @property
    def page(self) -> int:
        """The page on the device tier."""
        return self.places[Tier.DEVICE]

    @property
    def alive(self) -> bool:
        """Whether it can be found from its parent, whatever became of that."""
        return self.parent is None or self.parent.children.get(self.tokens) is self

    @property
    def nearest(self) -> Place | None:
        """The copy that is fetched fastest."""
        return next(iter(self.all_places()), None)

    def all_places(self) -> list[Place]:
        """Where it lies, the nearest first."""
        return [Place(tier, page) for tier, page in zip(TIERS, self.places, strict=True) if page != NOWHERE]

    def path(self) -> Iterator[Node]:
        """The node and its ancestors, nearest first, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Root(Node):
    """Where the prompts of an identity begin; it has no page."""

    __slots__ = ("identity",)

    def __init__(self, identity: tuple[str, ...] = ()) -> None:
        super().__init__(None, ())
        self.identity = identity

    @property
    def tenant(self) -> str:
        """The only tenant whose prompts begin here, or "" if any may."""
        return self.identity[1] if self.identity[:1] == ("key",) else ""


class Match(NamedTuple):
    """The longest cached beginning of some tokens.

    `nodes`: whole pages found, first to last, after `root`; `node`: the last of them or the root. `partial`: a page of
    which the first `num_partial` tokens come next. `promise`: the next whole page, if it is on its way: a running
    sequence is about to compute it, or a copy of it is under way.
    """

    root: Root
    node: Node
    nodes: list[Node]
    partial: Node | None
    num_partial: int
    promise: Tokens | None


class PrefixIndex:
    """Every findable page of every tier, by its exact tokens and all tokens before them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: WeakValueDictionary[tuple[str, ...], Root] = WeakValueDictionary()
        self._restored: dict[bytes, Root] = {}
        self._firsts: dict[Tokens, dict[Node, None]] = {}
        self._by_page: tuple[dict[int, Node], ...] = ({}, {}, {})
        self.changed: tuple[set[int], ...] | None = None  # pages of each tier, while somebody watches

    def __len__(self) -> int:
        return len(self._by_page[Tier.DEVICE])

    def __contains__(self, page: int) -> bool:
        return page in self._by_page[Tier.DEVICE]

    def node_of(self, page: int, tier: Tier = Tier.DEVICE) -> Node:
        return self._by_page[tier][page]

    def find(self, place: Place) -> Node | None:
        """The node of a page, if the page is findable."""
        return self._by_page[place.tier].get(place.page)

    def page_nodes(self, tier: Tier) -> Mapping[int, Node]:
        """The nodes of a tier's findable pages."""
        return self._by_page[tier]

    def pages(self, tier: Tier = Tier.DEVICE) -> list[int]:
        return list(self._by_page[tier])

    def root(self, identity: tuple[str, ...]) -> Root:
        """The identity's root. It lives as long as a page below it or a table that began there."""
        root = self._roots.get(identity)
        if root is None:
            digest = hashlib.sha256(repr(identity).encode()).digest()
            root = self._roots[identity] = self._restored.pop(digest) if digest in self._restored else Root()
            root.identity, root.digest = identity, digest
        return root

    def firsts(self, tokens: Tokens) -> list[Node]:
        """Nodes of a first page with these tokens, of every identity that has one."""
        return list(self._firsts.get(tokens, ()))

    def roots(self) -> list[Root]:
        """Those that are alive."""
        return [*self._roots.values(), *self._restored.values()]

    def match(self, identity: tuple[str, ...], tokens: Sequence[int]) -> Match:
        """Find the longest cached beginning of `tokens`: whole pages, then a part of one more. Changes nothing."""
        size = self._block_size
        root = self.root(identity)
        node: Node = root
        nodes: list[Node] = []
        key: Tokens = ()
        for start in range(0, len(tokens), size):
            key = tuple(tokens[start : start + size])
            child = node.children.get(key)
            if child is None or on_its_way(child):
                break
            nodes.append(child)
            node = child
        else:
            return Match(root, node, nodes, None, 0, None)
        if child is not None:
            return Match(root, node, nodes, None, 0, key)
        partial, num_partial = _longest_common(node, key)
        return Match(root, node, nodes, partial, num_partial, key if key in node.promised else None)

    def insert(self, parent: Node, tokens: Tokens, place: Place, owner: str = "") -> Node:
        """Make a page findable as the page of `tokens` after `parent`. The path must be new."""
        node = Node(parent, tokens, owner)
        parent.children[tokens] = node
        if parent.ordered:
            insort(parent.ordered, tokens)
        else:
            parent.ordered = [tokens]
        if parent.parent is None:
            self._firsts.setdefault(tokens, {})[node] = None
        self.put(node, place)
        return node

    def put(self, node: Node, place: Place) -> None:
        """Let the node's page be found at one more place."""
        node.places[place.tier] = place.page
        self._by_page[place.tier][place.page] = node
        if self.changed is not None:
            self.changed[place.tier].add(place.page)

    def promise(self, node: Node, tokens: Tokens) -> bool:
        """Note that a running sequence is about to add this edge; False if another one is."""
        if tokens in node.promised:
            return False
        if not node.promised:
            node.promised = set()
        node.promised.add(tokens)
        return True

    def own(self, node: Node, owner: str) -> None:
        """It belongs to the first who asks for it: nobody knows whose it was before a restart."""
        if not node.owner and owner:
            node.owner = owner
            self.mark(node)

    def mark(self, node: Node) -> None:
        """Note, if somebody watches, that the node's pages are no longer what they were."""
        if self.changed is not None:
            for changed, page in zip(self.changed, node.places, strict=True):
                if page != NOWHERE:
                    changed.add(page)

    def take(self, node: Node, tier: Tier) -> int:
        """Let it be found there no more; returns the page."""
        page, node.places[tier] = node.places[tier], NOWHERE
        del self._by_page[tier][page]
        if self.changed is not None:
            self.changed[tier].add(page)
        return page

    def remove(self, node: Node) -> None:
        """Forget a node that lies nowhere; sessions end at its parent then.

        It must have no children: descendants go before their ancestors.
        """
        parent = node.parent
        assert parent is not None and not node.children, "a page is forgotten before its descendants"
        del parent.children[node.tokens]
        del parent.ordered[bisect_left(parent.ordered, node.tokens)]
        if parent.parent is None:
            del self._firsts[node.tokens][node]
            if not self._firsts[node.tokens]:
                del self._firsts[node.tokens]
        for session in list(node.sessions or ()):
            session.end_at(parent)

    def by_depth(self) -> list[Node]:
        """All nodes, ancestors before their descendants."""
        found = [node for root in self.roots() for node in root.children.values()]
        for node in found:
            found += node.children.values()
        return found

    # ── what survives a restart ──

    def label(self, node: Node) -> PageLabel:
        """What the page is found by on disk."""
        pending = [node]
        while (parent := pending[-1].parent) is not None and parent.digest is None:
            pending.append(parent)
        for at in reversed(pending):
            assert at.parent is not None and at.parent.digest is not None
            at.digest = hashlib.sha256(at.parent.digest + array("i", at.tokens).tobytes()).digest()
        assert node.digest is not None and node.parent is not None and node.parent.digest is not None
        return PageLabel(node.digest, node.parent.digest, node.tokens)

    def restore(self, labels: Iterable[tuple[int, PageLabel]]) -> list[Node]:
        """Make records on disk findable, as soon as their root is asked for; ancestors come first in what is returned.

        A record that says the same as another, whose digest is not that of its path, or that is not a whole page of
        tokens is left out.
        """
        by_parent: dict[bytes, list[tuple[int, PageLabel]]] = {}
        for record, label in labels:
            by_parent.setdefault(label.parent, []).append((record, label))
        own = {label.digest for records in by_parent.values() for _, label in records}
        nodes: list[Node] = []
        for digest in [digest for digest in by_parent if digest not in own]:
            root = self._restored[digest] = Root()
            root.digest = digest
            ahead: list[Node] = [root]
            while ahead:
                parent = ahead.pop()
                for record, label in by_parent.get(parent.digest or b"", ()):
                    expected = hashlib.sha256(label.parent + array("i", label.tokens).tobytes()).digest()
                    whole = len(label.tokens) == self._block_size
                    if whole and label.digest == expected and label.tokens not in parent.children:
                        node = self.insert(parent, label.tokens, Place(Tier.DISK, record))
                        node.digest = label.digest
                        nodes.append(node)
                        ahead.append(node)
        return nodes


def on_its_way(node: Node) -> bool:
    """Whether the page can be used when a copy has ended, and not before."""
    return node.places[Tier.DEVICE] == NOWHERE and (node.load is not None or node.nearest is None)


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
