"""Executor: what carries a step plan out. The real one runs a model; a simulator prices the plan."""

from __future__ import annotations

from typing import Protocol

from octavo.types import StepPlan, StepResult


class Executor(Protocol):
    """Carries plans out, one at a time and in order."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Begin the page operations in order, compute every slice, and answer its draws.

        Moves go on meanwhile and between plans; their ends are told in order, each once.
        Nothing may be kept of the plan's page tables after returning. Raises whatever broke; the engine then fails the
        requests of that plan.
        """
        ...

    def close(self) -> None:
        """Let the moves under way end, and give back files and threads. Nothing may be executed afterwards."""
        ...
