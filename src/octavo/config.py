"""What an operator may set, and what a model's file says. Validated once, here; plain values ever after."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from octavo.errors import ConfigError
from octavo.kv_format import ALIASES, KV_BITS, MAX_BLOCK_SIZE, KVFormat, is_block_size, whole_block_size

MAX_LAYERS = 1 << 16
Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama-3 scaling of rotary frequencies (the `rope_scaling` of a config.json with `rope_type` "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder, whatever file it came from. Lengths in tokens, sizes in elements."""

    architecture: Architecture
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    def divided(self, number: int) -> ModelConfig:
        """What one of `number` devices holds: its share of the heads and of the inner columns.

        Where there are more devices than KV heads, each of them has a copy of one. Raises ConfigError.
        """
        kv_heads = self.num_kv_heads
        if self.num_heads % number or (kv_heads % number and number % kv_heads):
            heads = f"{self.num_heads} heads over {kv_heads} of keys and values"
            raise ConfigError("tensor_parallel_size", f"{number} devices cannot share {heads} equally")
        return replace(
            self,
            num_heads=self.num_heads // number,
            num_kv_heads=max(kv_heads // number, 1),
            intermediate_size=-(-self.intermediate_size // number),
            vocab_size=-(-self.vocab_size // number),
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's knobs, named as the server's flags with underscores.

    block_size: tokens in a page: 4, 8 or a multiple of 16.
    max_num_seqs: sequences running at once.
    max_num_batched_tokens: tokens computed in one step.
    scheduling_policy: "fcfs" serves in the order of arrival, "priority" lower values of Request.priority first.
    kv_cache_memory_bytes: size of the page pool; None sizes it from the memory that is free.
    enable_prefix_caching: whether finished and running prompts' pages are found again.
    max_model_len: longest prompt + answer; None takes the model's context length.
    seed: where requests without a seed of their own draw theirs from.
    num_threads: threads of the native kernels; None takes one for each available core.
    kv_cache_dtype: what keys and values are stored as: auto (bf16), bf16, fp32, fp8 (fp8_e4m3), fp8_e5m2, int8, int4.
    kv_cache_dtype_skip_layers: layer, from 0, that stays in bf16; may be given again.
    backend: "auto" and "cpu" run the native kernels, "reference" numpy in float32.
    swap_space: GiB of host memory for cached pages that leave the pool.
    kv_offload_dir: directory for cached pages that leave host memory, or that are saved; they survive a restart.
    kv_offload_space: GiB that those pages may take.
    restore: whether to find again what an earlier engine left in kv_offload_dir.
    preemption_mode: bring pages back from below (swap), compute them again (recompute), or what is faster here (auto).
    session_ttl: seconds in which an idle session's pages lose their advantage over others'.
    max_pinned_fraction: most of the pool that pinned sessions may hold.
    kv_quota: most of the pool in which one API key's pages may lie idle.
    kv_layout: paged, or contiguous: one page of max_model_len tokens a sequence, nothing shared; to compare with.
    allow_kv_quality_loss: take a kv_cache_dtype that costs more quality than its bound, or that was not measured.
    """

    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    scheduling_policy: str = "fcfs"
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    max_model_len: int | None = None
    seed: int = 0
    num_threads: int | None = None
    kv_cache_dtype: str = "auto"
    backend: str = "auto"
    swap_space: float = 0.0
    kv_offload_dir: str | None = None
    kv_offload_space: float = 16.0
    restore: bool = True
    preemption_mode: str = "auto"
    session_ttl: float = 1800.0
    max_pinned_fraction: float = 0.25
    kv_quota: float = 1.0
    kv_cache_dtype_skip_layers: tuple[int, ...] = ()
    kv_layout: str = "paged"
    allow_kv_quality_loss: bool = False

    def __post_init__(self) -> None:
        _integer("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        if not is_block_size(self.block_size):
            raise ConfigError("block_size", f"must be 4, 8 or a multiple of 16, got {self.block_size}")
        if self.kv_cache_dtype not in (names := (*ALIASES, *KV_BITS)):
            raise ConfigError("kv_cache_dtype", f"must be one of {', '.join(names)}; got {self.kv_cache_dtype!r}")
        object.__setattr__(self, "kv_cache_dtype_skip_layers", tuple(self.kv_cache_dtype_skip_layers))
        for layer in self.kv_cache_dtype_skip_layers:
            _integer("kv_cache_dtype_skip_layers", layer, 0, MAX_LAYERS)
        if self.backend not in ("auto", "cpu", "reference"):
            raise ConfigError("backend", f"must be auto, cpu or reference; got {self.backend!r}")
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ConfigError("scheduling_policy", f"must be fcfs or priority; got {self.scheduling_policy!r}")
        if self.preemption_mode not in ("auto", "swap", "recompute"):
            raise ConfigError("preemption_mode", f"must be auto, swap or recompute; got {self.preemption_mode!r}")
        for name in ("enable_prefix_caching", "restore", "allow_kv_quality_loss"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, f"must be true or false, got {getattr(self, name)!r}")
        for name, high in _NUMBERS.items():
            _number(name, getattr(self, name), high)
        if self.kv_layout not in ("paged", "contiguous"):
            raise ConfigError("kv_layout", f"must be paged or contiguous; got {self.kv_layout!r}")
        if self.kv_layout == "contiguous":
            for name in ("swap_space", "kv_offload_dir"):
                if getattr(self, name):
                    raise ConfigError(name, "needs kv_layout paged: a reservation stays where it is")
            object.__setattr__(self, "enable_prefix_caching", False)
        for name in ("swap_space", "kv_offload_dir"):
            if getattr(self, name) and not self.enable_prefix_caching:
                raise ConfigError(name, "needs enable_prefix_caching: pages are found again through the prefix cache")
        _integer("seed", self.seed, 0, 2**64 - 1)
        _integer("max_num_seqs", self.max_num_seqs, 1, 2**20)
        _integer("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**24)
        for name in ("kv_cache_memory_bytes", "max_model_len", "num_threads"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 1, 2**50)

    def longest(self, context_length: int) -> int:
        """The longest sequence of a model with this context. Raises ConfigError where more is asked for."""
        wanted = self.max_model_len or context_length
        if wanted > context_length:
            raise ConfigError("max_model_len", f"{wanted} tokens are more than the model's context of {context_length}")
        return wanted

    def for_model(self, context_length: int) -> EngineConfig:
        """With the page that the layout asks for: kv_layout contiguous has one that holds the longest sequence.

        Raises ConfigError where that is longer than pages can be.
        """
        if self.kv_layout == "paged":
            return self
        longest = self.max_model_len or context_length
        if longest > MAX_BLOCK_SIZE:
            most = f"kv_layout contiguous reserves at most {MAX_BLOCK_SIZE:,} tokens a sequence"
            raise ConfigError("max_model_len", f"{longest:,} tokens are too many: {most}")
        return replace(self, block_size=whole_block_size(longest))

    def kv_format(self, model: ModelConfig) -> KVFormat:
        """The format of the pages that an engine for this model has.

        Raises ConfigError for a layer that the model lacks, or heads that a format cannot hold.
        """
        kept = tuple(sorted(set(self.kv_cache_dtype_skip_layers)))
        if kept and max(kept) >= model.num_layers:
            layers = f"the model has {model.num_layers} layers, not one {max(kept)}"
            raise ConfigError("kv_cache_dtype_skip_layers", layers)
        dtype = ALIASES.get(self.kv_cache_dtype, self.kv_cache_dtype)
        if dtype not in ("bf16", "fp32") and model.head_dim % 16:
            raise ConfigError(
                "kv_cache_dtype", f"{dtype} needs a head_dim in sixteens, and this model's is {model.head_dim}"
            )
        return KVFormat(dtype, model.num_layers, model.num_kv_heads, model.head_dim, self.block_size, kept)


_NUMBERS = {"swap_space": 2**20, "kv_offload_space": 2**30, "session_ttl": 1e9, "max_pinned_fraction": 1, "kv_quota": 1}


def _number(name: str, value: object, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= high:
        raise ConfigError(name, f"must be a number from 0 to {high:g}, got {value!r}")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(name, f"must be a whole number from {low} to {high}, got {value!r}")
