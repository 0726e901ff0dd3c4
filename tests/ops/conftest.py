"""Every instruction-set variant that this machine runs, natively or emulated, forced in turn."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from octavo.ops import cpu


def native_variants() -> dict[str, tuple[Any, str]]:
    """Test id -> native module and variant. The emulated build adds what the machine lacks, where it was made."""
    found: dict[str, tuple[Any, str]] = {}
    for module_name in ("octavo._native", "octavo._native_emulated"):
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            if module_name == "octavo._native":
                raise
            continue
        for variant in module.variants():
            if variant not in found:
                found[variant] = module, variant
    return found


VARIANTS = native_variants()

MakeOps = Callable[..., cpu.CpuOps]


@pytest.fixture(scope="session", params=VARIANTS)
def native_variant(request: pytest.FixtureRequest) -> tuple[Any, str]:
    """A native module and the name of a variant it can run."""
    return VARIANTS[request.param]


@pytest.fixture
def make_ops(native_variant: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> MakeOps:
    """CpuOps of one variant for a number of threads, 2 unless told."""
    module, variant = native_variant
    monkeypatch.setattr(cpu, "_native", module)
    return lambda num_threads=2: cpu.CpuOps(num_threads, variant)
