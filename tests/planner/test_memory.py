"""The sums are those of textbooks and of the engine, to the byte."""

from __future__ import annotations

import gc
import json
import random
import tracemalloc
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.cache.manager import Admission, CacheManager
from octavo.config import EngineConfig, ModelConfig
from octavo.engine import llm as engine_llm
from octavo.engine.llm import assemble
from octavo.errors import ConfigError, ModelError
from octavo.gpus import GPUS
from octavo.kv_format import KV_BITS, whole_block_size
from octavo.models.weights import open_checkpoint
from octavo.planner.known import MODELS, Shape
from octavo.planner.memory import INDEX_BYTES, Demand, Device, Plan, each_of, gpu, plan, room
from octavo.planner.shapes import read_shape, shape_of
from tests.models import tiny

GIB = 1 << 30
LLAMA_70B = MODELS["llama-3.1-70b"]
FP16 = {"kv_dtype": "fp16"}


def plan_70b(*lengths: int, where: Device | None = None, **options: Any) -> Plan:
    config = EngineConfig(max_model_len=4096, **options)
    return plan(LLAMA_70B, config, [Demand(length) for length in lengths], where or gpu("a100-80gb", 4), **FP16)


# ── well-known figures ────────────────────────────────────────────────────────────────────────────────────────────


def test_4096_tokens_of_llama_70b_take_1342177280_bytes() -> None:
    found = plan_70b(4096)
    assert found.kv_dtype == "fp16"
    assert found.token_bytes == 327_680
    assert found.sequence_bytes == found.rooms[0].sequence_bytes == found.reservation_bytes == 1_342_177_280


def test_256_such_sequences_exceed_four_gpus_of_80_gb() -> None:
    assert 256 * plan_70b(4096).sequence_bytes > 4 * 80 * 10**9
    without_weights = plan(
        LLAMA_70B._replace(weight_bytes=1), EngineConfig(max_model_len=4096), [], gpu("a100-80gb", 4, 1)
    )
    assert without_weights.num_reservations < 256
    assert plan_70b(4096).rooms[0].paged_at_once == plan_70b(4096).rooms[0].contiguous_at_once == 108


def test_300_tokens_waste_93_percent_of_a_reservation_of_4096() -> None:
    [found] = plan_70b(300).rooms
    assert found.contiguous_waste == 1 - 300 / 4096
    assert f"{found.contiguous_waste:.0%}" == "93%"
    assert found.paged_waste == 1 - 300 / 304


def test_150_tokens_take_ten_pages_of_16() -> None:
    [found] = plan_70b(150).rooms
    assert (found.pages, found.tokens, found.paged_waste) == (10, 150, 1 - 150 / 160)


HUB = {  # number of parameters as the hub counts them (qwen3 with tied embeddings: without their second copy)
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
}


def test_shapes_have_the_parameters_that_the_hub_counts() -> None:
    assert {name: shape.num_parameters for name, shape in MODELS.items()} == HUB
    assert all(shape.source.startswith("config.json of ") for shape in MODELS.values())


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("llama-2-7b", 524_288),  # 32 of 32 heads
        ("llama-3.1-8b", 131_072),  # 8 of 32
        ("llama-3.1-405b", 516_096),
        ("mixtral-8x7b", 131_072),  # experts share attention
        ("qwen2.5-0.5b", 12_288),
        ("smollm2-135m", 23_040),
        ("tinyllama-1.1b", 22_528),
    ],
)
def test_tokens_take_what_their_heads_take(name: str, token_bytes: int) -> None:
    assert plan(MODELS[name], EngineConfig(), [], Device("given", 10**12)).token_bytes == token_bytes


