"""An engine that is killed at any moment, on a file that is damaged besides, comes back with the right answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import crash


@pytest.mark.timeout(600)  # seven engines, one after the other
def test_killed_engines_come_back_with_the_same_bits(model_path: Path) -> None:
    told = crash.summary(crash.run(model_path, kills=5))
    assert told["faults"] == [] and told["wrong"] == 0
    assert told["kills"] == {"serving": 2, "writing": 2, "starting": 1}
    assert told["found"]["least"] > 0 and told["served"] > 0
    assert told["damaged_headers"] == told["damaged_pages"] == crash.DAMAGED
