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
from octavo.types import Output, Request, SliceResult, StepPlan, StepResult

MAX_LOST_STEPS = 3
"""After so many steps in a row of which nothing could be computed, it is not the requests that are broken."""


class EngineCore:
    """Serves requests step by step. With `audit`, the page accounting is checked after every step (slow: for tests)."""

    def __init__(self, scheduler: Scheduler, executor: Executor, *, audit: bool = False) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._audit = audit
        self._num_lost = 0

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

    def step(
        self, planned: Callable[[], None] | None = None, broke: Callable[[str, Exception], None] | None = None
    ) -> list[Output]:
        """Compute one step and say what is new. Returns an empty list when there is nothing to do.

        `planned` is called when it is decided who runs, before anything is computed.
        If the executor raises, the requests of that plan are aborted before the error goes on. With `broke` only those
        are that fail by themselves, which it is told, and nothing is raised unless the engine looks broken as a whole.
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
            result = self._executor.execute(plan) if broke is None else self._execute(plan, broke)
        except BaseException:
            self.scheduler.abandon()
            raise
        outputs = self.scheduler.commit(plan, result)
        if self._audit:
            invariants.check(self.cache)
        return outputs

    def _execute(self, plan: StepPlan, broke: Callable[[str, Exception], None]) -> StepResult:
        """Compute a step; if that fails, each slice alone, which gives the same tokens, and abort those that fail."""
        if plan.page_ops:  # apart: they are not to be done twice
            self._executor.execute(plan._replace(slices=()))
            plan = plan._replace(page_ops=())
        try:
            result = self._executor.execute(plan)
        except Exception:
            results: list[SliceResult] = []
            errors: dict[int, Exception] = {}
            for number, piece in enumerate(plan.slices):
                try:
                    results += self._executor.execute(plan._replace(slices=(piece,))).slices
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

    def close(self) -> None:
        """Abort what is left and check that every page is free or cached. Raises AuditError on a leak."""
        self.scheduler.abort_all()
        invariants.check(self.cache)
        if self.cache.pool.num_referenced:
            raise AuditError(f"{self.cache.pool.num_referenced} pages are still held at shutdown")