# ── the engine's own figures ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = tiny.config(request.param)
    return tiny.write_folder(tmp_path_factory.mktemp(request.param), shape, tiny.tensors(shape))


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize("block_size", [4, 16, 48])
@pytest.mark.parametrize("dtype", ["auto", *KV_BITS])
def test_a_plan_is_what_the_engine_allocates(folder: Path, dtype: str, block_size: int, layout: str) -> None:
    options: dict[str, Any] = {"kv_cache_dtype": dtype, "block_size": block_size, "kv_layout": layout}
    options |= {"kv_cache_memory_bytes": 1 << 20, "max_model_len": 100, "backend": "reference"}
    if layout == "paged":
        options["swap_space"] = 1 / 512
    config = EngineConfig(**options)
    found = plan(read_shape(folder), config, [], 16 * GIB)
    engine = assemble(open_checkpoint(folder), config)
    pool = engine.store.pool
    assert (found.num_pages, found.page_bytes) == pool.data.shape
    assert (found.page_bytes, found.block_size) == (engine.format.page_bytes, engine.format.block_size)
    assert (found.token_bytes, found.pool_bytes) == (engine.format.token_bytes, pool.data.nbytes)
    assert (found.num_host_pages, found.max_model_len) == (len(engine.store.host), engine.max_model_len)
    engine.core.close()


