"""EngineCore: the step loop over a scheduler and an executor.

    add ─► schedule ─► execute ─► commit ─► outputs

It owns the order of these calls and nothing else: no texts, no tensors, no clock, no thread.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.cache import invariants
from octavo.cache.manager import CacheManager, CacheStats
from octavo.engine.executor import Executor
from octavo.errors import AuditError
from octavo.scheduler.scheduler import Scheduler, SchedulerStats
from octavo.types import Output, Request


class EngineCore:
    """Serves requests step by step. With `audit`, the page accounting is checked after every step (slow: for tests)."""

    def __init__(self, scheduler: Scheduler, executor: Executor, *, audit: bool = False) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._audit = audit

    @property
    def cache(self) -> CacheManager:
        return self.scheduler.cache

    @property
    def executor(self) -> Executor:
        return self._executor

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

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

    def step(self, planned: Callable[[], None] | None = None) -> list[Output]:
        """Compute one step and say what is new. Returns an empty list when there is nothing to do.

        `planned` is called when it is decided who runs, before anything is computed.
        If the executor raises, the requests of that plan are aborted before the error goes on; nobody else is harmed.
        """
        plan = self.scheduler.schedule()
        if plan is None:
            if self.has_work:
                raise AuditError("requests are waiting, yet nothing can be scheduled")
            return []
        if self._audit:
            invariants.check_plan(self.cache, plan)
        if planned is not None:
            planned()
        try:
            result = self._executor.execute(plan)
        except BaseException:
            self.scheduler.abandon()
            raise
        outputs = self.scheduler.commit(plan, result)
        if self._audit:
            invariants.check(self.cache)
        return outputs

    def close(self) -> None:
        """Abort what is left and check that every page is free or cached. Raises AuditError on a leak."""
        self.scheduler.abort_all()
        invariants.check(self.cache)
        if self.cache.pool.num_referenced:
            raise AuditError(f"{self.cache.pool.num_referenced} pages are still held at shutdown")
