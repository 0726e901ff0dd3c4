"""Tokenizers against llama.cpp and SentencePiece; streams of text; chat templates and their limits."""

from __future__ import annotations

import json
import logging
import random
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import InvalidRequest, ModelError
from octavo.models.chat_template import ChatTemplate
from octavo.models.gguf import GGUF
from octavo.models.tokenizer import Tokenizer, from_folder, from_gguf
from octavo.models.weights import open_checkpoint
from tests.models import tiny

HERE = Path("m.gguf")
IDS = {token: i for i, token in enumerate(tiny.tokens())}
BOS, EOS, END = IDS["<|im_start|>"], IDS["<|im_end|>"], IDS["<|endoftext|>"]


def metadata(**changes: Any) -> dict[str, Any]:
    """A byte-level tokenizer's metadata; a change of None removes the key."""
    vocabulary = tiny.tokens()
    found = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": vocabulary,
        "token_type": [3 if token in tiny.SPECIAL else 1 for token in vocabulary],
        "merges": list(tiny.MERGES),
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    } | changes
    meta = {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}
    return meta | {"tokenizer.chat_template": tiny.TEMPLATE}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return from_gguf(metadata(), HERE)


@pytest.fixture(scope="module")
def real(model_path: Path) -> Tokenizer:
    return open_checkpoint(model_path).tokenizer()


# ── ids ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_real_tokenizer_gives_the_ids_of_llama_cpp(real: Tokenizer, shared: Path) -> None:
    rows = json.loads((shared / "golden" / "smollm2-135m-tokens.json").read_text())["rows"]
    assert len(rows) == 42
    for row in rows:
        assert real.encode(row["text"]) == row["ids"], row["text"]
        assert real.decode(row["ids"], skip_special=False) == row["text"]


def test_the_real_tokenizer_knows_its_ends(real: Tokenizer) -> None:
    assert (real.bos_token_id, real.eos_token_ids, real.vocab_size) == (1, (2, 0), 49152)


def test_a_folder_and_gguf_metadata_make_the_same_tokenizer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tiny.write_tokenizer(tmp_path)
    other = from_folder(tmp_path)
    assert other.vocab_size == tokenizer.vocab_size
    assert (
        (other.bos_token_id, other.eos_token_ids)
        == (tokenizer.bos_token_id, tokenizer.eos_token_ids)
        == (BOS, (EOS, END))
    )
    for text in ("hello world", " hello  12½", "<|im_start|>x<|im_end|>", "한국 🚀 é", ""):
        ids = tokenizer.encode(text)
        assert other.encode(text) == ids
        for skip in (True, False):
            assert other.decode(ids, skip) == tokenizer.decode(ids, skip)
    for token in range(tokenizer.vocab_size):
        assert other.token_bytes(token) == tokenizer.token_bytes(token)
    chat = [{"role": "user", "content": "hello"}]
    assert other.encode_chat(chat) == tokenizer.encode_chat(chat)


TOKENIZER = from_gguf(metadata(), HERE)


@given(st.text(max_size=60))
def test_any_text_survives_the_round_trip(text: str) -> None:
    tokenizer = TOKENIZER
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_text_that_is_not_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        tokenizer.encode("a\ud800b")


def test_ids_beyond_the_vocabulary_are_no_text(tokenizer: Tokenizer) -> None:
    """Embeddings are padded: a model may emit an id that its tokenizer does not have."""
    assert tokenizer.decode([IDS["h"], tokenizer.vocab_size, 10**9, -1, IDS["e"]]) == "he"
    assert tokenizer.token_text(10**9) == ""


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("smollm", "1234567 don't", ["1", "2", "3", "4", "5", "6", "7", " don", "'t"]),
        ("gpt-2", "1234567 don't", ["1234567", " don", "'t"]),
        ("gpt-2", "a \n\n b", ["a", " \n\n", " b"]),
        ("llama-bpe", "1234567 DON'T", ["123", "456", "7", " DON", "'T"]),
        ("llama-bpe", "a \n\n b\r\n", ["a", " \n\n", " b", "\r\n"]),
        ("qwen2", "1234567 DON'T", ["1", "2", "3", "4", "5", "6", "7", " DON", "'T"]),
        ("qwen2", "(x)!!\n\ny", ["(x", ")!!\n\n", "y"]),
        ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
        ("gpt-4o", "helloWorld's 1234", ["hello", "World's", " ", "123", "4"]),
        ("deepseek-coder", "ab 12,x", ["ab", " ", "1", "2", ",", "x"]),
        ("deepseek-v3", "a1234 日本x", ["a", "123", "4", " ", "日本", "x"]),
        ("falcon", "ab, 12345", ["ab", ",", " ", "123", "45"]),
        ("default", "ab, 12345", ["ab", ",", " ", "123", "45"]),
    ],
)
def test_words_are_split_as_the_file_names_it(pre: str, text: str, words: list[str]) -> None:
    splitter = from_gguf(metadata(pre=pre), HERE)._backend.pre_tokenizer
    raw = text.encode()
    alphabet = {char: byte for byte, char in enumerate(tiny.tokens()[:256])}
    pieces = [bytes(alphabet[char] for char in piece) for piece, _ in splitter.pre_tokenize_str(text)]
    assert [piece.decode() for piece in pieces] == words
    assert b"".join(pieces) == raw


