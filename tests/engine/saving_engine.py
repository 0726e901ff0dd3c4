"""An engine's process whose saves are slow: a page a step, each of STEP_S, and the last one cannot be written.

Run as a program in place of octavo.engine.process.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from octavo.engine import process
from octavo.engine.core import EngineCore
from octavo.types import Output

PAGES = 20
STEP_S = 0.02

step, has_work = EngineCore.step, EngineCore.has_work
left = num_saves = 0


def save(self: EngineCore) -> None:
    global left, num_saves
    left, num_saves = PAGES, num_saves + 1


def ignore(self: EngineCore, value: object) -> None:
    pass


def step_and_save(self: EngineCore, *arguments: Any, **more: Any) -> list[Output]:
    global left
    if left:
        time.sleep(STEP_S)
        left -= 1
    return step(self, *arguments, **more) if has_work.fget(self) else []  # type: ignore[attr-defined]


if __name__ == "__main__":
    EngineCore.save = save  # type: ignore[method-assign]
    EngineCore.saving = property(lambda self: left, ignore)  # type: ignore
    EngineCore.save_failed = property(lambda self: 0 if left else num_saves, ignore)  # type: ignore
    EngineCore.has_work = property(lambda self: left > 0 or has_work.fget(self))  # type: ignore
    EngineCore.step = step_and_save  # type: ignore
    sys.exit(process.main(int(sys.argv[1])))
