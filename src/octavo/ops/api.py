"""The op set: all that a backend provides and all that a model may call.

A backend is an object with these methods; what they return is opaque to the model (`Tensor`). Activations are float32
rows, one row a token. A returned activation stays valid until the same method is called again or the next `embed`.

The rule every backend keeps: a row's result depends on that row's inputs alone, bit for bit, whatever other rows,
pages, threads or page sizes are about.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.kv_format import KVFormat

Tensor = Any
"""A backend's own array."""

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]


class Quantized(NamedTuple):
    """Rows of a matrix in groups along the inputs: value = scale · code + minimum.

    codes: uint8 (bits 4: 0…15) or int8 (bits 8) [rows, inputs]; scales, minimums: float32 [rows, inputs / group].
    """

    codes: NDArray[Any]
    scales: Floats
    minimums: Floats | None
    group: int
    bits: int


class Weight(Protocol):
    """A matrix as its file stores it, [num_outputs, num_inputs], read lazily and row range by row range."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def bits(self) -> int:
        """4 or 8 where `quantized` works, 16 or 32 where only `float32` does."""

    @property
    def group(self) -> int:
        """Inputs that share a scale (16 or 32); 0 for unquantised weights."""

    def quantized(self, start: int, stop: int) -> Quantized:
        """Rows start…stop without loss."""

    def float32(self, start: int, stop: int) -> Floats:
        """Rows start…stop as float32, the exact values that the file's format defines."""


class Footprint(NamedTuple):
    """What projections take in a backend's memory, and how many of their weights are multiplied as which type."""

    num_bytes: int = 0
    int8: int = 0
    bf16: int = 0
    float32: int = 0


class StepInputs(NamedTuple):
    """The rows of one forward pass. Slice s owns rows row_start[s] … row_start[s+1] and lists its pages likewise.

    token_ids, positions: [num_rows]. write_start: [num_slices], the first position whose KV is written.
    row_start, page_start: [num_slices + 1]. pages: page ids, all slices' tables end to end.
    """

    token_ids: Ints
    positions: Ints
    row_start: Ints
    write_start: Ints
    page_start: Ints
    pages: Ints


class Draws(NamedTuple):
    """Tokens to be drawn, [num_draws] each: `rows` says from which row of logits; a `top_k` below 1 keeps all tokens.

    `points`, in [0, 1), are the noise.
    """

    rows: Ints
    temperatures: Doubles
    top_ks: Ints
    top_ps: Doubles
    min_ps: Doubles
    points: Doubles


class Scores(NamedTuple):
    """Of each row that was asked about: log of the sum of exponentials, the given token's rank (1 = most likely), and
    the best tokens, of which a row fills as many as it asked for: [num_rows], [num_rows], [num_rows, most asked for].
    """

    log_totals: Doubles
    ranks: Ints
    tops: Ints


class KVPool(NamedTuple):
    """The pages of the device tier: `data` is [num_pages, page_bytes] bytes in the backend's memory."""

    format: KVFormat
    data: Tensor


Forward = Callable[[StepInputs, KVPool], Tensor]


class Ops(Protocol):
    """A backend. `x` is the residual stream, [num_rows, hidden]."""

    name: str

    # ── at load ──

    def linear(self, weights: list[Weight], bias: Floats | None = None, *, fine: bool = False) -> Tensor:
        """A projection in the backend's own order; several weights are joined along the outputs (Q, K, V; gate, up).

        `fine` asks a backend that rounds its inputs to keep more of them, at a price: for inputs full of outliers.
        """

    def footprint(self, weight: Tensor) -> Footprint:
        """Of a `linear`, as it is stored."""

    def vector(self, values: Floats) -> Tensor: ...

    def rope_table(self, inverse_frequencies: Floats, num_positions: int) -> Tensor:
        """Cosines and sines of position · frequency, from float64 arithmetic: float32 [num_positions, head_dim / 2]."""

    def allocate_pages(self, format: KVFormat, num_pages: int) -> KVPool: ...

    def compiled(self, forward: Forward) -> Forward:
        """The same forward pass, for one that calls the same ops on the same tensors whatever the step holds.

        A backend may note its calls the first time, and then make them without Python.
        """

    # ── between forward passes ──

    def copy_page(self, pool: KVPool, src: int, dst: int) -> None: ...

    def page(self, pool: KVPool, page: int) -> Bytes:
        """The bytes of a page, to be read and written in place: [page_bytes]. Any thread may call this."""

    # ── the forward pass ──

    def embed(self, table: Tensor, step: StepInputs) -> Tensor:
        """Rows of `table` (a `linear`, so that tied embeddings are stored once): a new residual stream."""

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        """RMS norm, projection, bias: [num_rows, num_outputs]."""

    def rope_write(
        self,
        qkv: Tensor,
        layer: int,
        num_heads: int,
        pool: KVPool,
        rope: Tensor,
        step: StepInputs,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """Normalise (where norms are given) and rotate Q and K in place, halves paired; write K and V into pages."""

    def attention(
        self, qkv: Tensor, layer: int, num_heads: int, pool: KVPool, step: StepInputs, window: int | None = None
    ) -> Tensor:
        """Causal grouped-query attention over the pages, scaled by head_dim ** -0.5: [num_rows, num_heads · head_dim].

        With `window`, a token sees the last `window` tokens, itself included. Slots past a row's position are never
        read.
        """

    def add_linear(self, x: Tensor, inputs: Tensor, weight: Tensor) -> None:
        """x += projection of `inputs`."""

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        """RMS norm, joined gate and up projection, SiLU(gate) · up: [num_rows, intermediate]."""

    def logits(self, x: Tensor, rows: Ints, norm: Tensor, eps: float, weight: Tensor) -> Floats:
        """Final norm and vocabulary projection of the given rows: [len(rows), vocab] in host memory."""

    # ── from logits to tokens: `logits` are host memory, [num_rows, vocab], of one vocabulary throughout ──

    def best(self, logits: Floats) -> Ints:
        """The most likely token of each row, the lowest id among equals; -1 where the row is broken.

        That is, where a logit is NaN or +inf or none is finite. Nothing else may be asked of broken rows.
        """

    def choose(self, logits: Floats, draws: Draws) -> Ints:
        """A token for each draw.

        Filters keep a beginning of the order "most likely first, lower ids first among equals": top_k tokens of those
        that are possible, then the fewest with top_p of the mass, then those of at least min_p of the best one's mass.
        What is kept lies end to end on a line, each token as long as its mass; the point that divides the line as
        `points` divide [0, 1) names the token. A mass is exp((logit - largest) / temperature).
        """

    def score(self, logits: Floats, rows: Ints, tokens: Ints, num_tops: Ints) -> Scores:
        """What the given rows say of the given tokens, one each, and their best tokens, in the order of `choose`."""