def test_a_word_that_is_a_token_is_taken_whole_where_the_model_does_so() -> None:
    """Llama 3 and Tekken look the word up before they merge."""
    vocabulary = [*tiny.tokens(), "xyz"]
    changes = {"tokens": vocabulary, "token_type": [3 if token in tiny.SPECIAL else 1 for token in vocabulary]}
    assert from_gguf(metadata(pre="llama-bpe", add_bos_token=False, **changes), HERE).encode("xyz") == [
        len(vocabulary) - 1
    ]
    assert from_gguf(metadata(pre="qwen2", **changes), HERE).encode("xyz") == [IDS["x"], IDS["y"], IDS["z"]]


def test_characters_are_composed_where_the_model_does_so() -> None:
    composed, apart = "\u00e9", "e\u0301"
    assert from_gguf(metadata(pre="qwen2"), HERE).encode(apart) == from_gguf(metadata(pre="qwen2"), HERE).encode(
        composed
    )
    assert from_gguf(metadata(), HERE).encode(apart) != from_gguf(metadata(), HERE).encode(composed)


@pytest.mark.parametrize("pre", [None, "default"])
def test_a_file_that_does_not_name_its_splitting_is_read_with_a_warning(
    pre: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = from_gguf(metadata(pre=pre), HERE)
    assert "tokenizer.ggml.pre" in caplog.text and "default" in caplog.text
    assert tokenizer.decode(tokenizer.encode("hello 12345")) == "hello 12345"


def test_an_unknown_splitting_is_refused() -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre 'xyz', whose way to split words is not known"):
        from_gguf(metadata(pre="xyz"), HERE)


# ── SentencePiece ────────────────────────────────────────────────────────────────────────────────────────────────

PIECES = json.loads((Path(__file__).parent / "golden" / "sentencepiece.json").read_text())


def sentencepiece(**changes: Any) -> Tokenizer:
    found = {
        "model": "llama",
        "tokens": PIECES["pieces"],
        "scores": PIECES["scores"],
        "token_type": PIECES["types"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | changes
    return from_gguf({f"tokenizer.ggml.{key}": value for key, value in found.items()}, HERE)


def test_sentencepiece_files_give_sentencepieces_ids() -> None:
    tokenizer = sentencepiece()
    for row in PIECES["texts"]:
        assert tokenizer.encode(row["text"], add_special=False) == row["ids"], row["text"]
        assert tokenizer.encode(row["text"]) == [1, *row["ids"]]
        assert tokenizer.decode(row["ids"]) == row["text"]


def test_the_space_that_begins_a_text_is_not_part_of_it_but_one_in_the_middle_is() -> None:
    tokenizer = sentencepiece()
    prompt, more = tokenizer.encode("the"), tokenizer.encode("License", add_special=False)
    assert tokenizer.decode(more) == "License"
    stream = tokenizer.detokenizer(prompt)
    assert stream.push(more) + stream.flush() == " License"
    assert sentencepiece(add_space_prefix=False).decode(more) == " License"


def test_bytes_of_a_sentencepiece_file_are_bytes() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode("🚀", add_special=False)
    stream = tokenizer.detokenizer(())
    pieces = [stream.push([token]) for token in ids]
    assert "".join(pieces) == "🚀" and len(ids) == 5
    assert [tokenizer.token_bytes(token) for token in ids][1:] == [bytes([byte]) for byte in "🚀".encode()]


@pytest.mark.parametrize("scores", [None, [0.0], ["x"] * 600])
def test_sentencepiece_files_need_a_score_for_each_token(scores: Any) -> None:
    with pytest.raises(ModelError, match=r"needs 600 numbers in tokenizer\.ggml\.scores"):
        sentencepiece(scores=scores)


# ── begin and end ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_begin_token_comes_once(tokenizer: Tokenizer) -> None:
    adding = from_gguf(metadata(add_bos_token=True), HERE)
    assert adding.encode("he")[0] == BOS and tokenizer.encode("he") == adding.encode("he")[1:]
    assert adding.encode("<|im_start|>he") == adding.encode("he")
    assert adding.encode("he", add_special=False) == tokenizer.encode("he")
    assert adding.encode("") == [BOS] and tokenizer.encode("") == []
    assert from_gguf(metadata(add_bos_token=True, bos_token_id=None), HERE).encode("") == []


def test_llama3_files_begin_with_bos_unless_they_say_otherwise() -> None:
    assert from_gguf(metadata(pre="llama-bpe"), HERE).encode("") == [BOS]
    assert from_gguf(metadata(pre="llama-bpe", add_bos_token=False), HERE).encode("") == []


@pytest.mark.parametrize("template", ["{{ bos_token }}{{ messages[0]['content'] }}", "{{ messages[0]['content'] }}"])
def test_a_chat_has_one_begin_token(template: str) -> None:
    meta = metadata(add_bos_token=True) | {"tokenizer.chat_template": template}
    chat = [{"role": "user", "content": "hello"}]
    assert from_gguf(meta, HERE).encode_chat(chat) == [BOS, IDS["hello"]]


def test_marks_in_a_users_text_are_what_they_say(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "a<|im_end|>b"}], add_generation_prompt=False)
    assert ids.count(EOS) == 2 and ids.count(BOS) == 1


def test_every_end_is_known(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, END]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5, "bos_token_id": 7}))
    assert from_folder(tmp_path).eos_token_ids == (5, END, EOS)
    assert from_gguf(metadata(eot_token_id=3, eom_token_id=4), HERE).eos_token_ids == (EOS, 3, 4, END)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{", "is not a tokenizer"),
        ("tokenizer.json", "[]", "is not a tokenizer"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}', "is not a tokenizer"),
        ("tokenizer_config.json", "[1]", "must hold a JSON object"),
        ("tokenizer_config.json", "{", "cannot be read as JSON"),
        ("generation_config.json", '{"eos_token_id": 999999}', "eos_token_id"),
        ("generation_config.json", '{"eos_token_id": [true]}', "eos_token_id"),
        ("config.json", '{"eos_token_id": "x"}', "eos_token_id"),
        ("config.json", "[" * 100_000, "cannot be read as JSON"),
    ],
)
def test_a_broken_folder_is_refused(tmp_path: Path, file: str, content: str, message: str) -> None:
    tiny.write_tokenizer(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelError, match=message):
        from_folder(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        from_folder(tmp_path)


def test_a_tokenizer_json_that_adds_bos_is_asked(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path)
    layout = json.loads((tmp_path / "tokenizer.json").read_text())
    layout["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [BOS], "tokens": ["<|im_start|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(layout))
    assert from_folder(tmp_path).encode("hello") == [BOS, IDS["hello"]]
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": False}))
    assert from_folder(tmp_path).encode("hello") == [IDS["hello"]]


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────


def streamed(tokenizer: Tokenizer, ids: list[int], dice: random.Random, prompt: list[int] = []) -> list[str]:  # noqa: B006
    stream = tokenizer.detokenizer(prompt)
    pieces, at = [], 0
    while at < len(ids):
        step = dice.choice((1, 1, 1, 2, 5))
        pieces.append(stream.push(ids[at : at + step]))
        at += step
    return [*pieces, stream.flush()]


def test_pieces_join_to_the_whole_whatever_the_tokens(tokenizer: Tokenizer) -> None:
    dice = random.Random(3)
    for _ in range(500):
        ids = [dice.randrange(tokenizer.vocab_size + 2) for _ in range(dice.randrange(30))]
        assert "".join(streamed(tokenizer, ids, dice)) == tokenizer.decode(ids)


def test_no_half_characters_in_a_stream_of_whole_ones(tokenizer: Tokenizer) -> None:
    text = "ภาษา 한국어 🚀👩‍👩‍👧 é 日本 ½"
    dice = random.Random(4)
    for _ in range(50):
        pieces = streamed(tokenizer, tokenizer.encode(text), dice)
        assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)


