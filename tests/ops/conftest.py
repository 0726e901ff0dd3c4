"""Every variant of the kernels that can be tried here: native ones, and emulated ones where the machine lacks them."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import _native

VARIANTS = ["generic", "avx2", "avx512", "amx"]


@pytest.fixture(scope="session", params=VARIANTS)
def native_variant(request: Any) -> tuple[Any, str]:
    """A native module and the name of a variant it can run."""
    if request.param in _native.variants():
        return _native, request.param
    pytest.skip("no such machine")
