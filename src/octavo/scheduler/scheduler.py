"""Scheduler: from requests to step plans, and from step results to outputs.

Two doors change anything: `schedule` plans a step, `commit` takes its result in. It owns the queue of waiting
sequences, the running ones and, through the CacheManager, all pages. It never touches a tensor or a text and reads no
clock: the same requests, times and results in the same order give the same plans.
"""

from __future__ import annotations

from array import array
from collections import ChainMap, abc
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nsmallest
from itertools import chain, islice
from operator import attrgetter, itemgetter

from octavo.cache.manager import Admission, CacheManager, Wait
from octavo.config import EngineConfig
from octavo.errors import AuditError, InvalidRequest
from octavo.scheduler.beam import Step, advance
from octavo.scheduler.forecast import Ahead, Forecast, Outlook
from octavo.scheduler.limits import Limits
from octavo.scheduler.policy import fair_shares, victim
from octavo.scheduler.sequence import Group, Phase, Sequence
from octavo.types import (
    MAX_SEED,
    Draw,
    FinishReason,
    Note,
    Output,
    Request,
    RequestInfo,
    Sampled,
    Slice,
    StepPlan,
    StepResult,
)

MIN_SHARE = 64
"""No prompt is admitted beside others if each would then get fewer tokens a step than this."""
MAX_SKIPPED = 64
"""Sequences that ended while they waited leave the queue when they are more, and more than those that wait."""
MAX_WAITS = 32
"""How many waiting sequences may step aside, for a shared page to be computed, before admission stops for this step."""


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the start."""

    num_steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0


class Scheduler:
    """Continuous batching over a paged cache, first come first served (within a priority, if that is the policy).

    `newly_scheduled` names the requests that the latest plan serves for the first time; `notes`, if the cache explains,
    say what befell requests since that plan was begun.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: CacheManager,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.cache = cache
        self.limits = Limits(max_model_len, vocab_size, cache.num_pages, cache.block_size)
        self.stats = SchedulerStats()
        self.newly_scheduled: list[str] = []
        self.notes: list[Note] = []
        self._by_priority = config.scheduling_policy == "priority"
        self._eos_token_ids = eos_token_ids
        self._seed = config.seed
        self._max_num_batched_tokens = config.max_num_batched_tokens
        # a running sequence gets at least one token a step
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._grows = max_model_len - 1 > cache.block_size  # no page follows one that holds any sequence
        self._groups: dict[str, Group] = {}
        self._running: dict[int, Sequence] = {}
        self._aside: dict[int, Sequence] = {}
        self._parked: dict[int, Sequence] = {}
        self._loading: dict[int, Sequence] = {}
        self._unforeseen: dict[int, Sequence] = {}  # that hold pages, but are not in the outlook yet
        self._holding = ChainMap(self._running, self._aside, self._parked, self._loading)
        self._waiting: list[tuple[tuple[int, int, int, int], Sequence]] = []  # a heap; finished entries are skipped
        self._num_waiting = 0
        self._num_filled = 0  # tokens computed of all sequences that have a table
        self._num_allowed = 0  # token slots that their answers may take
        self._num_found = 0  # pages that were there when they began
        self._num_released = 0  # of these sequences, since the start
        self._forecast, self._outlook = Forecast(), Outlook(cache.block_size)
        self._spared = (-1, -1, 0)  # a sequence to admit, _num_released, and the pages that the others are to have then
        self._num_arrived = 0
        self._next_seq_id = 0
        self._planned: list[Sequence] = []
        self._num_decoding = 0  # of these, the first ones

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._aside) + len(self._parked) + len(self._loading)

    @property
    def slots(self) -> tuple[int, int]:
        """Token slots in the pages of running sequences: those that hold a token, and those that hold none (yet)."""
        return self._num_filled, self.cache.num_named * self.cache.block_size - self._num_filled

    @property
    def num_spared(self) -> int:
        """Pages that are left to the running sequences, which are expected to need them, while another waits."""
        head = self._head()
        return self._spare if head is not None and self._spared[:2] == (head.seq_id, self._num_released) else 0

    @property
    def num_requests(self) -> int:
        """Those that have not ended."""
        return len(self._groups)

    @property
    def max_running(self) -> int:
        return self._max_running

    @property
    def running(self) -> abc.Collection[Sequence]:
        """Those that the next step computes, unless it must do without them, and that are not set aside."""
        return self._running.values()

    @property
    def has_work(self) -> bool:
        return bool(self._groups)

    def infos(self, limit: int) -> list[RequestInfo]:
        """Up to so many requests: those that run, then those that wait, each in order of service."""
        held = chain(self._running.values(), self._loading.values(), self._aside.values(), self._parked.values())
        groups = dict.fromkeys(sequence.group for sequence in sorted(held, key=attrgetter("key")))
        if len(groups) < limit:
            queue = (entry for entry in self._waiting if entry[1].phase is Phase.WAITING)
            groups |= dict.fromkeys(at.group for _, at in nsmallest(limit - len(groups), queue, key=itemgetter(0)))
        return [group.info() for group in islice(groups, limit)]

    def tokens_in(self, page: int, start: int) -> tuple[int, ...]:
        """Tokens from position `start` on, which a page of the device tier holds, or is to hold, for a sequence."""
        for group in self._groups.values():
            for sequence in group.live.values():
                if sequence.table is not None and page in sequence.table.pages:
                    return tuple(sequence.token_ids[start : start + self.cache.block_size])
        return ()

    # ── requests ──

    def add(self, request: Request) -> None:
        """Queue a request, or raise InvalidRequest; one that could never be served raises RequestTooLarge at once."""
        if request.request_id in self._groups:
            raise InvalidRequest("request_id", f"{request.request_id!r} is in use")
        max_tokens = self.limits.check(request)
        params = request.params
        self._num_arrived += 1
        seed = params.seed if params.seed is not None else _mix(self._seed, self._num_arrived)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        priority = request.priority if self._by_priority else 0
        group = Group(request, priority, self._num_arrived, max_tokens, stops)
        if request.session_id is not None:
            group.session = self.cache.sessions.begin(request.tenant, request.session_id)
        self._groups[request.request_id] = group
        sequence = self._new_sequence(group, 0, array("i", request.prompt_token_ids), seed)
        if params.use_beam_search:
            num_top = min(params.beam_width * max(2, 1 + len(stops)), self.limits.vocab_size)
            sequence.draws = (self._draw(sequence, seed, num_top),)
            sequence.num_ways = params.beam_width
        else:
            sequence.draws = tuple(self._draw(sequence, seed + choice) for choice in range(params.n))
            sequence.num_ways = params.n
        self.stats.prompt_tokens += group.num_prompt_tokens
        self._enqueue(sequence)

    def abort(self, request_id: str) -> None:
        """Drop a request and give all its pages back at once. Unknown or finished ids are ignored."""
        group = self._groups.get(request_id)
        if group is not None:
            for sequence in list(group.live.values()):
                if not group.searches:
                    self._forecast.ended(sequence.num_generated, cut_off=True)
                self._end(sequence)

    def finish(self, request_id: str, index: int) -> None:
        """End one choice early, for instance because its text holds a stop string."""
        group = self._groups.get(request_id)
        if group is not None:
            for sequence in list(group.live.values()):
                if sequence.index == index:
                    self._forecast.ended(sequence.num_generated, cut_off=False)
                    self._end(sequence)

    def abort_all(self) -> None:
        """Drop every request."""
        for request_id in list(self._groups):
            self.abort(request_id)

    def set_aside(self, sequence: Sequence) -> None:
        """Leave a running sequence out of the plans to come, though it counts as running in them.

        For a simulator, while all that a sequence needs is a token a step: the caller then sees to its tokens, its
        pages and the stats, and has it back before it ends, or anybody lacks a page.
        """
        self._aside[sequence.seq_id] = self._running.pop(sequence.seq_id)
        sequence.aside_since = self.stats.num_steps

    def call_back(self, sequence: Sequence, num_computed: int) -> None:
        """The next plan has it again, with so many tokens computed."""
        self._num_filled += num_computed - sequence.num_computed
        sequence.num_computed = num_computed
        self._running[sequence.seq_id] = self._aside.pop(sequence.seq_id)

    # ── a step ──

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """Plan the next step, at a time in seconds; None if there is nothing to compute and no page to move.

        Order of service: sequences that need one more token, then prompts under way and newly admitted ones, which
        share what is left of max_num_batched_tokens. Pages are reserved here; when there are none, somebody gives way.
        """
        self.cache.tick(now)
        self.newly_scheduled = []
        self.notes = []
        in_order = sorted(self._running.values(), key=attrgetter("key"))
        decoding = [seq for seq in in_order if len(seq.token_ids) - seq.num_computed == 1]
        if not self._extend(decoding):
            # reserving may preempt sequences further on in the list, which are then no longer running
            decoding = [seq for seq in decoding if seq.phase is Phase.RUNNING and self._reserve_next(seq)]
        budget = self._max_num_batched_tokens - len(decoding) - len(self._aside)
        prefilling: list[Sequence] = []
        if len(decoding) < len(self._running):  # the others' pages were reserved at admission
            prefilling = [seq for seq in self._running.values() if seq.num_remaining > 1]
        self._admit(prefilling, budget)
        shares = fair_shares([seq.num_remaining for seq in prefilling], budget)
        slices = [self._slice(sequence, 1) for sequence in decoding]
        self._num_decoding = len(slices)
        for sequence, share in zip(prefilling, shares, strict=True):
            if share:
                decoding.append(sequence)
                slices.append(self._slice(sequence, share))
        self._planned = decoding
        page_ops = self.cache.take_page_ops()
        if not slices and not self._aside and not self.cache.busy and not page_ops:
            return None
        self.stats.num_steps += 1
        return StepPlan(self.stats.num_steps, page_ops, slices, wait=not slices)

    def commit(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Take a step's result in: pages become findable, tokens are appended, forks made, finished sequences ended."""
        outputs: list[Output] = []
        searching: dict[int, Group] = {}
        if result.moved:
            self.cache.ended(result.moved)
            self._arrive()
        elif plan.wait:
            self.cache.lost()
            self._arrive()
        self._learn(plan, result.seconds)
        commit, num_computed = self.cache.commit, 0
        for sequence, piece, (sampled, scores) in zip(self._planned, plan.slices, result.slices, strict=True):
            table, group = sequence.table, sequence.group
            if table is None:  # aborted since
                continue
            count = len(piece.token_ids)
            sequence.num_computed += count
            num_computed += count
            commit(table, sequence.token_ids, sequence.num_computed)
            if scores:
                group.prompt_logprobs.extend(scores)
            if not piece.draws:
                continue
            if group.searches:
                self._park(sequence, sampled[0])
                searching[group.arrival] = group
            elif len(sampled) == 1:
                self._take(sequence, sampled, outputs)
            else:
                self._fan_out(sequence, sampled, outputs)
        self._num_filled += num_computed
        self.stats.computed_tokens += num_computed
        for group in searching.values():
            if all(beam.phase is Phase.PARKED for beam in group.live.values()):
                self._advance(group, outputs)
        return outputs

    def abandon(self, slices: abc.Iterable[int] | None = None) -> dict[str, int]:
        """Drop the requests of the step that was planned last, or of some of its slices: nothing of it was committed.

        Returns them, each with the number of a slice.
        """
        broken = range(len(self._planned)) if slices is None else slices
        requests = {self._planned[number].group.request.request_id: number for number in broken}
        for request_id in requests:
            self.abort(request_id)
        return requests

    # ── scheduling, in parts ──

    def _extend(self, sequences: list[Sequence]) -> bool:
        """Pages for sequences that need just one token; False, and nothing done, if that takes a look at each."""
        size = self.cache.block_size
        tables = [
            table
            for sequence in sequences
            if (table := sequence.table) is not None
            and (table.tail_shared or len(table.pages) * size < len(sequence.token_ids))
        ]
        return self.cache.extend(tables)

    def _reserve_next(self, sequence: Sequence) -> bool:
        """Pages for a sequence that needs just one token, preempting from the back; False if it had to give way."""
        table = sequence.table
        assert table is not None
        while not self.cache.reserve(table, sequence.num_computed, len(sequence.token_ids)):
            if self._parked:
                self._preempt_parked(sequence)
                continue
            if self.num_running == 1 and self.cache.sessions.yield_pin():
                continue
            chosen = victim(self._running.values(), sequence)
            self._preempt(chosen, sequence)
            if chosen is sequence:
                return False
        return True

    def _admit(self, prefilling: list[Sequence], budget: int) -> None:
        """Start waiting sequences, in order, while there are places, tokens and pages; add them to `prefilling`."""
        stepped_aside: list[Sequence] = []
        wanted = sum(seq.num_remaining for seq in prefilling)
        while self._has_place and len(stepped_aside) < MAX_WAITS:
            sequence = self._head()
            crowded = prefilling and wanted >= budget and (len(prefilling) + 1) * MIN_SHARE > budget
            if sequence is None or len(prefilling) >= budget or crowded:
                break
            if sequence.wait is None or sequence.wait.over:
                admission = self._try_admit(sequence)
                if admission is None:
                    break
                sequence.wait = admission if isinstance(admission, Wait) else None
            heappop(self._waiting)
            if sequence.wait is not None:
                stepped_aside.append(sequence)
                continue
            self._num_waiting -= 1
            if sequence.table is not None and sequence.table.load is not None:
                sequence.phase = Phase.LOADING
                self._loading[sequence.seq_id] = sequence
                continue
            self._run(sequence)
            prefilling.append(sequence)
            wanted += sequence.num_remaining
        for sequence in stepped_aside:
            heappush(self._waiting, (sequence.key, sequence))

    def _try_admit(self, sequence: Sequence) -> Admission | Wait | None:
        """Pages for all the sequence knows, leaving those that it and the running ones are going to need."""
        group = sequence.group
        while True:
            admission = self.cache.admit(
                sequence.token_ids,
                group.request.identity,
                spare=self._to_spare(sequence),
                use_cache=not group.scores_prompt,
                owner=group.request.tenant,
                session=group.session,
                request=group.request.request_id,
                explain=group.num_cached_tokens is None,
            )
            if admission is not None or self._running or self._aside or self._loading:
                break
            if self._parked:
                self._preempt_parked(sequence)
            elif self.cache.tiers.moves or not self.cache.sessions.yield_pin():
                break
        if isinstance(admission, Admission):
            sequence.table = admission.table
            sequence.num_computed = admission.num_computed
            sequence.write_start = admission.write_start
            sequence.num_at_admission = len(sequence.token_ids)
            found = admission.table.pages[: admission.num_computed // self.cache.block_size]
            num_own = 1 + (admission.table.load is not None)  # which holds them all as well
            self._hold(sequence, sum(self.cache.pool.refs(page) > num_own for page in found))
            if admission.found is not None:
                self._note(Note(group.request.request_id, "admitted", found=admission.found))
            if not group.served:
                group.served = True
                self.newly_scheduled.append(group.request.request_id)
            if admission.table.load is None:
                self._found(sequence)
        return admission

    def _found(self, sequence: Sequence) -> None:
        """All pages that it came to are there."""
        group, found, first = sequence.group, sequence.num_computed, sequence.group.num_cached_tokens is None
        if not group.scores_prompt:
            self.cache.found(len(sequence.token_ids), found, resumed=not first, session=group.session)
        if first:
            group.num_cached_tokens = found
        if sequence.num_lost:
            again = max(sequence.num_lost - found, 0)
            self._note(Note(group.request.request_id, "resumed", sequence.index, again))
            sequence.num_lost = 0

    def _to_spare(self, sequence: Sequence) -> int:
        """Pages to leave when this sequence begins: one for every two that run, or what all are expected to need.

        More may begin than are expected to fit if that pays. Not before a sequence has given its pages back does it
        look again.
        """
        if not (self._grows and self.num_running):
            return 0
        cache, num_known = self.cache, len(sequence.token_ids)
        allowed = self._allowed(sequence) + self._num_allowed
        if cache.pages_for(num_known + allowed) + self._soon <= cache.pool.num_available:
            return self._soon
        asked = (sequence.seq_id, self._num_released)
        if self._spared[:2] != asked:
            self._foresee()
            use_cache = not sequence.group.scores_prompt
            found = cache.find(sequence.token_ids, sequence.group.request.identity) if use_cache else []
            num_shared = sum(cache.pool.refs(page) > 0 for page in found)  # the others become its own
            own, room = cache.pages_for(num_known) - num_shared, self._num_own + cache.pool.num_available
            most, step = self._outlook.needed(self._ahead(sequence, num_shared), room)
            steps = max(step - self.stats.num_steps, 0)
            again = num_known - len(found) * cache.block_size + steps
            pays = most > room and cache.tiers.costs.preempting_pays(self.num_running, steps, again)
            self._spared = (*asked, 0 if pays else most - own)
        return self._spare

    @property
    def _num_own(self) -> int:
        """Pages of all sequences, each counted once."""
        return self.cache.num_named - self._num_found

    @property
    def _soon(self) -> int:
        """A page for every two that run."""
        return (self.num_running + 1) // 2

    @property
    def _spare(self) -> int:
        """Pages of `_spared` that nobody has taken yet."""
        return max(self._spared[2] - self._num_own, self._soon)

    def _ahead(self, sequence: Sequence, num_found: int) -> Ahead:
        """What is expected of a sequence that came to so many pages of others."""
        group, known, now = sequence.group, self._num_known(sequence), self.stats.num_steps
        # the last token needs no slot
        steps = max(self._forecast.to_come(sequence.seq_id, known - group.num_prompt_tokens, group.max_tokens) - 1, 0)
        ways, pages = sequence.num_ways, self.cache.pages_for(known + steps)
        if ways > 1:  # they part within a page
            pages += (ways - 1) * (pages - known // self.cache.block_size)
        return Ahead(now + steps, sequence.seq_id, pages - num_found, ways)

    def _num_known(self, sequence: Sequence) -> int:
        """Its tokens, with those that it got while it was set aside."""
        if sequence.seq_id in self._aside:
            return sequence.num_computed + self.stats.num_steps - sequence.aside_since + 1
        return len(sequence.token_ids)

    def _allowed(self, sequence: Sequence) -> int:
        """Token slots that its answers may take; where they part, each but one copies a page."""
        return sequence.group.max_tokens * sequence.num_ways + (sequence.num_ways - 1) * self.cache.block_size

    def _hold(self, sequence: Sequence, num_found: int) -> None:
        """It has pages now, and came to so many of others."""
        sequence.num_found = num_found
        self._unforeseen[sequence.seq_id] = sequence
        self._num_filled += sequence.num_computed
        self._num_allowed += self._allowed(sequence)
        self._num_found += num_found

    def _let_go(self, sequence: Sequence) -> None:
        """It has none any more."""
        if sequence.ahead is None:
            del self._unforeseen[sequence.seq_id]
        else:
            self._outlook.remove(sequence.ahead)
            sequence.ahead = None
        self._num_filled -= sequence.num_computed
        self._num_allowed -= self._allowed(sequence)
        self._num_found -= sequence.num_found

    def _narrow(self, sequence: Sequence) -> None:
        """It was forked, and goes on in one way."""
        if sequence.num_ways > 1:
            if sequence.table is not None:
                self._let_go(sequence)
            sequence.num_ways = 1
            if sequence.table is not None:
                self._hold(sequence, sequence.num_found)

    def _foresee(self) -> None:
        """Bring the outlook up to date: those that have begun, and those that went on for longer than was expected."""
        for late in self._outlook.take_overdue(self.stats.num_steps):
            self._unforeseen[late.seq_id] = self._holding[late.seq_id]
        for sequence in self._unforeseen.values():
            sequence.ahead = self._ahead(sequence, sequence.num_found)
            self._outlook.add(sequence.ahead)
        self._unforeseen.clear()

    def _slice(self, sequence: Sequence, count: int) -> Slice:
        start, tokens, group = sequence.num_computed, sequence.token_ids, sequence.group
        stop = start + count
        assert sequence.table is not None
        draws, pages = sequence.draws if stop == len(tokens) else (), sequence.table.pages
        if not (group.wants_scores and group.scores_prompt):
            return Slice(sequence.seq_id, start, tokens[start:stop], sequence.write_start, pages, draws)
        targets = tokens[start + 1 : min(stop, group.num_prompt_tokens - 1) + 1]
        num_top = group.request.params.prompt_logprobs
        return Slice(sequence.seq_id, start, tokens[start:stop], sequence.write_start, pages, draws, num_top, targets)

    def _head(self) -> Sequence | None:
        while self._waiting:
            sequence = self._waiting[0][1]
            if sequence.phase is Phase.WAITING:
                return sequence
            heappop(self._waiting)
        return None

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.phase = Phase.WAITING
        self._num_waiting += 1
        heappush(self._waiting, (sequence.key, sequence))

    def _arrive(self) -> None:
        """Run the sequences whose pages have come; those of which one was lost are to be admitted anew."""
        for sequence in list(self._loading.values()):
            load = sequence.table.load if sequence.table is not None else None
            assert sequence.table is not None and load is not None
            if load.done:
                del self._loading[sequence.seq_id]
                if load.complete:
                    sequence.table.load = None
                    self._found(sequence)
                    self._run(sequence)
                    self._note(Note(sequence.group.request.request_id, "arrived"))
                else:
                    self._release(sequence)
                    self._enqueue(sequence)

    def _learn(self, plan: StepPlan, seconds: float) -> None:
        """Correct what a token is thought to cost by a step that was mostly prompts."""
        if not seconds or len(plan.slices) == self._num_decoding:
            return
        counts = [(piece.start, len(piece.token_ids)) for piece in plan.slices]
        counts += [(self._num_known(sequence) - 2, 1) for sequence in self._aside.values()]  # it counts this step
        num_decoding = self._num_decoding + len(self._aside)
        if sum(count for _, count in counts) - num_decoding >= max(MIN_SHARE, num_decoding):
            self.cache.tiers.costs.computed(counts, seconds)

    def _release(self, sequence: Sequence) -> None:
        self._running.pop(sequence.seq_id, None)
        self._aside.pop(sequence.seq_id, None)
        self._parked.pop(sequence.seq_id, None)
        self._loading.pop(sequence.seq_id, None)
        if sequence.table is not None:
            self.cache.release(sequence.table, sequence.group.session)
            sequence.table = None
            self._let_go(sequence)
            self._num_released += 1
        sequence.num_computed = sequence.write_start = 0

    def _preempt(self, sequence: Sequence, needy: Sequence) -> None:
        """Take a sequence's pages. They stay findable while they last, so that resuming is a prefix hit."""
        sequence.num_lost, by = sequence.num_computed, needy.group.request.request_id if needy is not sequence else None
        request_id = sequence.group.request.request_id
        self._note(Note(request_id, "preempted", sequence.index, sequence.num_lost, by))
        self._release(sequence)
        sequence.num_preemptions += 1
        self.stats.num_preemptions += 1
        if sequence.group.scores_prompt:
            sequence.group.prompt_logprobs.clear()
        if sequence.phase is Phase.RUNNING:
            self._enqueue(sequence)

    def _preempt_parked(self, needy: Sequence) -> None:
        """Take the pages of the last of those that wait for their siblings."""
        self._preempt(max(self._parked.values(), key=attrgetter("key")), needy)

    def _note(self, note: Note) -> None:
        if self.cache.tiers.explainer is not None:
            self.notes.append(note)

    def _end(self, sequence: Sequence) -> None:
        waited = sequence.phase is Phase.WAITING
        self._release(sequence)
        sequence.phase = Phase.FINISHED
        if waited:
            self._num_waiting -= 1
            if len(self._waiting) > 2 * self._num_waiting + MAX_SKIPPED:
                self._waiting = [entry for entry in self._waiting if entry[1].phase is Phase.WAITING]
                heapify(self._waiting)
        group = sequence.group
        del group.live[sequence.seq_id]
        if not group.live:
            del self._groups[group.request.request_id]
            if group.session is not None:
                self.cache.sessions.end(group.session)

    # ── results, in parts ──

    def _fan_out(self, sequence: Sequence, sampled: abc.Sequence[Sampled], outputs: list[Output]) -> None:
        """At the end of the prompt, fork one sequence for each further choice; give each its first token."""
        choices = [sequence]
        choices += [self._fork(sequence, index, sequence.draws[index].seed) for index in range(1, len(sampled))]
        sequence.draws = sequence.draws[:1]
        self._narrow(sequence)
        for choice, token in zip(choices, sampled, strict=True):
            self._take(choice, (token,), outputs)

    def _take(self, sequence: Sequence, news: abc.Sequence[Sampled], outputs: list[Output]) -> None:
        """Append the one token of `news`, say so, and end the sequence if it is the last."""
        group, token = sequence.group, news[0].token_id
        self.stats.generation_tokens += 1
        scores: abc.Sequence[Sampled] | None = None
        reason: FinishReason | None = None
        if token < 0:
            news, reason = (), "abort"
        else:
            sequence.token_ids.append(token)
            generated = len(sequence.token_ids) - group.num_prompt_tokens
            if token in group.stop_token_ids and generated > group.request.params.min_tokens:
                reason = "stop"
            elif group.guided and token in self._eos_token_ids:
                reason = "stop"  # nothing else could follow
            elif generated >= group.max_tokens:
                reason = "length"
            if generated == 1 and group.wants_scores and sequence.index == 0:
                scores = group.prompt_logprobs
        cached = group.num_cached_tokens or 0
        outputs.append(
            Output(group.request.request_id, sequence.index, news, reason, cached, sequence.num_preemptions, scores)
        )
        if reason is not None:
            self._forecast.ended(sequence.num_generated, cut_off=reason != "stop")
            self._end(sequence)

    def _fork(self, parent: Sequence, index: int, seed: int) -> Sequence:
        """A sequence like `parent`, on the same pages if there is a place to run it, else waiting."""
        twin = self._new_sequence(parent.group, index, parent.token_ids[:], seed)
        twin.sampled, twin.score = parent.sampled[:], parent.score
        twin.draws = (parent.draws[0]._replace(seed=twin.seed, token_ids=twin.token_ids),)
        if parent.table is not None and self._has_place:
            twin.table = self.cache.fork(parent.table)
            twin.num_computed, twin.write_start = parent.num_computed, parent.write_start
            self._hold(twin, twin.num_computed // self.cache.block_size)  # it is to have a tail of its own
            self._run(twin)
        else:
            self._enqueue(twin)
        return twin

    def _park(self, beam: Sequence, best: Sampled) -> None:
        beam.candidates = best.top
        beam.phase = Phase.PARKED
        del self._running[beam.seq_id]
        self._parked[beam.seq_id] = beam

    def _advance(self, group: Group, outputs: list[Output]) -> None:
        """Every beam's candidates are known: go on with the best, or end the search."""
        beams = list(group.live.values())
        steps = advance(group, beams)
        if not steps:
            self._answer(group, sum(beam.num_preemptions for beam in beams), outputs)
        successors: list[tuple[Sequence, Step]] = []
        used: set[int] = set()
        for step in steps:  # fork while every parent is as it was
            parent = step.parent
            reused = parent.seq_id not in used
            used.add(parent.seq_id)
            successors.append((parent if reused else self._fork(parent, 0, 0), step))
        for beam in beams:
            if beam.seq_id in used:
                self._narrow(beam)
            else:
                self._end(beam)
        for successor, step in successors:
            successor.token_ids.append(step.sampled.token_id)
            successor.sampled.append(step.sampled)
            successor.score = step.score
            if successor.phase is Phase.PARKED:
                self._unpark(successor)

    def _answer(self, group: Group, num_preemptions: int, outputs: list[Output]) -> None:
        request, cached = group.request, group.num_cached_tokens or 0
        for index, (score, sampled, reason) in enumerate(group.hypotheses[: request.params.n]):
            scores = group.prompt_logprobs if index == 0 and group.wants_scores else None
            outputs.append(Output(request.request_id, index, sampled, reason, cached, num_preemptions, scores, score))
            self.stats.generation_tokens += len(sampled)
            self._forecast.ended(len(sampled), cut_off=reason != "stop")

    def _unpark(self, beam: Sequence) -> None:
        self._parked.pop(beam.seq_id, None)
        if beam.table is not None and self._has_place:
            self._run(beam)
        else:
            self._release(beam)
            self._enqueue(beam)

    def check(self) -> None:
        """Raise AuditError unless the books agree with the sequences that hold pages."""
        holding = [sequence for sequence in self._holding.values() if sequence.table is not None]
        foreseen = [sequence.ahead for sequence in holding if sequence.ahead is not None]
        expected = {
            "filled": (self._num_filled, sum(sequence.num_computed for sequence in holding)),
            "allowed": (self._num_allowed, sum(map(self._allowed, holding))),
            "found": (self._num_found, sum(sequence.num_found for sequence in holding)),
            "foreseen": (self._outlook.sequences, sorted(one.seq_id for one in foreseen)),
            "unforeseen": (sorted(self._unforeseen), sorted(one.seq_id for one in holding if one.ahead is None)),
        }
        for what, (counted, found) in expected.items():
            if counted != found and not (what == "filled" and self._aside):
                raise AuditError(f"the scheduler's books of {what} say {counted}, and its sequences {found}")

    # ── small parts ──

    @property
    def _has_place(self) -> bool:
        """Whether one more may run. Those whose pages are on their way will."""
        return len(self._running) + len(self._aside) + len(self._loading) < self._max_running

    def _run(self, sequence: Sequence) -> None:
        sequence.phase = Phase.RUNNING
        self._running[sequence.seq_id] = sequence

    def _new_sequence(self, group: Group, index: int, token_ids: array[int], seed: int) -> Sequence:
        sequence = Sequence(self._next_seq_id, group, index, token_ids, seed)
        self._next_seq_id += 1
        group.live[sequence.seq_id] = sequence
        return sequence

    def _draw(self, sequence: Sequence, seed: int, num_top: int | None = None) -> Draw:
        params = sequence.group.request.params
        num_top = params.logprobs or 0 if num_top is None else num_top
        return Draw(params, seed & MAX_SEED, sequence.token_ids, sequence.group.num_prompt_tokens, num_top)


def _mix(seed: int, number: int) -> int:
    """A well-spread seed for the request of this number (the finaliser of SplitMix64, Steele et al., 2014)."""
    value = (seed + number * 0x9E3779B97F4A7C15) & MAX_SEED
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MAX_SEED
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MAX_SEED
    return value ^ (value >> 31)
