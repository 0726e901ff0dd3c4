"""Strides: steps in which everyone who runs gets a token, and nobody needs the scheduler for that.

Of a sequence that has its prompt behind it, all is known beforehand: in which step it needs a page, in which one it has
filled a page, in which one it ends. Until then it is set aside in the scheduler and only counted. Steps in which
somebody comes, goes, is at a prompt or may lack pages are the scheduler's, and it sees those that fill a page or end.
What comes of it is what comes of steps taken one by one, to the page id: tests compare them.
"""

from __future__ import annotations

from bisect import insort

from octavo.cache.page_table import PageTable
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence
from octavo.simulator.cost import Load
from octavo.simulator.traces import numbers


class _Steady:
    """A sequence that gets a token a step. At the start of step t `base` + t are computed; in step `ends` it ends."""

    __slots__ = ("aside", "base", "ends", "sequence", "table")

    def __init__(self, sequence: Sequence, table: PageTable, base: int) -> None:
        self.sequence = sequence
        self.table = table
        self.base = base
        self.ends = sequence.group.max_tokens + sequence.group.num_prompt_tokens - 2 - base
        self.aside = False


def _key(one: _Steady) -> tuple[int, int, int, int]:
    return one.sequence.key


class Stride:
    """The sequences that are set aside, and the steps in which something happens to them.

    Only for requests of one choice, without log-probabilities of prompts, and a cache without tiers below.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._size = scheduler.cache.block_size
        self._step = 0
        self._sum = 0
        self._num_aside = 0
        self._all: dict[Sequence, _Steady] = {}
        # those aside, in order of service, by the slot of a page where the token of step 0 would lie
        self._by_slot: list[list[_Steady]] = [[] for _ in range(self._size)]
        self._ends: dict[int, list[_Steady]] = {}
        self._nothing_new = False
        self._alone = False  # whether nobody runs but those aside

    @property
    def load(self) -> Load:
        """Of the sequences that are aside, in this step."""
        return Load(self._num_aside, self._num_aside, self._sum + self._num_aside * (self._step + 1))

    @property
    def slots_empty(self) -> int:
        """Of the pages of all who run, now."""
        filled = self._sum + self._num_aside * self._step
        filled -= sum(one.sequence.num_computed for one in self._all.values() if one.aside)
        return self._scheduler.slots[1] - filled

    def came(self) -> None:
        """There are new requests."""
        self._nothing_new = False

    # ── a step without the scheduler ──

    def glides(self) -> bool:
        """Whether this step needs no scheduler."""
        scheduler = self._scheduler
        if not self._alone or self._step in self._ends:
            return False
        if scheduler.num_waiting and not self._nothing_new and self._num_aside < scheduler.max_running:
            return False
        return len(self._full) <= self._cache.pool.num_available

    def glide(self, now: float) -> None:
        """Make it."""
        self._extend()
        if filling := self._filling:
            self._cache.tick(now)
            for one in filling:
                self._write_out(one)
                self._cache.commit(one.table, one.sequence.token_ids, one.base + self._step + 1)
            self._nothing_new = False
        self._scheduler.stats.num_steps += 1
        self._over()

    # ── a step with it ──

    def call_back(self) -> list[Sequence]:
        """Give the scheduler those back that fill a page or end in this step; all, if a page may be lacking."""
        ending = self._ends.pop(self._step, ())
        if len(self._full) > self._cache.pool.num_available:
            called = [one for one in self._all.values() if one.aside]
        else:
            self._extend()
            called = list({one: None for one in (*self._filling, *ending) if one.aside})
        for one in called:
            one.aside = False
            self._num_aside -= 1
            self._sum -= one.base
            self._by_slot[one.base % self._size].remove(one)
            self._write_out(one)
            self._scheduler.call_back(one.sequence, one.base + self._step)
        return [one.sequence for one in called]

    def stepped(self, called: list[Sequence], nothing_new: bool) -> None:
        """The step was made; unless `nothing_new` it changed more than the number of tokens."""
        self._nothing_new = nothing_new
        self._over()
        for sequence in called:
            if sequence.table is None:
                del self._all[sequence]
        for sequence in list(self._scheduler.running):
            # it got a token in this step, and not all it knows was known when it was admitted
            if sequence.num_remaining == 1 and len(sequence.token_ids) > sequence.num_at_admission:
                self._set_aside(sequence)
        self._alone = 0 < self._num_aside == self._scheduler.num_running

    # ── inside ──

    @property
    def _full(self) -> list[_Steady]:
        """Those whose pages are full, so that they need one in this step."""
        return self._by_slot[-self._step % self._size]

    @property
    def _filling(self) -> list[_Steady]:
        """Those that fill a page in this step, if that matters."""
        return self._by_slot[(-self._step - 1) % self._size] if self._cache.enable_prefix_caching else []

    def _extend(self) -> None:
        """Pages for those that need one in this step; there are enough."""
        if full := self._full:
            self._cache.extend([one.table for one in full])

    def _over(self) -> None:
        self._step += 1
        stats = self._scheduler.stats
        stats.computed_tokens += self._num_aside
        stats.generation_tokens += self._num_aside

    def _set_aside(self, sequence: Sequence) -> None:
        base, table = sequence.num_computed - self._step, sequence.table
        assert table is not None
        one = self._all.get(sequence)
        if one is None or one.base != base:
            one = self._all[sequence] = _Steady(sequence, table, base)
            self._ends.setdefault(one.ends, []).append(one)
        one.aside = True
        self._num_aside += 1
        self._sum += base
        insort(self._by_slot[base % self._size], one, key=_key)
        self._scheduler.set_aside(sequence)

    def _write_out(self, one: _Steady) -> None:
        """The tokens that the sequence has at the start of this step."""
        sequence = one.sequence
        tokens, length = sequence.token_ids, one.base + self._step + 1
        if len(tokens) < length:
            tokens.extend(numbers(sequence.seed + len(tokens), sequence.seed + length))
