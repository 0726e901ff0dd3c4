"""Strides: steps in which everyone who runs gets a token, and nobody needs the scheduler for that.

Of a sequence that has its prompt behind it, all is known beforehand: in which step it needs a page, in which one it has
filled a page, in which one it ends. Until then it is set aside in the scheduler and only counted. Steps in which
somebody comes, goes, is at a prompt or may lack pages are the scheduler's, and it sees those to whom something happens.
What comes of it is what comes of steps taken one by one, to the page id: tests compare them.
"""

from __future__ import annotations

from collections.abc import Iterator

from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence
from octavo.simulator.cost import Load
from octavo.simulator.traces import numbers


class _Steady:
    """A sequence that gets a token a step: at the start of step t it has `base` + t computed.

    It needs a page in step `reserves`, fills one in step `commits`, and ends in step `ends`.
    """

    __slots__ = ("aside", "base", "commits", "ends", "reserves", "sequence")

    def __init__(self, sequence: Sequence, base: int) -> None:
        self.sequence = sequence
        self.base = base
        self.aside = False
        self.reserves = self.commits = self.ends = -1


Steps = dict[int, list[_Steady]]


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
        self._reserves: Steps = {}
        self._commits: Steps = {}
        self._ends: Steps = {}
        self._nothing_new = False

    @property
    def load(self) -> Load:
        """Of the sequences that are aside, in this step."""
        return Load(self._num_aside, self._num_aside, self._sum + self._num_aside * (self._step + 1))

    @property
    def slots_empty(self) -> int:
        """Of their pages, now."""
        steady = [one for one in self._all.values() if one.aside]
        pages = sum(len(one.sequence.table.pages) for one in steady if one.sequence.table is not None)
        return pages * self._size - self._sum - self._num_aside * self._step

    def came(self) -> None:
        """There are new requests."""
        self._nothing_new = False

    # ── a step without the scheduler ──

    def glides(self) -> bool:
        """Whether this step needs no scheduler."""
        scheduler, step = self._scheduler, self._step
        if not self._num_aside or scheduler.num_running > self._num_aside or step in self._ends:
            return False
        if scheduler.num_waiting and not self._nothing_new and self._num_aside < scheduler.max_running:
            return False
        return step not in self._reserves or len(self._reserves[step]) <= self._cache.pool.num_available

    def glide(self, now: float) -> None:
        """Make it."""
        step, cache = self._step, self._cache
        if step in self._reserves:
            for one in self._due(self._reserves):
                table, computed = one.sequence.table, one.base + step
                assert table is not None
                cache.reserve(table, computed, computed + 1)
                one.reserves = step + self._size
                self._reserves.setdefault(one.reserves, []).append(one)
        if step in self._commits:
            cache.tick(now)
            for one in self._due(self._commits):
                table = one.sequence.table
                assert table is not None
                self._write_out(one)
                cache.commit(table, one.sequence.token_ids, one.base + step + 1)
                one.commits = step + self._size
                self._commits.setdefault(one.commits, []).append(one)
            self._nothing_new = False
        self._scheduler.stats.num_steps += 1
        self._over()

    # ── a step with it ──

    def call_back(self) -> Iterator[Sequence]:
        """Give the scheduler those back to whom something happens in this step; all, if a page may be lacking."""
        scarce = len(self._reserves.get(self._step, ())) > self._cache.pool.num_available
        due = [*self._due(self._reserves), *self._due(self._commits), *self._due(self._ends)]
        for one in [one for one in self._all.values() if one.aside] if scarce else due:
            if not one.aside:
                continue
            sequence = one.sequence
            one.aside = False
            self._num_aside -= 1
            self._sum -= one.base
            self._write_out(one)
            sequence.num_computed = one.base + self._step
            self._scheduler.call_back(sequence)
            yield sequence

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

    # ── inside ──

    def _over(self) -> None:
        self._step += 1
        stats = self._scheduler.stats
        stats.computed_tokens += self._num_aside
        stats.generation_tokens += self._num_aside

    def _set_aside(self, sequence: Sequence) -> None:
        base = sequence.num_computed - self._step
        one = self._all.get(sequence)
        if one is None or one.base != base:
            one = self._all[sequence] = _Steady(sequence, base)
        one.aside = True
        self._num_aside += 1
        self._sum += base
        self._note(one)
        self._scheduler.set_aside(sequence)

    def _note(self, one: _Steady) -> None:
        """Note the steps in which something will happen, if that is new."""
        table, group = one.sequence.table, one.sequence.group
        assert table is not None
        reserves = len(table.pages) * self._size - one.base
        if one.reserves != reserves:
            one.reserves = reserves
            self._reserves.setdefault(reserves, []).append(one)
        commits = (table.num_indexed + 1) * self._size - 1 - one.base
        if one.commits != commits and self._cache.enable_prefix_caching:
            one.commits = commits
            self._commits.setdefault(commits, []).append(one)
        if one.ends < 0:
            one.ends = group.max_tokens + group.num_prompt_tokens - 2 - one.base
            self._ends.setdefault(one.ends, []).append(one)

    def _due(self, steps: Steps) -> list[_Steady]:
        """Those aside to whom it happens now, in the order of service."""
        due = [one for one in steps.pop(self._step, ()) if one.aside and self._all.get(one.sequence) is one]
        if len(due) > 1:
            due.sort(key=lambda one: one.sequence.key)
        return due

    def _write_out(self, one: _Steady) -> None:
        """The tokens that the sequence has at the start of this step."""
        sequence = one.sequence
        tokens, length = sequence.token_ids, one.base + self._step + 1
        if len(tokens) < length:
            tokens.extend(numbers(sequence.seed + len(tokens), sequence.seed + length))
