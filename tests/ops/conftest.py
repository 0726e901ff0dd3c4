"""Every variant of the kernels, forced in turn: native where the machine has the instructions, else emulated."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from octavo import _native
from octavo.ops import cpu

from .paged import MakeOps

VARIANTS = ["generic", "avx2", "avx512", "amx"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def emulated() -> Any:
    """The kernels with AVX-512 and AMX emulated on AVX2, built on first use (about a minute) into build/emulated."""
    if "avx2" not in _native.variants():
        pytest.skip("the emulation of AVX-512 and AMX needs AVX2")
    build = ROOT / "build" / "emulated"
    options = ["-DOCTAVO_EMULATE=ON", f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release"]
    build.mkdir(parents=True, exist_ok=True)
    try:
        with (build / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # test processes side by side build it once
            subprocess.run(["cmake", "-S", ROOT, "-B", build, *options], check=True, capture_output=True, text=True)
            subprocess.run(["cmake", "--build", build, "--parallel", "2"], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("the emulation of AVX-512 and AMX is built with cmake, which is not installed")
    except subprocess.CalledProcessError as error:
        pytest.fail(f"the emulation does not build:\n{error.stdout[-4000:]}{error.stderr[-4000:]}", pytrace=False)
    path = build / f"_native_emulated{EXTENSION_SUFFIXES[0]}"
    loader = ExtensionFileLoader("_native_emulated", str(path))
    spec = spec_from_file_location("_native_emulated", path, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(scope="session", params=VARIANTS)
def native_variant(request: Any) -> tuple[Any, str]:
    """A native module and the name of a variant that it runs here."""
    if request.param in _native.variants():
        return _native, request.param
    return request.getfixturevalue("emulated"), request.param


@pytest.fixture
def make_ops(native_variant: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> MakeOps:
    """CpuOps of one variant for a number of threads, 2 unless told."""
    module, variant = native_variant
    monkeypatch.setattr(cpu, "_native", module)
    return lambda num_threads=2: cpu.CpuOps(num_threads, variant)
