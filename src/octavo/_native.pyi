"""The compiled kernels; native/bindings.cpp says what they offer, and ops/cpu.py is all that asks."""

from typing import Any

def __getattr__(name: str) -> Any: ...
