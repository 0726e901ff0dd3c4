"""What a step takes: as measured on a machine, or as a GPU's data sheet allows.

Plain sums over what a step computes. Nothing is scheduled here and nothing measured; `octavo bench calibrate` measures.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from octavo.config import ModelConfig
from octavo.errors import ConfigError
from octavo.gpus import Gpu
from octavo.kv_format import KVFormat
from octavo.types import Slice, Tier


class Load(NamedTuple):
    """What a step computes, summed over its slices.

    num_rows: tokens computed. num_draws: of so many the logits are wanted. num_seen: tokens that slices of one token
    attend to. num_pairs: pairs of a token of a longer slice and one that it attends to. num_stored: tokens that longer
    slices attend to, each once.
    """

    num_rows: int
    num_draws: int = 0
    num_seen: int = 0
    num_pairs: int = 0
    num_stored: int = 0

    def __add__(self, other: Load) -> Load:  # type: ignore[override]  # of tuples it means something else
        rows, draws, seen, pairs, stored = self
        more_rows, more_draws, more_seen, more_pairs, more_stored = other
        return Load(rows + more_rows, draws + more_draws, seen + more_seen, pairs + more_pairs, stored + more_stored)


def load_of(slices: Iterable[tuple[int, int, int]]) -> Load:
    """The load of slices of (start, tokens, draws)."""
    rows = draws = seen = pairs = stored = 0
    for start, count, num_draws in slices:
        rows += count
        draws += num_draws
        if count == 1:
            seen += start + 1
        else:
            pairs += count * start + count * (count + 1) // 2
            stored += start + count
    return Load(rows, draws, seen, pairs, stored)


def load_of_plan(slices: Iterable[Slice]) -> Load:
    """The load of a plan's slices."""
    return load_of((piece.start, len(piece.token_ids), len(piece.draws)) for piece in slices)


class Cost(Protocol):
    """Seconds of steps and moves, and the pages that they move."""

    @property
    def format(self) -> KVFormat:
        """What a page is."""

    @property
    def weight_bytes(self) -> int:
        """What the model itself takes of the memory."""

    @property
    def memory_bytes(self) -> int:
        """What there is for weights and pages."""

    def step_s(self, load: Load) -> float:
        """From the start of a step to that of the next."""

    def move_s(self, tier: Tier) -> float:
        """To copy one page between the pool, or host memory, and this tier."""


# ── as measured ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Measured:
    """What `octavo bench calibrate` found, in seconds; see octavo.bench.calibrate.

    A step takes what its rows take (between two `knots` (rows, seconds) a straight line), and in addition `draw_s` a
    draw, `seen_s` a token that a single row attends to, `pair_s` a pair, `stored_s` a stored token of longer slices.
    """

    model: str
    format: KVFormat
    knots: tuple[tuple[int, float], ...]
    draw_s: float
    seen_s: float
    pair_s: float
    stored_s: float
    load_s: dict[Tier, float]
    weight_bytes: int
    memory_bytes: int

    def at(self, dtype: str, block_size: int, bf16_layers: tuple[int, ...] = ()) -> Measured:
        """The same with pages of another size. Raises ConfigError for another dtype, whose steps take other times."""
        if bf16_layers not in ((), self.format.bf16_layers):
            timed = ", ".join(map(str, self.format.bf16_layers)) or "none"
            raise ConfigError("kv_cache_dtype_skip_layers", f"were not timed: this calibration has {timed}")
        if dtype not in ("auto", self.format.dtype):
            raise ConfigError("kv_cache_dtype", f"{dtype} was not timed: this calibration is of {self.format.dtype}")
        return self.holding(replace(self.format, block_size=block_size))

    def holding(self, format: KVFormat) -> Measured:
        """The same with other pages: moves take as long as their bytes say, steps as they were timed."""
        share = format.page_bytes / self.format.page_bytes
        loads = {tier: seconds * share for tier, seconds in self.load_s.items()}
        return replace(self, format=format, load_s=loads)

    def step_s(self, load: Load) -> float:
        rows, draws, seen, pairs, stored = load
        return (
            self._rows_s(rows) + draws * self.draw_s + seen * self.seen_s + pairs * self.pair_s + stored * self.stored_s
        )

    def _rows_s(self, rows: int) -> float:
        knots = self.knots
        at = min(max(bisect_left(knots, (rows, 0.0)), 1), len(knots) - 1)
        (low, low_s), (high, high_s) = knots[at - 1], knots[at]
        return low_s + (rows - low) * (high_s - low_s) / (high - low)

    def move_s(self, tier: Tier) -> float:
        return self.load_s.get(tier, 0.0)

    def save(self, path: Path, **about: Any) -> None:
        """Write it to a file, with what else there is to say."""
        figures = {**asdict(self), "load_s": {tier.name.lower(): seconds for tier, seconds in self.load_s.items()}}
        path.write_text(json.dumps({"cost": figures, **about}, indent=1) + "\n")

    def _check(self) -> None:
        """Raises ValueError for figures that are no times, or no sizes."""
        f, (rows, lines) = self.format, zip(*self.knots, strict=True)
        times = (*lines, self.draw_s, self.seen_s, self.pair_s, self.stored_s, *self.load_s.values())
        sizes = (self.memory_bytes, f.num_layers, f.num_kv_heads, f.head_dim, f.block_size, f.page_bytes)
        ascend = len(rows) > 1 and all(before < after for before, after in pairwise(rows))
        if not (ascend and all(map(math.isfinite, times)) and min(times) >= 0 and min(sizes) > 0):
            raise ValueError("has a time or a size that is none")

    @classmethod
    def open(cls, path: Path) -> Measured:
        """Raises ConfigError("calibration")."""
        try:
            figures = json.loads(path.read_text())["cost"]
            kept = tuple(figures["format"]["bf16_layers"])
            found = cls(
                **{
                    **figures,
                    "format": KVFormat(**figures["format"] | {"bf16_layers": kept}),
                    "knots": tuple((rows, seconds) for rows, seconds in figures["knots"]),
                    "load_s": {Tier[name.upper()]: seconds for name, seconds in figures["load_s"].items()},
                }
            )
            found._check()
            return found
        except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError("calibration", f"{path} is no file of octavo bench calibrate: {error!r}") from error