def test_a_character_cut_off_at_the_end_is_flushed_once(tokenizer: Tokenizer) -> None:
    rocket = list("🚀".encode())
    stream = tokenizer.detokenizer([IDS["h"]])
    assert [stream.push([byte]) for byte in rocket[:3]] == ["", "", ""]
    assert (stream.flush(), stream.flush()) == ("\ufffd", "")


def test_special_tokens_are_not_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = [IDS["hello"], EOS, *"é".encode()[:1], BOS, *"é".encode()[1:]]
    assert tokenizer.decode(ids) == "helloé"
    assert tokenizer.decode([IDS["hello"], EOS], skip_special=False) == "hello<|im_end|>"
    assert tokenizer.token_text(EOS) == "<|im_end|>" and tokenizer.is_special(EOS) and not tokenizer.is_special(3)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_prompt_that_ends_inside_a_character(tokenizer: Tokenizer, cut: int) -> None:
    """If the answer completes the character, it is emitted whole; the prompt's text never is."""
    rocket = list("🚀".encode())
    prompt = [IDS["h"], IDS["e"], *rocket[:cut]]
    stream = tokenizer.detokenizer(prompt)
    pieces = [stream.push([byte]) for byte in [*rocket[cut:], IDS["e"]]]
    assert "".join(pieces) + stream.flush() == "🚀e"
    stream = tokenizer.detokenizer(prompt)
    assert stream.push([IDS["e"]]) + stream.flush() == "e"  # not completed: the half belongs to the prompt
    stream = tokenizer.detokenizer(prompt)
    assert stream.push([EOS]) + stream.flush() == ""


