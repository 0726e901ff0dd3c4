"""What the formats of keys and values cost in quality, as it was measured, and which of them nobody gets unasked.

A format is refused, unless the operator allows it, where its cost is known to be above the format's bound, and int4
wherever nobody has measured. Plain values: `octavo bench quality MODEL` finds them, docs/kv-dtypes.md tells how.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.config import EngineConfig, ModelConfig
from octavo.errors import ConfigError
from octavo.kv_format import ALIASES

BOUNDS = {"int8": 0.3, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "int4": 4.0}
"""Percent that perplexity may rise."""
UNASKED = ("int4",)
"""Formats that have to be measured first, as their cost differs from model to model."""


class Cost(NamedTuple):
    """Percent that perplexity is higher than with bf16, and twice its standard error."""

    percent: float
    error: float


class Known(NamedTuple):
    """A model on which formats were measured. A model of the same shape is taken for it."""

    name: str
    shape: tuple[int, ...]
    costs: dict[str, Cost]


KNOWN = (
    Known(
        "SmolLM2-135M",
        (30, 576, 1536, 9, 3, 64, 49152),
        {
            "int8": Cost(0.12, 0.09),
            "fp8_e4m3": Cost(0.17, 0.28),
            "fp8_e5m2": Cost(0.17, 0.34),
            "int4": Cost(4.9, 0.9),
        },
    ),
)
"""int8 by float32 arithmetic, in which nothing but keys and values is rounded; others by the native kernels."""


def check(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError for a format that costs too much to be taken without a word about it."""
    dtype = ALIASES.get(config.kv_cache_dtype, config.kv_cache_dtype)
    known = _known(model)
    cost = known.costs.get(dtype) if known is not None else None
    if config.allow_kv_quality_loss or (
        cost.percent <= BOUNDS.get(dtype, cost.percent) if cost else dtype not in UNASKED
    ):
        return
    about = "has not been measured on a model of this shape (octavo bench quality MODEL does that)"
    if known is not None and cost is not None:
        about = f"raises the perplexity of {known.name} by {cost.percent:g} %, above its bound of {BOUNDS[dtype]:g} %"
    remedy = "take int8, which holds half as many tokens and costs next to nothing, or set allow_kv_quality_loss"
    raise ConfigError("kv_cache_dtype", f"{dtype} {about}: {remedy}")


def told(config: EngineConfig, model: ModelConfig) -> str | None:
    """A line about what the format costs, None where it is nothing that bf16 does not cost."""
    dtype = ALIASES.get(config.kv_cache_dtype, config.kv_cache_dtype)
    if dtype not in BOUNDS:
        return None
    known = _known(model)
    if known is None or dtype not in known.costs:
        return f"keys and values in {dtype}: what that costs this model was not measured (octavo bench quality MODEL)"
    cost = known.costs[dtype]
    return f"keys and values in {dtype}: perplexity {cost.percent:+.2g} ± {cost.error:.2g} % on {known.name}"


def _known(model: ModelConfig) -> Known | None:
    shape = (
        *(model.num_layers, model.hidden_size, model.intermediate_size),
        *(model.num_heads, model.num_kv_heads, model.head_dim, model.vocab_size),
    )
    return next((known for known in KNOWN if known.shape == shape), None)
