"""An engine's process that breaks when it is asked to: by a prompt that begins with one of these tokens.

Run as a program in place of octavo.engine.process. STEP_S in the environment makes every step take that long.
"""

from __future__ import annotations

import os
import sys
import time

from octavo.engine import process
from octavo.engine.runner import ModelRunner
from octavo.types import StepPlan, StepResult

RAISE, EXIT, SEGFAULT, HANG, BREAK = 1, 2, 3, 4, 5
EXIT_CODE = 77
CAUSE = "the matrix is on fire"

execute = ModelRunner.execute
broken = False


def break_or_execute(self: ModelRunner, plan: StepPlan) -> StepResult:
    global broken
    for first in [piece.token_ids[0] for piece in plan.slices if piece.start == 0]:
        if first == RAISE:
            raise RuntimeError(CAUSE)
        if first == EXIT:
            os._exit(EXIT_CODE)
        if first == SEGFAULT:
            os.kill(os.getpid(), 11)
        if first == HANG:
            time.sleep(600)
        broken |= first == BREAK
    if broken:
        raise RuntimeError(CAUSE)
    time.sleep(float(os.environ.get("STEP_S", "0")))
    return execute(self, plan)


if __name__ == "__main__":
    ModelRunner.execute = break_or_execute  # type: ignore[method-assign]
    sys.exit(process.main(int(sys.argv[1])))