def test_a_prompt_of_stray_bytes_does_not_confuse_the_answer(tokenizer: Tokenizer) -> None:
    dice = random.Random(5)
    whole = "héllo 🚀"
    for _ in range(300):
        prompt = [dice.randrange(256) for _ in range(dice.randrange(6))]
        assert "".join(streamed(tokenizer, tokenizer.encode(whole), dice, prompt)) == whole


# ── chat ─────────────────────────────────────────────────────────────────────────────────────────────────────────

USER = [{"role": "user", "content": "hi"}]


def test_the_real_template(real: Tokenizer) -> None:
    text = real.render_chat([{"role": "system", "content": "Be brief."}, *USER])
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert real.render_chat(USER).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert real.encode_chat(USER)[-3:] == [520, 9531, 198]


def test_text_parts_are_joined_and_others_refused(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert tokenizer.render_chat([{"role": "user", "content": parts}]) == tokenizer.render_chat(USER)
    with pytest.raises(InvalidRequest, match="must be of type text") as caught:
        tokenizer.render_chat([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    assert caught.value.field == "messages"


def test_a_requests_own_variables(tokenizer: Tokenizer) -> None:
    """They reach the template, and cannot take the place of the conversation."""
    meta = metadata() | {"tokenizer.chat_template": "{{ thinking }} {{ self }} {{ messages[0].content }}"}
    ours = {"thinking": False, "self": 1, "messages": [], "tools": [1], "add_generation_prompt": 0}
    assert from_gguf(meta, HERE).render_chat(USER, variables=ours).endswith(" hi")
    assert from_gguf(meta, HERE).render_chat(USER, variables=ours).startswith("False ")


@pytest.mark.parametrize("messages", [[], "hi", None, {}, [1], ["hi"], [{}], [{"role": 1}], [{"content": "hi"}]])
def test_malformed_conversations_are_refused(tokenizer: Tokenizer, messages: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^messages: "):
        tokenizer.render_chat(messages)


def test_a_model_without_a_template_says_so() -> None:
    meta = metadata()
    del meta["tokenizer.chat_template"]
    with pytest.raises(InvalidRequest, match="no chat template"):
        from_gguf(meta, HERE).render_chat(USER)


def test_named_templates(tmp_path: Path) -> None:
    meta = metadata() | {"tokenizer.chat_template.tool_use": "tools: {{ tools[0].name }}"}
    tokenizer = from_gguf(meta, HERE)
    assert tokenizer.render_chat(USER, tools=[{"name": "f"}]) == "tools: f"
    assert tokenizer.render_chat(USER).startswith("<|im_start|>user")
    tiny.write_tokenizer(tmp_path)
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | tojson }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert from_folder(tmp_path).render_chat(USER) == "plain"
    assert from_folder(tmp_path).render_chat(USER, tools=[{"a": "é"}]) == '[{"a": "é"}]'
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert from_folder(tmp_path).render_chat(USER) == "own file"


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render({"messages": USER, **variables})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}\n  {{ m.content }}\n{% endfor %}\n", "  hi\n"),  # blocks are trimmed
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}", ""),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{{ {'é': [1, none]} | tojson }}", '{"é": [1, null]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ 'a' ~ 1 ~ 'b' }}{{ 'x' * 3 }}{{ 2 ** 3 }}{{ 7 % 4 }}{{ 'a' + 'b' }}", "a1bxxx83ab"),
        ("{{ messages | map(attribute='role') | join(',') }}", "user"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') }}", "<a>"),
        ("{{ messages[0]['content'].strip().split('</think>')[-1] }}", "hi"),
        ("{{ 'x' if tools is defined and tools else 'y' }}", "y"),
    ],
)
def test_what_templates_use(source: str, text: str) -> None:
    assert render(source) == text


