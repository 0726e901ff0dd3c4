"""Explainer: why so much of a prompt was found and no more, and what became of the rest.

It remembers pages that were forgotten: by a short digest of their path, when they went, and for whose sake. It is asked
when a request is admitted, and only then. It changes no page, and reads no clock.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Literal, NamedTuple

from octavo.cache.prefix import Match, Node
from octavo.cache.tiers import Cause
from octavo.types import Found, Missed, Tier

if TYPE_CHECKING:
    from octavo.cache.manager import CacheManager

MAX_FORGOTTEN = 1 << 16
MAX_ROOTS = 8
"""Other identities with the same first page that are looked at."""


class Forgotten(NamedTuple):
    """When a page was forgotten, and why."""

    at: float
    cause: Cause


class Explainer:
    """`cause` is why what is forgotten now is."""

    def __init__(self, manager: CacheManager) -> None:
        self.cause = Cause()
        self._index, self._size, self._tiers = manager.index, manager.block_size, manager.tiers
        self._forgotten: OrderedDict[bytes, Forgotten] = OrderedDict()
        manager.tiers.explainer = self

    def forget(self, node: Node) -> None:
        """The node is about to be forgotten."""
        digest = self._index.label(node).digest[:8]
        self._forgotten[digest] = Forgotten(self._tiers.now, self.cause)
        self._forgotten.move_to_end(digest)
        if len(self._forgotten) > MAX_FORGOTTEN:
            self._forgotten.popitem(last=False)

    def found(self, match: Match, tokens: Sequence[int], hits: Sequence[Tier], num_computed: int, tenant: str) -> Found:
        """What an admission found: pages on these tiers, and `num_computed` tokens with a part of one more.

        0           len(hits) pages             all of match.nodes
        │ on a tier │ could be had from a tier, │ never computed, forgotten,
        │           │ dearer than computing     │ or computed by somebody else
        """
        size, length = self._size, len(tokens)
        by_tier = [hits.count(tier) * size for tier in Tier]
        whole = len(hits) * size
        if hits and whole > num_computed:  # the last token is computed again for its logits
            by_tier[hits[-1]] -= whole - num_computed
        copied = max(num_computed - whole, 0)
        missed: list[Missed] = []
        matched = len(match.nodes) * size
        if len(hits) < len(match.nodes):
            missed.append(Missed(num_computed, min(matched, length), "not_worth_loading"))
        start = max(num_computed, matched)
        if num_computed == length - 1 and matched + match.num_partial >= length:
            missed.append(Missed(num_computed, length, "last_token"))
        elif start < length:
            missed += self._beyond(match, tokens, start, tenant)
        return Found(tuple(by_tier), copied, missed)

    def _beyond(self, match: Match, tokens: Sequence[int], start: int, tenant: str) -> list[Missed]:
        """Why nothing is found from `start` on, beyond all whole pages that are."""
        size, length, at = self._size, len(tokens), len(match.nodes) * self._size
        missed: list[Missed] = []
        first: Forgotten | None = None
        digest = self._digest(match.node)
        while at + size <= length:
            digest = sha256(digest + array("i", tokens[at : at + size]).tobytes()).digest()
            gone = self._forgotten.get(digest[:8])
            if gone is None or (first is not None and gone.cause.how != first.cause.how):
                break
            first, at = first or gone, at + size
        if first is not None:
            how, request, by = first.cause
            reason: Literal["load_failed", "evicted"] = "load_failed" if how == "lost" else "evicted"
            ago_s = max(self._tiers.now - first.at, 0.0)
            missed.append(Missed(start, at, reason, how, request, by, ago_s))
            start = at
        elif not match.nodes and (other := self._elsewhere(match, tokens, tenant)) is not None:
            missed.append(other)
            start = at = other.stop
        if start < length:
            missed.append(Missed(start, length, "tail" if length - at < size else "new"))
        return missed

    def _digest(self, node: Node) -> bytes:
        digest = node.digest if node.parent is None else self._index.label(node).digest
        assert digest is not None
        return digest

    def _elsewhere(self, match: Match, tokens: Sequence[int], tenant: str) -> Missed | None:
        """The same beginning under another identity, the tenant's own before others'."""
        best: tuple[bool, int, str] | None = None
        for node in self._index.firsts(tuple(tokens[: self._size]))[:MAX_ROOTS]:
            assert node.root is not None
            if node.root is match.root:
                continue
            num_pages = len(self._index.match(node.root.identity, tokens).nodes)
            found = (node.owner == tenant, max(num_pages, 1) * self._size, node.owner)
            best = found if best is None else max(best, found)
        return None if best is None else Missed(0, best[1], "other_identity", tenant=best[2])


def nothing_asked(num_tokens: int, *, caching: bool) -> Found:
    """Of a prompt that was not looked up at all."""
    return Found((0, 0, 0), 0, [Missed(0, num_tokens, "prompt_logprobs" if caching else "caching_off")])