# ── as a data sheet has it ───────────────────────────────────────────────────────────────────────────────────────


def processor(num_cores: int, memory_bytes: int) -> Gpu:
    """So many cores of a processor, as a GPU. As the probe of docs/performance.md has it of two with AVX2; other ones
    differ by much, so that this is good for comparing settings only.
    """
    return Gpu(memory_bytes, num_cores * 18e9, num_cores * 150e9, 1e12, 10e9)


READ_SHARE, OPERATION_SHARE, LINK_SHARE = 0.8, 0.6, 0.7
"""Of a data sheet's rates, what good kernels are seen to reach."""
STEP_S, COLLECTIVE_S = 2e-3, 10e-6
"""Of a step besides the model, and of a collective operation besides its bytes."""
MEMORY_SHARE, DISK_RATE = 0.9, 3e9
"""Of the memory, what is given to weights and pages; bytes a second that a disk reads and writes."""


class Sheet:
    """A model in bf16 on `count` GPUs, each layer split over all: a step takes the larger of the times to read and to
    multiply what it must, and the time to add the layers' halves up, twice a layer.

    Weights of `weight_bytes` in all are read as such, and multiplied like others. Raises ConfigError for heads that so
    many GPUs cannot share.
    """

    def __init__(
        self,
        model: ModelConfig,
        gpu: Gpu,
        count: int,
        dtype: str,
        block_size: int,
        *,
        bf16_layers: tuple[int, ...] = (),
        weight_bytes: int | None = None,
    ) -> None:
        kv_heads = count * model.divided(count).num_kv_heads  # with the copies that each GPU has of one
        self.format = KVFormat(dtype, model.num_layers, kv_heads, model.head_dim, block_size, bf16_layers)
        q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        layer = model.hidden_size * (2 * q + 2 * kv + 3 * model.intermediate_size)
        head = model.hidden_size * model.vocab_size
        layers = model.num_layers * layer
        whole = 2 * (layers + head * (1 if model.tie_embeddings else 2))
        self.weight_bytes = weight_bytes or whole
        self.memory_bytes = int(count * gpu.memory_bytes * MEMORY_SHARE)
        read, multiply = count * gpu.read_rate * READ_SHARE, count * gpu.operation_rate * OPERATION_SHARE
        self._weights_s = 2 * (layers + head) / read * self.weight_bytes / whole
        self._token_s = self.format.token_bytes / read
        self._row_s, self._draw_s = 2 * layers / multiply, 2 * head / multiply
        self._pair_s = 4 * model.num_layers * q / multiply
        share = 2 * (count - 1) / count  # of the bytes of a ring's all-reduce that each GPU sends
        self._row_link_s = 2 * model.num_layers * share * 2 * model.hidden_size / (gpu.peer_rate * LINK_SHARE)
        self._step_s = STEP_S + (2 * model.num_layers * COLLECTIVE_S if count > 1 else 0.0)
        self._load_s = {
            Tier.HOST: self.format.page_bytes / (count * gpu.host_rate * LINK_SHARE),
            Tier.DISK: self.format.page_bytes / DISK_RATE,
        }

    def step_s(self, load: Load) -> float:
        rows, draws, seen, pairs, stored = load
        read_s = self._weights_s + (seen + stored) * self._token_s
        multiply_s = rows * self._row_s + draws * self._draw_s + (seen + pairs) * self._pair_s
        return self._step_s + rows * self._row_link_s + max(read_s, multiply_s)

    def move_s(self, tier: Tier) -> float:
        return self._load_s[tier]
