"""EngineCore: the step loop over a scheduler and an executor.

    add ─► schedule ─► execute ─► commit ─► outputs

It owns the order of these calls, and the door to sessions and saving: no texts, no tensors, no clock, no thread.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.cache import invariants
from octavo.cache.look import PageInfo, page_info
from octavo.cache.manager import CacheManager, CacheStats
from octavo.cache.sessions import Session
from octavo.engine.executor import Executor
from octavo.errors import AuditError, ConfigError
from octavo.scheduler.scheduler import Scheduler, SchedulerStats
from octavo.types import Moved, Output, Place, Request, SessionInfo, SliceResult, StepPlan, StepResult, Tier

MAX_LOST_STEPS = 3
"""After so many steps in a row of which nothing could be computed, it is not the requests that are broken."""


class EngineCore:
    """Serves requests step by step. With `audit`, the page accounting is checked after every step (slow: for tests)."""

    def __init__(self, scheduler: Scheduler, executor: Executor, *, audit: bool = False) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._audit = audit
        self._num_lost = 0
        self._moved: list[Moved] = []  # of a step that was lost

    @property
    def cache(self) -> CacheManager:
        return self.scheduler.cache

    @property
    def executor(self) -> Executor:
        return self._executor

    @property
    def has_work(self) -> bool:
        """Whether there are requests, or pages to be moved."""
        return self.scheduler.has_work or self.cache.busy

    @property
    def stats(self) -> tuple[SchedulerStats, CacheStats]:
        return self.scheduler.stats, self.cache.stats

    def check(self, request: Request) -> None:
        """Raise what `add` would raise about this request, apart from an id in use, and queue nothing."""
        self.scheduler.limits.check(request)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest, or RequestTooLarge if it could never be served."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Drop a request; its pages are free or cached when this returns."""
        self.scheduler.abort(request_id)

    def finish(self, request_id: str, index: int) -> None:
        """End one choice of a request early."""
        self.scheduler.finish(request_id, index)

    def step(
        self,
        planned: Callable[[], None] | None = None,
        broke: Callable[[str, Exception], None] | None = None,
        now: float = 0.0,
    ) -> list[Output]:
        """Compute one step, at a time in seconds, and say what is new. An empty list when there is nothing to do.

        `planned` is called when it is decided who runs, before anything is computed.
        If the executor raises, the requests of that plan are aborted before the error goes on. With `broke` only those
        are that fail by themselves, which it is told, and nothing is raised unless the engine looks broken as a whole.
        """
        plan = self.scheduler.schedule(now)
        if plan is None:
            if self.has_work:
                raise AuditError("requests are waiting, yet nothing can be scheduled")
            return []
        if self._audit:
            invariants.check_plan(self.cache, plan)
        if planned is not None:
            planned()
        try:
            result = self._executor.execute(plan) if broke is None else self._execute(plan, broke)
        except BaseException:
            self.cache.broke_off(plan.page_ops)
            self.scheduler.abandon()
            raise
        if self._moved:
            result, self._moved = result._replace(moved=[*self._moved, *result.moved]), []
        outputs = self.scheduler.commit(plan, result)
        if self._audit:
            invariants.check(self.cache)
            self.scheduler.check()
        return outputs

    def _execute(self, plan: StepPlan, broke: Callable[[str, Exception], None]) -> StepResult:
        """Compute a step; if that fails, each slice alone, which gives the same tokens, and abort those that fail."""
        if not plan.slices:
            return self._executor.execute(plan)
        if plan.page_ops:  # apart: they are not to be done twice
            self._moved += self._executor.execute(plan._replace(slices=())).moved
            plan = plan._replace(page_ops=())
        try:
            result = self._executor.execute(plan)
        except Exception:
            results: list[SliceResult] = []
            errors: dict[int, Exception] = {}
            for number, piece in enumerate(plan.slices):
                try:
                    alone = self._executor.execute(plan._replace(slices=(piece,)))
                    results += alone.slices
                    self._moved += alone.moved
                except Exception as error:
                    errors[number] = error
                    results.append(SliceResult(()))
            self._num_lost = self._num_lost + 1 if len(errors) == len(plan.slices) else 0
            if self._num_lost == MAX_LOST_STEPS:
                raise
            for request_id, number in self.scheduler.abandon(errors).items():
                broke(request_id, errors[number])
            return StepResult(results)
        self._num_lost = 0
        return result

    # ── sessions, and the cache as a whole ──

    def tick(self, now: float) -> None:
        """It is `now`, in the seconds of `step`."""
        self.cache.tick(now)

    @property
    def due_at(self) -> float:
        """When `tick` has something to do though there is no work."""
        return self.cache.sessions.first_end

    def list_sessions(self, tenant: str | None, limit: int) -> list[SessionInfo]:
        """Sessions of a tenant, or of all (None), the longest idle first."""
        return self.cache.sessions.infos(tenant, limit)

    def session(self, tenant: str, session_id: str) -> SessionInfo:
        """Raises UnknownSession."""
        return self._govern(tenant, session_id, lambda session: None)

    def pin(self, tenant: str, session_id: str, ttl_s: float) -> SessionInfo:
        """Keep a session's pages where they are for so long; 0 ends that. Raises UnknownSession, PinRefused."""
        return self._govern(tenant, session_id, lambda session: self.cache.sessions.pin(session, ttl_s))

    def demote_session(self, tenant: str, session_id: str) -> SessionInfo:
        """Let a session's own idle pages leave the device tier now. Raises UnknownSession."""
        return self._govern(tenant, session_id, self.cache.sessions.demote)

    def release_session(self, tenant: str, session_id: str) -> SessionInfo:
        """Forget a session and its own idle pages, and say what it held. Raises UnknownSession."""
        held = self.session(tenant, session_id)
        self.cache.sessions.release(self.cache.sessions.get(tenant, session_id))
        return held

    def look_at(self, place: Place) -> PageInfo:
        """What is known of a page, with its tokens though they may not be computed yet."""
        info = page_info(self.cache, place)
        if not info.tokens and info.start is not None:
            info = info._replace(tokens=self.scheduler.tokens_in(place.page, info.start))
        return info

    def save(self) -> None:
        """Begin to copy every findable page to disk; `saving` goes down to 0 as steps are made. Raises ConfigError."""
        if not self.cache.tier_pages()[Tier.DISK].total:
            raise ConfigError("kv_offload_dir", "is not set: there is nowhere to save pages to")
        self.cache.tiers.save()

    @property
    def saving(self) -> int:
        """Pages still to be saved."""
        return self.cache.tiers.num_saving

    @property
    def save_failed(self) -> int:
        """Pages that the latest save could not write."""
        return self.cache.tiers.num_unsaved

    def _govern(self, tenant: str, session_id: str, act: Callable[[Session], None]) -> SessionInfo:
        session = self.cache.sessions.get(tenant, session_id)
        act(session)
        return self.cache.sessions.info(session)

    # ── the end ──

    def close(self) -> None:
        """Abort what is left, let copies end, and check that no page is held. Raises AuditError on a leak."""
        self.scheduler.abort_all()
        while self.cache.sessions.yield_pin():
            pass
        while self.cache.busy:
            self.step()
        invariants.check(self.cache)
        self._executor.close()
        for tier, pages in self.cache.tier_pages().items():
            if pages.referenced:
                raise AuditError(f"{pages.referenced} pages of the {tier.name.lower()} tier are still held at shutdown")
