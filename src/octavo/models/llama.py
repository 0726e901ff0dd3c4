"""The decoder of Llama and its near relatives, written only in ops.

Mistral adds a sliding window, Qwen2 a bias on Q, K and V, Qwen3 a norm on each head of Q and K: switches of the
configuration and tensors of the checkpoint, not other code. Owns no memory but what the backend gave it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from octavo.models.weights import Checkpoint
from octavo.ops.api import Floats, Footprint, Ints, KVPool, Ops, StepInputs, Tensor, Weight


class Layer(NamedTuple):
    """One layer's tensors in the backend's own form."""

    attention_norm: Tensor
    qkv: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Decoder:
    """A model ready to run on one backend, for positions below `max_model_len`."""

    def __init__(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> None:
        self.config = checkpoint.config
        self._ops = ops

        def vector(name: str) -> Tensor | None:
            return ops.vector(checkpoint.vector(name)) if checkpoint.has(name) else None

        def bias(name: str) -> Floats:
            if checkpoint.has(f"{name}.bias"):
                return checkpoint.vector(f"{name}.bias")
            return np.zeros(checkpoint.weight(name).shape[0], np.float32)

        def linear(*names: str, fine: bool = False) -> Tensor:
            weights: list[Weight] = [checkpoint.weight(name) for name in names]
            biased = any(checkpoint.has(f"{name}.bias") for name in names)
            joined = np.concatenate([bias(name) for name in names]) if biased else None
            return ops.linear(weights, joined, fine=fine)

        self.embedding = linear("embed")
        self.layers = [
            Layer(
                vector(f"layers.{i}.attention_norm"),
                linear(f"layers.{i}.q_proj", f"layers.{i}.k_proj", f"layers.{i}.v_proj"),
                vector(f"layers.{i}.q_norm"),
                vector(f"layers.{i}.k_norm"),
                linear(f"layers.{i}.o_proj"),
                vector(f"layers.{i}.ffn_norm"),
                linear(f"layers.{i}.gate_proj", f"layers.{i}.up_proj"),
                linear(f"layers.{i}.down_proj", fine=True),  # a product of two activations has the worst outliers
            )
            for i in range(self.config.num_layers)
        ]
        self.norm = vector("norm")
        self.head = self.embedding if self.config.tie_embeddings else linear("lm_head")
        self.rope = ops.rope_table(inverse_frequencies(checkpoint), max_model_len)
        self._compiled = ops.compiled(self._forward)

    @property
    def footprints(self) -> tuple[Footprint, Footprint]:
        """What the layers' projections take, which every step reads, and the vocabulary's, for steps with logits."""
        projections = [p for layer in self.layers for p in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        layers = Footprint(*map(sum, zip(*map(self._ops.footprint, projections), strict=True)))
        return layers, self._ops.footprint(self.head)

    def forward(self, step: StepInputs, pool: KVPool) -> Tensor:
        """The residual stream after the last layer, [num_rows, hidden]; keys and values are written into the pages."""
        return self._compiled(step, pool)

    def _forward(self, step: StepInputs, pool: KVPool) -> Tensor:
        ops, c = self._ops, self.config
        x = ops.embed(self.embedding, step)
        for i, layer in enumerate(self.layers):
            qkv = ops.norm_linear(x, layer.attention_norm, c.norm_eps, layer.qkv)
            ops.rope_write(qkv, i, c.num_heads, pool, self.rope, step, layer.q_norm, layer.k_norm, c.norm_eps)
            attended = ops.attention(qkv, i, c.num_heads, pool, step, c.sliding_window)
            ops.add_linear(x, attended, layer.output)
            ops.add_linear(x, ops.norm_gate_up(x, layer.ffn_norm, c.norm_eps, layer.gate_up), layer.down)
        return x

    def logits(self, x: Tensor, rows: Ints) -> Floats:
        """Scores of the token that follows each of the given rows, [len(rows), vocab]."""
        return self._ops.logits(x, rows, self.norm, self.config.norm_eps, self.head)


def inverse_frequencies(checkpoint: Checkpoint) -> Floats:
    """Radians a position for each pair of a head's dimensions, [head_dim / 2].

    Llama-3 scaling stretches the long wavelengths by `factor`, keeps the short ones and blends between
    (Transformers, modeling_rope_utils.py, `_compute_llama3_parameters`). GGUF files carry it as divisors instead.
    """
    c = checkpoint.config
    frequencies = c.rope_theta ** (-np.arange(0, c.head_dim, 2, dtype=np.float64) / c.head_dim)
    if checkpoint.has("rope_divisors"):
        frequencies /= checkpoint.vector("rope_divisors")
    if (scaling := c.rope_scaling) is not None:
        turns = scaling.original_context * frequencies / (2 * math.pi)  # within the original context
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequencies *= keep + (1 - keep) / scaling.factor
    return frequencies.astype(np.float32)