@pytest.mark.parametrize("dtype", KV_BITS)
def test_a_plan_is_what_the_real_model_allocates(model_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sized by what is free, of which the weights take their part; the native pool."""
    monkeypatch.setattr(engine_llm, "available_memory", lambda: GIB)
    checkpoint = open_checkpoint(model_path)
    config = EngineConfig(kv_cache_dtype=dtype, swap_space=0.125)
    shape = Shape("here", checkpoint.config, weight_bytes=checkpoint.stored_bytes)
    found = plan(shape, config, [], GIB)
    engine = assemble(checkpoint, config)
    assert (found.num_pages, found.page_bytes) == engine.store.pool.data.numpy().shape
    assert (found.num_host_pages, found.max_model_len) == (len(engine.store.host), engine.max_model_len)
    engine.core.close()


def test_a_sequence_that_the_pool_is_cut_to_fits() -> None:
    found = plan(LLAMA_70B._replace(weight_bytes=1), EngineConfig(), [], GIB)
    assert found.max_model_len == found.pool_tokens + 1 < LLAMA_70B.model.context_length
    assert found.sequence_bytes == found.pool_bytes
    assert (found.rooms[-1].tokens, found.rooms[-1].paged_at_once) == (found.pool_tokens, 1)


def test_host_pages_are_counted_for_devices_too() -> None:
    found = plan(LLAMA_70B, EngineConfig(swap_space=8), [], gpu("h200", 2))
    assert found.num_host_pages == 8 * GIB // 5_242_880


def test_the_engines_refusals_are_the_plans() -> None:
    for where in (10**12, gpu("h200")):
        with pytest.raises(ConfigError, match="max_model_len: 131073 tokens are more than the model's context"):
            plan(LLAMA_70B, EngineConfig(max_model_len=131_073), [], where)
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes: one page takes 5,242,880 bytes"):
        plan(LLAMA_70B, EngineConfig(kv_cache_memory_bytes=1000), [], 10**12)
    with pytest.raises(ConfigError, match=r"swap_space: .* more than the"):
        plan(LLAMA_70B, EngineConfig(swap_space=1000), [], 10**12)


def test_pages_and_their_index_take_what_was_measured() -> None:
    """Python's objects for a page, those of its tokens included."""
    chance, num_pages = random.Random(1), 2000
    for size in (4, 16, 64):
        gc.collect()
        tracemalloc.start()
        cache = CacheManager(num_pages, size)
        for _ in range(num_pages // 16):
            tokens = array("i", [chance.randrange(1000, 100_000) for _ in range(16 * size)])
            admission = cache.admit(tokens)
            assert isinstance(admission, Admission)
            table = admission.table
            cache.commit(table, tokens, len(tokens))
            cache.release(table)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] / num_pages
        tracemalloc.stop()
        assert taken == pytest.approx(INDEX_BYTES[0] + INDEX_BYTES[1] * size, rel=0.15)


# ── how many fit ──────────────────────────────────────────────────────────────────────────────────────────────────

MODEL = ModelConfig("llama", 2, 64, 64, 4, 2, 16, 100, 1000, 1e-5, 1e4)
FORMAT = EngineConfig().kv_format(MODEL)


def rooms(num_pages: int, *demands: Demand, longest: int = 160) -> Any:
    return room(FORMAT, replace(FORMAT, block_size=longest), num_pages, demands)


def test_sequences_fit_into_whole_pages() -> None:
    found = rooms(100, Demand(33))
    assert (found.paged_at_once, found.paged_typically) == (33, 100 / 3)
    assert (found.contiguous_at_once, found.gain) == (10, 3.3)
    assert rooms(100, Demand(160)).gain == 1.0
    assert rooms(9, Demand(160)).gain is None


def test_over_its_life_a_sequence_holds_less_than_at_its_end() -> None:
    """A prompt of 10 and an answer of 13 tokens: 7 steps in one page, 6 in two, the last token drawn never stored."""
    found = rooms(100, Demand(10, 13))
    assert (found.tokens, found.pages, found.paged_at_once) == (22, 2, 50)
    assert found.mean_tokens == 16
    assert found.paged_typically == pytest.approx(100 * 13 / (7 * 1 + 6 * 2))
    assert found.paged_waste == pytest.approx(1 - 16 * 13 / (19 * 16))
    assert found.contiguous_waste == pytest.approx(0.9)


def test_a_common_beginning_lies_in_memory_once_when_paged() -> None:
    found = rooms(100, Demand(70, 1, shared_tokens=64))
    assert (found.pages, found.paged_at_once, found.contiguous_at_once) == (5, 96, 10)
    assert found.paged_waste == 1 - 6 / 16
    assert rooms(100, Demand(70, 1, shared_tokens=15)).paged_at_once == 20  # less than a page is nobody's
    assert rooms(100, Demand(64, 1, shared_tokens=64)).paged_at_once == 96


def test_kinds_are_equally_frequent() -> None:
    found = rooms(100, Demand(16), Demand(64))
    assert (found.tokens, found.pages, found.paged_at_once) == (40, 2.5, 40)
    longer = rooms(100, Demand(16, 1), Demand(16, 33))  # the long one is there for 33 of 34 steps
    assert longer.paged_typically == pytest.approx(100 * 34 / (1 + 1 + 16 * 2 + 16 * 3))


def test_what_is_longer_than_a_reservation_is_refused() -> None:
    with pytest.raises(ConfigError, match="lengths: 161 tokens are more than max_model_len, 160"):
        rooms(100, Demand(161))


# ── devices ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_gpu_keeps_what_weights_and_activations_leave() -> None:
    found = plan(MODELS["llama-3.1-8b"], EngineConfig(max_model_len=8192), [], gpu("l4"))
    assert found.weight_bytes == 2 * 8_030_261_248
    row = 2 * 4096 + 2 * (32 + 8) * 128 + 3 * 14336
    assert found.activation_bytes == 2048 * row * 2 + 256 * 128_256 * 4
    left = 24 * 10**9 * 9 // 10 - found.weight_bytes - found.activation_bytes
    assert found.num_pages == left // (16 * 131_072)
    assert found.page_table_bytes == 4 * 512 * 256
    assert plan(MODELS["llama-3.1-70b"], EngineConfig(), [], gpu("l4")).num_pages == 0


def test_devices_share_heads_until_there_are_more_of_them() -> None:
    one, eight, sixteen = (plan(LLAMA_70B, EngineConfig(), [], Device("given", 2**40, number)) for number in (1, 8, 16))
    assert one.token_bytes == eight.token_bytes == sixteen.token_bytes // 2  # each of sixteen copies a head
    assert one.weight_bytes == eight.weight_bytes == 2 * LLAMA_70B.num_parameters
    assert eight.memory_bytes == 8 * 2**40
    for number in (3, 5, 12):
        with pytest.raises(ConfigError, match=f"tensor_parallel_size: {number} devices cannot share"):
            plan(LLAMA_70B, EngineConfig(), [], Device("given", 2**40, number))


@pytest.mark.parametrize(("dtype", "bits"), [("fp32", 32), ("fp8", 8), ("int8", 8.5), ("int4", 4.5)])
def test_weights_take_their_bits(dtype: str, bits: float) -> None:
    found = plan(LLAMA_70B._replace(weight_bytes=5), EngineConfig(), [], Device("given", 10**12), weight_dtype=dtype)
    assert found.weight_bytes == LLAMA_70B.num_parameters * bits / 8
    with pytest.raises(ConfigError, match="weight_dtype: must be one of"):
        plan(LLAMA_70B, EngineConfig(), [], Device("given", 10**12), weight_dtype="int3")


def test_a_pool_that_is_given_is_given() -> None:
    found = plan(LLAMA_70B, EngineConfig(kv_cache_memory_bytes=10**9), [], gpu("h200", 2))
    assert found.num_pages == 10**9 // 5_242_880
    for budget, message in ((5_000_000, "one page takes 5,242,880 bytes"), (200 * 10**9, "more than the 111,")):
        with pytest.raises(ConfigError, match=f"kv_cache_memory_bytes: .*{message}"):
            plan(LLAMA_70B, EngineConfig(kv_cache_memory_bytes=budget), [], gpu("H200", 2))
    with pytest.raises(ConfigError, match="gpu: there is no 'abacus', but t4, "):
        gpu("abacus")
    assert all(figure > 0 for one in GPUS.values() for figure in one)


# ── shapes from files ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_a_folder_is_read_as_the_engine_reads_it(kind: str, tmp_path: Path) -> None:
    shape = tiny.config(kind)
    tiny.write_folder(tmp_path, shape, tiny.tensors(shape), shards=2)
    found, checkpoint = read_shape(tmp_path), open_checkpoint(tmp_path)
    same = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "context_length", "sliding_window")
    assert all(getattr(found.model, name) == getattr(checkpoint.config, name) for name in same)
    assert found.weight_bytes == checkpoint.stored_bytes == 4 * found.num_parameters
    assert read_shape(tmp_path / "config.json") == found._replace(weight_bytes=None, source=found.source)