DOUBLING = (
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses them: roles must alternate"),
        ("{% for %}", "refuses them"),
        ("{{ messages[0].content + 1 }}", "refuses them"),
        ("{{ undefined_name.x }}", "undefined_name"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ messages[0].update({}) }}", "unsafe|not safely callable"),
        ("{% include 'x' %}", "refuses them"),
        ("{% for i in range(10**9) %}{% endfor %}", "too much|[Rr]ange"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "does not end within"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
            "does not end within",
        ),
        ("{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "recursion|does not end"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "does not end"),
        ("{{ 'a' * 10**9 }}", "too much"),
        ("{{ 10**9 * 'a' }}", "too much"),
        ("{{ [0] * 10**9 }}", "too much"),
        ("{{ 10 ** (10 ** 10) }}", "too large a number"),
        (
            "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "too much",
        ),
        (
            "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "too much",
        ),
        (
            "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
            "a number of",
        ),
        (
            DOUBLING,
            "too much",
        ),
        ("{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}", "too much"),
        ("{% set y %}{% for i in range(99999) %}{{ 'x' * 1000000 }}{% endfor %}{% endset %}", "too much"),
        ("{{ 'a'.ljust(10**9) }}", "too much"),
        ("{{ 'a' | center(10**9) }}", "No filter named 'center'"),
        ("{{ 'a' | indent(10**9) }}", "too much"),
        ("{{ '%1000000000d' % 1 }}", "not available"),
        ("{{ '%1000000000d' | format(1) }}", "No filter named 'format'"),
        ("{{ '{:>1000000000}'.format(1) }}", "not available"),
        ("{{ (['x' * 1000000] * 1000) | join }}", "too much"),
        ("{{ ','.join(['x' * 1000000] * 1000) }}", "too much"),
        ("{{ ('a' * 9999999).replace('a', 'b' * 9999999) }}", "too much"),
        ("{{ ('a' * 9999999) | replace('a', 'b' * 9999999) }}", "too much"),
        ("{{ {'a': 1} | tojson(indent=10**9) }}", "too much"),
        ("x" * (1 << 21), "more than 1048576 characters"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "refuses them"),
    ],
)
def test_hostile_templates_are_refused_soon_and_cheaply(source: str, message: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidRequest, match=message) as caught:
        render(source)
    assert caught.value.field == "messages"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


def test_a_long_conversation_is_within_the_budget(tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "x" * 1000}] * 5000
    assert len(tokenizer.render_chat(chat)) > 5_000_000


def test_rendering_leaves_the_interpreter_as_it_was(tokenizer: Tokenizer) -> None:
    import sys

    before = sys.gettrace()
    tokenizer.render_chat(USER)
    with pytest.raises(InvalidRequest):
        render("{{ raise_exception('no') }}")
    assert sys.gettrace() is before


def test_metadata_of_the_real_file_is_enough(model_path: Path) -> None:
    file = GGUF(model_path)
    assert from_gguf(file.metadata, file.path).encode("hi") == [6004]
