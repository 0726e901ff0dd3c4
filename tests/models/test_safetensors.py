"""Folders of safetensors: number formats, shards, configurations, and files that lie."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from octavo.config import RopeScaling
from octavo.errors import ModelError
from octavo.models.safetensors import read_tensors
from octavo.models.weights import Checkpoint, open_checkpoint
from tests.models import tiny


def load_all(folder: Path) -> Checkpoint:
    checkpoint = open_checkpoint(folder)
    for stored in checkpoint._tensors.values():
        stored.float32(0, stored.num_rows)
    checkpoint.tokenizer()
    return checkpoint


@pytest.fixture(scope="module")
def found() -> dict[str, np.ndarray]:
    return tiny.tensors(tiny.config("llama"))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_format_and_any_number_of_shards(
    tmp_path: Path, found: dict[str, np.ndarray], dtype: str, shards: int
) -> None:
    checkpoint = load_all(tiny.write_folder(tmp_path, tiny.config("llama"), found, dtype=dtype, shards=shards))
    for name, key in (("model.layers.1.self_attn.k_proj.weight", "layers.1.k_proj"), ("lm_head.weight", "lm_head")):
        expected = found[name].astype("<f2").astype("<f4") if dtype == "F16" else found[name]
        weight = checkpoint.weight(key)
        assert (weight.shape, weight.bits, weight.group) == (expected.shape, 32 if dtype == "F32" else 16, 0)
        np.testing.assert_array_equal(weight.float32(0, weight.shape[0]), expected)
        np.testing.assert_array_equal(weight.float32(3, 9), expected[3:9])
    size = sum(values.size for values in found.values())
    assert checkpoint.stored_bytes == size * (4 if dtype == "F32" else 2)


def test_a_digest_tells_weights_apart(tmp_path: Path, found: dict[str, np.ndarray]) -> None:
    def digest(name: str, tensors: dict[str, np.ndarray], **options: Any) -> bytes:
        return load_all(tiny.write_folder(tmp_path / name, tiny.config("llama"), tensors, **options)).digest()

    name = "model.layers.1.mlp.up_proj.weight"
    other = {**found, name: found[name].copy()}
    other[name].view(np.uint32)[-1, -1] ^= 1
    digests = [digest("one", found), digest("other", other), digest("short", found, dtype="BF16")]
    assert len(set(digests)) == 3
    assert len(digests[0]) == 16
    assert digest("shards", found, shards=3) == digests[0]


def test_files_of_the_safetensors_package_are_read(tmp_path: Path, found: dict[str, np.ndarray]) -> None:
    safetensors.numpy.save_file(found, tmp_path / "model.safetensors")
    stored = read_tensors(tmp_path / "model.safetensors")
    assert stored.keys() == found.keys()
    for name, values in found.items():
        np.testing.assert_array_equal(stored[name].float32(0, stored[name].num_rows).reshape(values.shape), values)


def test_what_exports_leave_lying_about_is_harmless(tmp_path: Path, found: dict[str, np.ndarray]) -> None:
    """Computed frequencies, and a head written out although it is tied to the embedding."""
    more = {**found, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, "<f4")}
    checkpoint = load_all(tiny.write_folder(tmp_path, tiny.config("llama", tie_word_embeddings=True), more))
    assert not checkpoint.has("lm_head") and checkpoint.config.tie_embeddings


# ── configurations ───────────────────────────────────────────────────────────────────────────────────────────────

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def opened(folder: Path, model_type: str = "llama", **changes: Any) -> Any:
    shape = tiny.config(model_type)
    return load_all(tiny.write_folder(folder, shape | changes, tiny.tensors(shape))).config


def test_rope_in_the_old_words_and_the_new(tmp_path: Path) -> None:
    scaling = RopeScaling(8.0, 1.0, 4.0, 8192)
    old = opened(tmp_path / "old", rope_theta=5e5, rope_scaling=LLAMA3)
    new = opened(tmp_path / "new", rope_parameters={**LLAMA3, "rope_theta": 5e5})
    assert (old.rope_theta, old.rope_scaling) == (new.rope_theta, new.rope_scaling) == (5e5, scaling)
    plain = opened(tmp_path / "plain", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert (plain.rope_theta, plain.rope_scaling) == (1e6, None)
    assert opened(tmp_path / "none", rope_scaling=None).rope_scaling is None


@pytest.mark.parametrize(
    ("model_type", "changes", "window"),
    [
        ("mistral", {"sliding_window": 7}, 7),
        ("mistral", {"sliding_window": None}, None),
        ("llama", {}, None),
        ("qwen2", {"sliding_window": 7}, None),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": False, "max_window_layers": 2}, None),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}, 7),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 2}, None),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": True, "layer_types": ["full_attention"] * 2}, None),
        ("qwen3", {"sliding_window": 7, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 7),
    ],
)
def test_sliding_windows(tmp_path: Path, model_type: str, changes: dict[str, Any], window: int | None) -> None:
    assert opened(tmp_path, model_type, **changes).sliding_window == window


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model_type": "gemma2"}, "model_type 'gemma2', which is not supported"),
    "no model": ({"model_type": None}, "model_type None"),
    "a model of lists": ({"model_type": []}, r"model_type \[\]"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    "soft cap": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type 'linear'"),
    "rope of words": ({"rope_scaling": "yarn"}, "not an object"),
    "llama3 without numbers": ({"rope_scaling": {"rope_type": "llama3"}}, "low_freq_factor = None"),
    "llama3 upside down": ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "not below high_freq_factor"),
    "llama3 factor 0": ({"rope_scaling": {**LLAMA3, "factor": 0}}, "factor = 0"),
    "quantised otherwise": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    "some windows": (
        {"sliding_window": 7, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
        "in some layers only",
    ),
    "no width": ({"hidden_size": None}, "hidden_size = None"),
    "width 0": ({"hidden_size": 0}, "hidden_size = 0"),
    "half a width": ({"hidden_size": 96.5}, "hidden_size = 96.5"),
    "a true width": ({"hidden_size": True}, "hidden_size = True"),
    "no layers": ({"num_hidden_layers": -1}, "num_hidden_layers = -1"),
    "most layers": ({"num_hidden_layers": 2**31 - 1}, "no tensor for 'layers.2.attention_norm'"),
    "fewer layers": ({"num_hidden_layers": 1}, r"'model.layers.1.\S+' has no place in a llama model \(9 such\)"),
    "heads that do not divide": ({"num_key_value_heads": 4}, "over 4 KV heads"),
    "eps 0": ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
    "eps nan": ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
    "theta negative": ({"rope_theta": -1.0}, "rope_theta = -1.0"),
    "another width": ({"hidden_size": 48, "head_dim": 16}, "is 270×96 but the model's shape needs 270×48"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_refused(tmp_path: Path, case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ModelError, match=message) as caught:
        opened(tmp_path, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_missing_tensors_are_named(tmp_path: Path, found: dict[str, np.ndarray], name: str) -> None:
    rest = {key: values for key, values in found.items() if key != name}
    with pytest.raises(ModelError, match=r"no tensor for '(norm|layers\.1\.up_proj|lm_head)'"):
        open_checkpoint(tiny.write_folder(tmp_path, tiny.config("llama"), rest))


# ── files that lie ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, found: dict[str, np.ndarray]) -> None:
    tiny.write_folder(tmp_path, tiny.config("llama"), found)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    dice = random.Random(1)
    for length in [*range(16), *range(16, header, 7), *dice.sample(range(header, len(whole)), 50), len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            load_all(tmp_path)


def test_rotten_headers_are_refused_or_load(tmp_path: Path, found: dict[str, np.ndarray]) -> None:
    tiny.write_folder(tmp_path, tiny.config("llama"), found)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    dice = random.Random(2)
    refused = 0
    for _ in range(600):
        rotten = bytearray(whole)
        for _ in range(dice.choice((1, 1, 2, 4))):
            rotten[dice.randrange(header)] = dice.choice(
                (0, 0xFF, dice.randrange(256), dice.choice(b'0123456789[]{},":'))
            )
        file.write_bytes(rotten)
        try:
            load_all(tmp_path)
        except ModelError:
            refused += 1
    assert refused > 300


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes


LIES: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "cannot be read"),
    "huge header": (lambda: struct.pack("<Q", 2**63) + b"{}", "claims a header of 9223372036854775808 bytes"),
    "no json": (lambda: struct.pack("<Q", 2) + b"{]", "cannot be read as JSON"),
    "deep json": (lambda: struct.pack("<Q", 200_000) + b"[" * 200_000, "cannot be read as JSON"),
    "a list": (lambda: struct.pack("<Q", 2) + b"[]", "must hold a JSON object"),
    "not utf-8": (lambda: struct.pack("<Q", 4) + b'"\xff\xfe"', "cannot be read as JSON"),
    "twice": (lambda: struct.pack("<Q", 15) + b'{"a":1,"a":2}  ', "a name comes twice"),
}


def file_of(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + bytes(32)


for name, tensors, message in [
    ("past the end", {"w": entry(data_offsets=[1000, 1016])}, r"tensor 'w' ends at byte \d+ but the file has \d+"),
    ("wrong size", {"w": entry(data_offsets=[0, 12])}, "has 12 bytes but its shape"),
    ("upside down", {"w": entry(data_offsets=[16, 0])}, "has -16 bytes"),
    ("overlap", {"v": entry(), "w": entry(data_offsets=[8, 24])}, "'w' begins at offset 8, inside"),
    ("negative offset", {"w": entry(data_offsets=[-16, 0])}, "whole numbers"),
    ("negative shape", {"w": entry(shape=[-2, -2])}, "whole numbers"),
    ("nothing", {"w": entry(shape=[0, 4], data_offsets=[0, 0])}, "above 0"),
    ("three dimensions", {"w": entry(shape=[1, 2, 2])}, "one or two dimensions"),
    ("huge shape", {"w": entry(shape=[2**62, 2**62])}, "needs 85070591730234615865843651857942052864"),
    ("integers", {"w": entry(dtype="I64")}, "the type 'I64'"),
    ("fp8", {"w": entry(dtype="F8_E4M3")}, "the type 'F8_E4M3'"),
    ("no type", {"w": entry(dtype=None)}, "the type None"),
    ("no shape", {"w": {"dtype": "F32"}}, "no dtype, shape and data_offsets"),
    ("a number", {"w": 3}, "no dtype, shape and data_offsets"),
    ("three offsets", {"w": entry(data_offsets=[0, 8, 16])}, "no dtype, shape and data_offsets"),
    ("true offsets", {"w": entry(data_offsets=[False, 16])}, "whole numbers"),
]:  # fmt: skip
    LIES[name] = (lambda tensors=tensors: file_of(**tensors), message)  # type: ignore[misc]


@pytest.mark.parametrize("case", LIES)
def test_lies_are_refused(tmp_path: Path, case: str) -> None:
    make, message = LIES[case]
    (tmp_path / "model.safetensors").write_bytes(make())
    with pytest.raises(ModelError, match=message) as caught:
        read_tensors(tmp_path / "model.safetensors")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"model.norm.weight": "../other/model.safetensors"}}, "not a .safetensors file of its folder"),
        ({"weight_map": {"model.norm.weight": "/etc/passwd"}}, "not a .safetensors file of its folder"),
        ({"weight_map": {"model.norm.weight": "config.json"}}, "not a .safetensors file of its folder"),
        ({"weight_map": {"model.norm.weight": ".."}}, "not a .safetensors file of its folder"),
        ({"weight_map": {"model.norm.weight": "absent.safetensors"}}, "cannot be read"),
        (
            {"weight_map": {"model.other.weight": "model.safetensors"}},
            "'model.other.weight', which 'model.safetensors'",
        ),
        ({"weight_map": {"model.norm.weight": 3}}, "no weight_map"),
        ({"weight_map": []}, "no weight_map"),
        ({}, "no weight_map"),
        ([], "must hold a JSON object"),
    ],
)
def test_an_index_stays_in_its_folder(tmp_path: Path, found: dict[str, np.ndarray], index: Any, message: str) -> None:
    tiny.write_folder(tmp_path, tiny.config("llama"), found)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message):
        open_checkpoint(tmp_path)


def test_what_is_not_there(tmp_path: Path, found: dict[str, np.ndarray]) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        open_checkpoint(tmp_path)
    tiny.write_folder(tmp_path, tiny.config("llama"), found)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        open_checkpoint(tmp_path)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    shape = tiny.config("llama", vocab_size=200)
    checkpoint = open_checkpoint(tiny.write_folder(tmp_path, shape, tiny.tensors(shape)))
    with pytest.raises(ModelError, match="270 tokens but its embedding only 200 rows"):
        checkpoint.tokenizer()