def test_other_decoders_are_read_too() -> None:
    raw = tiny.config("mixtral") | {"num_local_experts": 4}
    assert shape_of(Path("x"), raw).experts == 4
    del raw["num_key_value_heads"]
    assert shape_of(Path("x"), raw).model.num_kv_heads == 6
    assert shape_of(Path("x"), raw | {"multi_query": True}).model.num_kv_heads == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank = 512"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of linear_attention"),
        ({"attn_layer_period": 8}, "attn_layer_period = 8"),  # one layer of eight, the rest a state space
        ({"linear_attn_config": {"full_attn_layers": [4]}}, "linear_attn_config = "),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern = 'M-M"),
        ({"cross_attention_layers": [3]}, "cross_attention_layers"),
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"hidden_size": "many"}, "hidden_size = 'many'"),
        ({"num_hidden_layers": 2**31 - 1}, "not a whole number from 1 to 65536"),  # whose sum takes for ever
        ({"head_dim": 0}, "head_dim = 0"),
        ({"layer_types": 5}, "layer_types = 5, which is no list"),
        ({"mlp_only_layers": True}, "mlp_only_layers = True, which is no list"),
        ({"vocab_size": True}, "vocab_size = True"),
    ],
)
def test_models_that_the_sums_are_not_for_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        shape_of(Path("x"), tiny.config("llama") | changes)


def test_weights_that_lie_there_twice_or_not_yet_count_once(tmp_path: Path) -> None:
    shape = tiny.config("llama")
    tiny.write_folder(tmp_path, shape, tiny.tensors(shape), shards=2)
    one, two = sorted(tmp_path.glob("*.safetensors"))
    whole = read_shape(tmp_path).weight_bytes
    (tmp_path / "consolidated.safetensors").write_bytes(one.read_bytes())
    assert read_shape(tmp_path).weight_bytes == whole
    two.unlink()
    with pytest.raises(ModelError, match="tells neither all files nor their size"):
        read_shape(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"metadata": {"total_size": 12_345}}))
    assert read_shape(tmp_path).weight_bytes == 12_345


