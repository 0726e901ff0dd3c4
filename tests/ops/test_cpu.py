"""The native backend: its choice of variant and threads, how it packs matrices, and what its threads may meet."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from octavo import _native
from octavo.allowance import available_cores
from octavo.errors import ConfigError
from octavo.ops import cpu
from octavo.ops.api import Footprint, Quantized, StepInputs
from octavo.ops.cpu import CpuOps
from octavo.ops.reference import ReferenceOps

from .paged import MakeOps


class Stored:
    """A Q8_0-like matrix, the last row's scale of which f16 cannot hold where `wide`."""

    bits, group = 8, 32

    def __init__(self, outputs: int, inputs: int, wide: bool = False) -> None:
        rng = np.random.default_rng(0)
        self.shape = (outputs, inputs)
        self.codes = rng.integers(-128, 127, self.shape, np.int8, endpoint=True)
        self.scales = rng.random((outputs, inputs // 32)).astype(np.float16).astype(np.float32)
        if wide:
            self.scales[-1, 0] = 0.1

    def quantized(self, start: int, stop: int) -> Quantized:
        return Quantized(self.codes[start:stop], self.scales[start:stop], None, 32, 8)

    def float32(self, start: int, stop: int) -> Any:
        return np.repeat(self.scales[start:stop], 32, axis=1) * self.codes[start:stop]


def embedded(ops: CpuOps, table: _native.Linear) -> Any:
    rows = np.arange(table.outputs, dtype=np.int32)
    bounds, nothing = np.array([0, len(rows)], np.int32), np.zeros(2, np.int32)
    return ops.embed(table, StepInputs(rows, rows, bounds, nothing[:1], nothing, rows[:0])).numpy().copy()


def test_a_variant_that_the_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_ISA", "generic")
    assert CpuOps(1).backend.variant == "generic"
    monkeypatch.setenv("OCTAVO_ISA", "mmx")
    with pytest.raises(ConfigError, match=r"this machine runs generic.*, not 'mmx'") as caught:
        CpuOps(1)
    assert caught.value.option == "OCTAVO_ISA"
    monkeypatch.setenv("OCTAVO_ISA", "")
    assert CpuOps(1).backend.variant == _native.variants()[-1]


def test_threads() -> None:
    assert CpuOps().backend.num_threads == min(available_cores(), cpu.MAX_THREADS)
    assert CpuOps(3).backend.num_threads == 3
    for bad in (0, -1, cpu.MAX_THREADS + 1):
        with pytest.raises(ConfigError, match="num_threads"):
            CpuOps(bad)


@pytest.mark.parametrize("wide", [False, True])
def test_matrices_are_packed_in_pieces(monkeypatch: pytest.MonkeyPatch, wide: bool) -> None:
    """Where f16 does not hold the last of many scales, the matrix is packed again."""
    monkeypatch.setattr(cpu, "PACKED_AT_ONCE", 1)
    ops = CpuOps(1)
    stored = Stored(70, 64, wide)
    assert (embedded(ops, ops.linear([stored])) == stored.float32(0, 70)).all()


def test_backends_in_several_python_threads() -> None:
    stored, results = Stored(100, 64), []

    def work() -> None:
        ops = CpuOps(2)
        table = ops.linear([stored])
        results.extend((embedded(ops, table) == stored.float32(0, 100)).all() for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 150 and all(results)


def test_footprints_count_padding_in_bytes_and_weights_without() -> None:
    """70 outputs take five blocks of 16; a group of 32 inputs has an f16 scale, or a float32 where that is needed."""
    for wide, scale in ((False, 2), (True, 4)):
        stored = Stored(70, 64, wide)
        ops = CpuOps(1)
        found = ops.footprint(ops.linear([stored, stored]))
        assert found == Footprint(2 * 80 * (64 + 2 * scale), int8=2 * 70 * 64)
    assert ReferenceOps().footprint(ReferenceOps().linear([stored])) == Footprint(70 * 64 * 4, float32=70 * 64)


def test_every_variant_says_how_fast_it_reads_and_multiplies(make_ops: MakeOps) -> None:
    ops = make_ops()
    assert all(rate > 0 for rate in ops.read_rates([1, 1 << 20]))
    assert all(ops.product_rate(dtype) > 0 for dtype in ("int8", "bf16", "float32"))
    with pytest.raises(ValueError, match="products are of"):
        ops.product_rate("int4")


FORKED = """
import os, warnings
import numpy as np
from octavo import _native
warnings.simplefilter("ignore")
backend = _native.Backend("generic", 3)
table = _native.Linear(backend, 32, False)
table.add_segment(40, 16, 0, False, False)
table.pack_float(0, np.ones((40, 32), np.float32))
out = _native.Matrix(40)
x = _native.Matrix(32)
x.resize(9)
x.numpy()[:] = 1
def good():
    out.resize(0)
    _native.linear(backend, x, None, 0.0, table, out)
    return bool((out.numpy() == 32).all())
assert good()
child = os.fork()
if child == 0:
    os._exit(0 if good() and good() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert good()
"""


def test_a_forked_child_has_threads_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=60)
