"""The decoder against Transformers, and each model read as a folder against the same model read as GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.kv_format import KVFormat
from octavo.models import ARCHITECTURES
from octavo.models.gguf import rotary_order
from octavo.models.llama import Decoder, inverse_frequencies
from octavo.models.weights import Checkpoint, open_checkpoint
from octavo.ops.api import StepInputs
from octavo.ops.reference import ReferenceOps
from tests.models import tiny

GOLDEN = json.loads((Path(__file__).parent / "golden" / "logits.json").read_text())


def logits(checkpoint: Checkpoint, ids: list[int]) -> np.ndarray:
    """All rows of one prompt in one step."""
    ops, c, n = ReferenceOps(), checkpoint.config, len(ids)
    model = ARCHITECTURES[c.architecture](checkpoint, ops, n)
    pool = ops.allocate_pages(KVFormat("fp32", c.num_layers, c.num_kv_heads, c.head_dim, 16), -(-n // 16))

    def ints(values: Any) -> np.ndarray:
        return np.array(values, np.int32)

    pages = range(-(-n // 16))
    step = StepInputs(ints(ids), ints(range(n)), ints([0, n]), ints([0]), ints([0, len(pages)]), ints(pages))
    return model.logits(model.forward(step, pool), ints(range(n)))


@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    case = GOLDEN["cases"][name]
    folder = tiny.write_folder(tmp_path, case["config"], tiny.tensors(case["config"], bias=case.get("bias")))
    got = logits(open_checkpoint(folder), GOLDEN["ids"])
    for position, row in case["rows"].items():
        np.testing.assert_allclose(got[int(position), : len(row)], row, atol=2e-4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", tiny.ARCHITECTURES)
def test_a_folder_and_a_gguf_file_hold_the_same_model(tmp_path: Path, model_type: str, tied: bool) -> None:
    shape = tiny.config(model_type, tie_word_embeddings=tied)
    found = tiny.tensors(shape)
    one = open_checkpoint(tiny.write_folder(tmp_path / "folder", shape, found))
    two = open_checkpoint(tiny.write_gguf(tmp_path / "m.gguf", shape, found))
    assert one.config.num_heads != one.config.num_kv_heads  # so that a mix-up of head counts would show
    for field in one.config.__dataclass_fields__:
        a, b = getattr(one.config, field), getattr(two.config, field)
        assert a == (pytest.approx(b) if isinstance(b, float) else b), field
    assert two.has("lm_head") is not tied
    assert one._tensors.keys() == two._tensors.keys()
    for name, stored in one._tensors.items():
        a, b = (
            c.vector(name) if len(stored.dims) == 1 else c.weight(name).float32(0, stored.num_rows) for c in (one, two)
        )
        np.testing.assert_array_equal(a, b, err_msg=name)
    np.testing.assert_array_equal(logits(one, GOLDEN["ids"]), logits(two, GOLDEN["ids"]))


def test_biases_of_a_llama_file_are_permuted_with_their_rows(tmp_path: Path) -> None:
    shape = tiny.config("llama")
    found = tiny.tensors(shape, bias=True)
    one = open_checkpoint(tiny.write_folder(tmp_path / "folder", shape, found))
    two = open_checkpoint(tiny.write_gguf(tmp_path / "m.gguf", shape, found))
    assert one.config.qkv_bias and two.config.qkv_bias
    np.testing.assert_array_equal(logits(one, GOLDEN["ids"]), logits(two, GOLDEN["ids"]))


def test_rows_in_any_range_and_format_come_back_in_order(tmp_path: Path) -> None:
    shape = tiny.config("llama", num_attention_heads=6, head_dim=16)
    found = tiny.tensors(shape)
    two = open_checkpoint(tiny.write_gguf(tmp_path / "m.gguf", shape, found, matrices=gguf.GGMLQuantizationType.Q8_0))
    name = "model.layers.1.self_attn.q_proj.weight"
    kind = gguf.GGMLQuantizationType.Q8_0
    expected = gguf.quants.dequantize(gguf.quants.quantize(found[name], kind), kind)
    weight = two.weight("layers.1.q_proj")
    np.testing.assert_array_equal(weight.float32(0, 96), expected)
    np.testing.assert_array_equal(weight.float32(5, 41), expected[5:41])
    np.testing.assert_array_equal(weight.quantized(5, 41).codes, weight.quantized(0, 96).codes[5:41])


def test_the_rotary_order_is_the_published_formula() -> None:
    """Inside each head of size d, the file's row 2i + s is row s · d/2 + i."""
    d = 8
    order = rotary_order(3, d)
    for head in range(3):
        for i in range(d // 2):
            for s in range(2):
                assert order[head * d + s * d // 2 + i] == head * d + 2 * i + s


def test_rope_divisors_of_a_gguf_file_do_what_the_configuration_says(tmp_path: Path) -> None:
    case = GOLDEN["cases"]["llama, llama3 rope"]
    shape = case["config"]
    found = tiny.tensors(shape)
    one = open_checkpoint(tiny.write_folder(tmp_path / "folder", shape, found))
    plain = tiny.config("llama", rope_theta=shape["rope_theta"])
    bare = open_checkpoint(tiny.write_gguf(tmp_path / "bare.gguf", plain, found))
    divisors = inverse_frequencies(bare) / inverse_frequencies(one)
    assert (
        divisors[0] == 1.0 and 1.0 < divisors[1] < 8.0 and divisors[2] == pytest.approx(8.0)
    )  # kept, blended, stretched
    two = open_checkpoint(tiny.write_gguf(tmp_path / "m.gguf", plain, found, rope_divisors=divisors))
    np.testing.assert_allclose(inverse_frequencies(two), inverse_frequencies(one), rtol=1e-6)
    got = logits(two, GOLDEN["ids"])
    for position, row in case["rows"].items():
        np.testing.assert_allclose(got[int(position), : len(row)], row, atol=2e-4)
    assert np.abs(got - logits(bare, GOLDEN["ids"])).max() > 0.1


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    shape = tiny.config("qwen2", tie_word_embeddings=True)
    checkpoint = open_checkpoint(tiny.write_gguf(tmp_path / "m.gguf", shape, tiny.tensors(shape)))
    model = Decoder(checkpoint, ReferenceOps(), 16)
    assert model.head is model.embedding


def test_the_real_model_scores_its_golden_prompts(model_path: Path, shared: Path) -> None:
    """Log-probabilities by an independent implementation, in float32 from the same file."""
    checkpoint = open_checkpoint(model_path)
    row = json.loads((shared / "golden" / "smollm2-135m-q4_1.json").read_text())["rows"][0]
    ids = row["prompt_ids"]
    got = logits(checkpoint, ids).astype(np.float64)
    logprobs = got - np.log(np.exp(got - got.max(1, keepdims=True)).sum(1, keepdims=True)) - got.max(1, keepdims=True)
    np.testing.assert_allclose(logprobs[range(len(ids) - 1), ids[1:]], row["prompt_logprobs"][1:], atol=1e-4)
    for token, logprob in row["top5"][0]:
        assert logprobs[-1, token] == pytest.approx(logprob, abs=1e-4)