FAMILIES: dict[str, tuple[dict[str, Any], float, int]] = {  # config.json; published parameters, bytes a token in bf16
    "gpt_bigcode": (  # StarCoder: every query shares one head
        {"n_embd": 6144, "n_head": 48, "n_layer": 40, "n_inner": 24576, "n_positions": 8192, "vocab_size": 49152}
        | {"multi_query": True},
        15.5e9, 2 * 40 * 128 * 2,
    ),
    "falcon": (  # 7B: multi_query counts more than num_kv_heads, unless the architecture is the new one
        {"hidden_size": 4544, "num_attention_heads": 71, "num_kv_heads": 71, "num_hidden_layers": 32}
        | {"vocab_size": 65024, "multi_query": True, "new_decoder_architecture": False},
        6_921_720_704, 2 * 32 * 64 * 2,
    ),
    "gemma2": (  # 9B: one matrix for embedding and output, and the file does not say so
        {"hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16}
        | {"num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000, "max_position_embeddings": 8192},
        9_241_705_984, 2 * 42 * 8 * 256 * 2,
    ),
    "phi": (  # 2: no gate
        {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"vocab_size": 51200, "max_position_embeddings": 2048},
        2_779_683_840, 2 * 32 * 32 * 80 * 2,
    ),
    "deepseek": (  # MoE 16B: the first layer is dense, two experts are shared
        {"hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64}
        | {"n_shared_experts": 2, "first_k_dense_replace": 1, "num_hidden_layers": 28, "num_attention_heads": 16}
        | {"num_key_value_heads": 16, "vocab_size": 102400, "max_position_embeddings": 4096},
        16_375_728_128, 2 * 28 * 16 * 128 * 2,
    ),
    "qwen2_moe": (  # 57B-A14B: one large shared expert
        {"hidden_size": 3584, "intermediate_size": 18944, "moe_intermediate_size": 2560, "num_experts": 64}
        | {"shared_expert_intermediate_size": 20480, "num_hidden_layers": 28, "num_attention_heads": 28}
        | {"num_key_value_heads": 4, "vocab_size": 151936, "max_position_embeddings": 32768},
        57_409_111_552, 2 * 28 * 4 * 128 * 2,
    ),
    "dbrx": (  # names of its own, in parts of the file
        {"d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768, "vocab_size": 100352}
        | {"attn_config": {"kv_n_heads": 8}, "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16}},
        131_597_000_000, 2 * 40 * 8 * 128 * 2,
    ),
    "internvl_chat": (  # the decoder is a part: Qwen2.5-7B's, with other words
        {"llm_config": {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 151674}
         | {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
         | {"max_position_embeddings": 32768}},
        7_612_757_504, 57_344,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_familys_words_are_understood(kind: str) -> None:
    raw, published, token_bytes = FAMILIES[kind]
    shape = shape_of(Path("x"), {"model_type": kind} | raw)
    assert shape.num_parameters == pytest.approx(published, rel=0.004)
    assert plan(shape, EngineConfig(), [], Device("given", 10**12)).token_bytes == token_bytes
    assert shape.source == ("x, its llm_config" if "llm_config" in raw else "x")


def test_files_that_are_no_shape_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text in ("", "{", "[]", "\udcff"):
        file.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ModelError):
            read_shape(file)
    with pytest.raises(ModelError, match="cannot be read"):
        read_shape(tmp_path / "none.json")
    file.write_text("\ufeff" + json.dumps(tiny.config("llama")))  # as some editors save it
    assert read_shape(file).model.num_layers == tiny.config("llama")["num_hidden_layers"]


def test_lengths_are_read_from_a_list() -> None:
    assert each_of("150, 4096", None, None, 0) == [Demand(150), Demand(4096)]
    assert each_of("", 161, 180, 100) == [Demand(161, 180, 100)]
    assert each_of("", None, None, 0) == []
    for lengths, prompt, output, shared in (
        ("x", None, None, 0),
        ("0", None, None, 0),
        ("", 0, 5, 0),
        ("9", None, None, 10),
        ("", 5, 0, 0),
        ("", None, None, 10),
    ):
        with pytest.raises(ConfigError):
            each_of(lengths, prompt, output, shared)


@pytest.mark.parametrize("num_tokens", [*range(1, 50), 4095, 4096, 4097])
def test_a_reservation_is_a_page_that_is_large_enough(num_tokens: int) -> None:
    size = whole_block_size(num_tokens)
    assert num_tokens <= size < num_tokens + 16
    assert EngineConfig(block_size=size).block_size == size
