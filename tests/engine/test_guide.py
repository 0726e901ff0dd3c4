"""Guided answers: they are what they have to be, whatever the model would rather say, and the same bits in any company.

The tiny model's answers are noise, so that every turn that a guide allows is taken before long.
"""

import gc
import json
import re
from array import array

import numpy as np
import pytest
from tests.surprise import expect_short_answers

from octavo.engine import guide as module
from octavo.engine.guide import MAX_COMPILED, Guides
from octavo.engine.sampler import Sampler
from octavo.errors import InvalidRequest
from octavo.ops.reference import ReferenceOps
from octavo.types import MAX_GUIDE_CHARS, Draw, Guide, SamplingParams, Slice

from .conftest import END, OTHER_END, TinyCheckpoint, byte_tokenizer

BLANKS = {ord(blank): -100.0 for blank in "\t\n\r"} | {32: -100.0}
DATE = Guide("regex", r"\d{4}-(0[1-9]|1[0-2])-\d\d( (am|pm))?")
NESTED = Guide("grammar", 'start: sum\nsum: term ("+" term){0,3}\nterm: /[0-9]/ | "(" sum ")"')
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
        "age": {"type": "integer", "minimum": 3, "maximum": 117},
        "height": {"type": "number", "minimum": 0.5, "maximum": 2.5},
        "tags": {"type": "array", "items": {"enum": ["red", "blue", 7, None]}, "minItems": 1, "maxItems": 3},
        "pet": {"type": "object", "properties": {"alive": {"type": "boolean"}}, "required": ["alive"],
                "additionalProperties": False},
    },
    "required": ["name", "age", "tags", "pet"],
    "additionalProperties": False,
}  # fmt: skip


def guided(guide, **fields):
    return SamplingParams(**{"max_tokens": 120, "seed": 1, "guide": guide, **fields})


def is_person(value):
    return (
        set(value) - {"height"} == {"name", "age", "tags", "pet"}
        and isinstance(value["name"], str)
        and 1 <= len(value["name"]) <= 4
        and type(value["age"]) is int
        and 3 <= value["age"] <= 117
        and ("height" not in value or 0.5 <= value["height"] <= 2.5)
        and 1 <= len(value["tags"]) <= 3
        and all(tag in ("red", "blue", 7, None) for tag in value["tags"])
        and value["pet"] in ({"alive": True}, {"alive": False})
    )


def answers(llm, params, prompt="hello there"):
    [output] = llm.generate(prompt, params)
    return output.outputs


# ── what comes out ──


def test_every_answer_matches_its_expression(make_llm):
    choices = answers(make_llm(), guided(DATE, n=64))
    assert all(choice.finish_reason == "stop" for choice in choices)
    texts = {choice.text for choice in choices}
    assert all(re.fullmatch(DATE.spec, text, re.ASCII) for text in texts)
    assert len(texts) > 30
    assert len({text[11:] for text in texts}) == 3


def test_every_answer_is_one_of_the_choices(make_llm):
    options = ["yes", "no", "no way", 'say "no"\n', "vielleicht (später)", "\x01.*"]
    choices = answers(make_llm(), guided(Guide("choice", json.dumps(options)), n=64))
    assert {choice.text for choice in choices} == set(options)
    assert {choice.finish_reason for choice in choices} == {"stop"}


def test_every_answer_is_valid_under_its_schema(make_llm):
    llm = make_llm(kv_cache_memory_bytes=4 << 20)
    choices = answers(llm, guided(Guide("json_schema", json.dumps(PERSON)), n=48, max_tokens=240, logit_bias=BLANKS))
    values = [json.loads(choice.text) for choice in choices if choice.finish_reason == "stop"]
    assert len(values) > 24  # a number may have digits without end
    assert all(map(is_person, values))
    assert any("height" in value for value in values)
    assert len({value["age"] for value in values}) > 8


def test_every_json_object_is_one(make_llm):
    end = ord("}")
    params = guided(Guide("json_object"), n=32, max_tokens=200, logit_bias={**BLANKS, end: 8.0, ord('"'): 8.0})
    texts = [choice.text for choice in answers(make_llm(), params) if choice.finish_reason == "stop"]
    assert len(texts) > 16
    assert all(isinstance(json.loads(text), dict) for text in texts)


def test_every_answer_follows_its_grammar(make_llm):
    for guide in (NESTED, Guide("grammar", 'root ::= term ("+" term)*\nterm ::= [0-9] | "(" root ")"')):
        choices = answers(make_llm(), guided(guide, n=32))
        texts = [choice.text for choice in choices if choice.finish_reason == "stop"]
        assert len(set(texts)) > 8
        for text in texts:
            assert isinstance(eval(text, {"__builtins__": {}}), int)
            assert set(text) <= set("0123456789+()")


def test_blanks_in_json_have_a_bound(make_llm):
    eager = {token: 100.0 if token in (10, 32) else 0.0 for token in (9, 10, 13, 32)}
    [choice] = answers(make_llm(), guided(Guide("json_schema", '{"enum": [[1]]}'), logit_bias=eager, max_tokens=200))
    assert choice.finish_reason == "stop"
    assert json.loads(choice.text) == [1]


def test_one_of_several_schemas_is_any_of_them(make_llm):
    guide = Guide("json_schema", json.dumps({"oneOf": [{"enum": [1, 22]}, {"const": "x"}]}))
    assert {choice.text for choice in answers(make_llm(), guided(guide, n=32, temperature=50))} == {"1", "22", '"x"'}


@pytest.mark.parametrize("guide", [Guide("choice", '[""]'), Guide("regex", "a{0}")])
def test_an_answer_may_have_to_be_empty(make_llm, guide):
    [choice] = answers(make_llm(), guided(guide))
    assert (choice.text, choice.finish_reason, len(choice.token_ids)) == ("", "stop", 1)


def test_the_greedy_answer_takes_the_likeliest_of_what_is_allowed(alphabet):
    [choice] = answers(alphabet, guided(Guide("regex", "[C-Z]+"), temperature=0), "AB")
    assert choice.text == "CDEFGHIJKLMNOPQRSTUVWXYZ"
    [choice] = answers(alphabet, guided(Guide("regex", "[C-Z]{2,}!"), temperature=0, max_tokens=3), "AB")
    assert (choice.text, choice.finish_reason) == ("CDEF", "length")


# ── the same bits ──


def test_alone_together_forked_and_after_preemption_the_tokens_are_the_same(make_llm):
    prompts = [f"prompt number {i}" for i in range(6)]
    guides = [DATE, NESTED, Guide("json_schema", json.dumps(PERSON)), None, DATE, Guide("regex", "[a-f]{40,60}")]
    params = [guided(guide, seed=10 + i, max_tokens=60) for i, guide in enumerate(guides)]
    params[4] = guided(guides[4], seed=14, n=4, max_tokens=60)
    roomy = make_llm()
    alone = []
    for prompt, wanted in zip(prompts, params, strict=True):
        choices = answers(roomy, wanted, prompt)
        alone.append([choice.token_ids for choice in choices])
        for index, choice in enumerate(choices if len(choices) > 1 else ()):
            [single] = answers(roomy, guided(wanted.guide, seed=wanted.seed + index), prompt)
            assert single.token_ids == choice.token_ids
    again = [[choice.token_ids for choice in answers(roomy, *pair[::-1])] for pair in zip(prompts, params, strict=True)]
    assert again == alone
    narrow = make_llm(block_size=4, kv_cache_memory_bytes=24 * roomy.stats()["token_bytes"] * 4)
    expect_short_answers(narrow)
    together = [[choice.token_ids for choice in output.outputs] for output in narrow.generate(prompts, params)]
    assert together == alone
    assert narrow.stats()["num_preemptions"] > 0


def test_a_matcher_that_is_made_late_is_the_same_as_one_that_has_been_there_all_along():
    tokenizer = byte_tokenizer()
    text = '{"name": "Bo", "age": 30, "tags": [7, null], "pet": {"alive": true}}'
    params = guided(Guide("json_schema", json.dumps(PERSON)))
    tokens = array("i", [1, 2, 3])
    early = Guides(tokenizer, tokenizer.vocab_size)
    for token in [*tokenizer.encode(text), None]:
        draws = [Draw(params, 0, known, 3, 0) for known in (tokens, tokens[:])]
        late = Guides(tokenizer, tokenizer.vocab_size)
        np.testing.assert_array_equal(*(mask_of(guides, draw) for guides, draw in zip((early, late), draws)))  # noqa: B905
        if token is not None:
            tokens.append(token)
    ends = [tokenizer.encode(END)[0], tokenizer.encode(OTHER_END)[0]]
    assert np.flatnonzero(mask_of(early, Draw(params, 0, tokens, 3, 0))).tolist() == sorted(ends)
    assert early.num_followed == 1


def mask_of(guides, draw):
    return guides.begin([Slice(1, 0, draw.token_ids[:1], 0, array("i", [0]), (draw,))]).of(draw)


# ── between the guide and the other parameters ──


def test_an_end_of_the_text_is_drawn_only_where_the_guide_is_complete(make_llm):
    ends = dict.fromkeys(make_llm().tokenizer.eos_token_ids, 100.0)
    [choice] = answers(make_llm(), guided(Guide("regex", "[ab]{5,}"), logit_bias=ends))
    assert (len(choice.text), choice.finish_reason) == (5, "stop")


def test_no_bias_leads_out_of_the_guide(make_llm):
    [choice] = answers(make_llm(), guided(Guide("regex", "[ab]{9}"), logit_bias={ord("z"): 100.0, ord("a"): -100.0}))
    assert choice.text == "b" * 9


def test_min_tokens_puts_the_end_off_as_long_as_anything_else_is_allowed(make_llm):
    ends = dict.fromkeys(make_llm().tokenizer.eos_token_ids, 100.0)
    [choice] = answers(make_llm(), guided(Guide("regex", "[ab]*"), min_tokens=7, logit_bias=ends))
    assert (len(choice.text), choice.finish_reason) == (7, "stop")
    [choice] = answers(make_llm(), guided(Guide("regex", "ab"), min_tokens=50))
    assert (choice.text, choice.finish_reason, len(choice.token_ids)) == ("ab", "stop", 3)


def test_ignore_eos_goes_on_as_long_as_anything_else_is_allowed(make_llm):
    [choice] = answers(make_llm(), guided(Guide("regex", "[ab]*"), ignore_eos=True, max_tokens=30))
    assert (len(choice.text), choice.finish_reason) == (30, "length")
    [choice] = answers(make_llm(), guided(Guide("regex", "ab"), ignore_eos=True))
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("ab", "stop", None)


def test_stops_end_guided_answers_too(alphabet):
    [choice] = answers(alphabet, guided(Guide("regex", "[C-Z]+"), temperature=0, stop="H"), "AB")
    assert (choice.text, choice.stop_reason) == ("CDEFG", "H")
    params = guided(Guide("regex", "[C-Z]+"), temperature=0, stop_token_ids=[ord("J")])
    [choice] = answers(alphabet, params, "AB")
    assert (choice.text, choice.stop_reason) == ("CDEFGHI", ord("J"))


def test_log_probabilities_are_those_of_the_model(make_llm):
    llm = make_llm()
    [choice] = answers(llm, guided(Guide("regex", "[ab]{6}"), logprobs=2))
    [scored] = llm.generate([*llm.tokenizer.encode("hello there"), *choice.token_ids[:-1]],
                            SamplingParams(max_tokens=1, prompt_logprobs=0))  # fmt: skip
    given = [entry[token].logprob for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)][:-1]
    free = [next(iter(entry.values())).logprob for entry in scored.prompt_logprobs[-len(given) :]]
    np.testing.assert_allclose(given, free, atol=0.05)
    assert all(rank.rank > 1 for entry in choice.logprobs[:1] for rank in list(entry.values())[:1])


def test_control_tokens_and_padding_are_never_allowed():
    tokenizer = byte_tokenizer()
    guides = Guides(tokenizer, tokenizer.vocab_size + 9)
    draw = Draw(guided(Guide("regex", r"(.|\n)+")), 0, array("i", [1]), 1, 0)
    allowed = mask_of(guides, draw)
    assert allowed[:128].all()
    assert not allowed[-11:].any()  # two control tokens and the padding
    draw.token_ids.append(65)
    assert np.flatnonzero(mask_of(guides, draw)[-11:]).tolist() == [0, 1]


# ── what is refused ──


@pytest.mark.parametrize(
    ("kind", "spec", "message"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", "(" * 4000 + "a" + ")" * 4000, "guide"),
        ("regex", "a" * 40_000, "40000 characters, and the limit is 32768"),
        ("json_schema", "{", "EOF|expected"),
        ("json_schema", "[]", "not a JSON schema"),
        ("json_schema", '{"type": "frog"}', "frog"),
        ("json_schema", '{"$ref": "http://example.com/schema"}', "not present|retriev"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", "[" * 3000, "recursion"),
        ("choice", "[]", "at least one text"),
        ("choice", "[1]", "at least one text"),
        ("choice", "yes", "at least one text"),
        ("grammar", "start: missing", "missing"),
        ("grammar", "root ::= ((((", "grammar"),
        ("grammar", "root ::= 1", "not found"),
        ("grammar", "-::=9u(::=\\", "grammar"),
        ("grammar", "root ::= " + "(" * 900 + '"a"' + ")" * 900, "grammar"),
    ],
)  # fmt: skip
def test_a_bad_guide_is_refused_before_anything_is_queued(llm, kind, spec, message):
    params = SamplingParams(guide=Guide(kind, spec))
    with pytest.raises(InvalidRequest, match=message) as caught:
        llm.generate("hello", params)
    assert caught.value.field == "guide"
    assert len(str(caught.value)) < 500
    with pytest.raises(InvalidRequest, match=r"prompts\[1\] guide: "):
        llm.generate(["hello", "world"], [SamplingParams(), params])
    assert llm.stats()["num_waiting"] == llm.stats()["num_steps"] == 0


@pytest.mark.parametrize(
    ("kind", "spec"),
    [("frog", "x"), ("regex", ""), ("json_object", "{}"), ("regex", 3), ("regex", "\ud800"),
     ("grammar", "x" * (MAX_GUIDE_CHARS + 1))],
)  # fmt: skip
def test_what_cannot_be_a_guide(kind, spec):
    with pytest.raises(InvalidRequest) as caught:
        Guide(kind, spec)
    assert caught.value.field == "guide"
    assert len(str(caught.value)) < 300


def test_guides_and_beams_do_not_mix():
    with pytest.raises(InvalidRequest, match="guide: does not work with use_beam_search"):
        SamplingParams(use_beam_search=True, guide=DATE)
    with pytest.raises(InvalidRequest, match="guide: must be a Guide"):
        SamplingParams(guide="[ab]+")


def test_a_model_without_an_end_cannot_be_guided():
    tokenizer = byte_tokenizer()
    tokenizer.eos_token_ids = ()
    with pytest.raises(InvalidRequest, match="names no token that ends a text"):
        Guides(tokenizer, tokenizer.vocab_size).check(DATE)


@pytest.mark.parametrize(
    "guide",
    [
        Guide("regex", "((a{1,1000}){1,1000}){1,1000}"),
        Guide("regex", "((((.+)+)+)+)+x"),
        Guide("regex", "|".join(f"word{i}" for i in range(3000))),
        Guide("grammar", 'start: e\ne: e e e | e e | "a" | ""'),
        Guide("json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(1500)}})),
        Guide("json_schema", '{"type": "integer", "multipleOf": 99991, "minimum": 1, "maximum": 1e15}'),
        Guide("json_schema", json.dumps({"type": "array", "minItems": 10**6, "items": {"type": "integer"}})),
        Guide("json_schema", json.dumps({"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2}
                                                   for i in range(22)} | {"d22": True}, "$ref": "#/$defs/d0"})),
    ],
    ids=range(8),
)  # fmt: skip
def test_a_hostile_guide_costs_little_or_is_refused(llm, guide):
    try:
        [choice] = answers(llm, guided(guide, max_tokens=20))
    except InvalidRequest as error:
        assert error.field == "guide"  # noqa: PT017
    else:
        assert choice.finish_reason in ("stop", "length", "abort")


def test_a_guide_that_becomes_too_complex_ends_its_choice_and_no_other(make_llm, monkeypatch, caplog):
    few = module.llguidance.LLParserLimits(max_lexer_states=200, verbose_errors=False)
    monkeypatch.setattr(module, "LIMITS", few)
    complex_one = guided(Guide("regex", "([ab]*a[ab]{40}c)+"), max_tokens=100, logit_bias={ord("c"): -100.0})
    llm = make_llm()
    broken, sound = llm.generate(["one", "two"], [complex_one, guided(DATE)])
    [choice] = broken.outputs
    assert choice.finish_reason == "abort"
    assert set(choice.text) <= set("ab")
    assert len(choice.token_ids) == len(choice.text) < 100
    assert re.fullmatch(DATE.spec, sound.outputs[0].text)
    assert "cannot be followed any further: lexer error: too many states" in caplog.text


# ── nothing is kept ──


def test_matchers_go_with_their_sequences(make_llm):
    llm = make_llm()
    guides = llm._engine.guides
    for seed in range(3):
        answers(llm, guided(DATE, n=5, seed=seed))
    stream = llm.stream("cut off", guided(Guide("regex", "[ab]*"), ignore_eos=True))
    next(stream)
    assert guides.num_followed >= 1
    stream.close()
    answers(llm, SamplingParams(max_tokens=1))  # the scheduler lets go of its latest plan
    gc.collect()
    assert guides.num_followed == 0


def test_compiled_guides_have_a_bound():
    tokenizer = byte_tokenizer()
    guides = Guides(tokenizer, tokenizer.vocab_size)
    guides.check(DATE)
    used_all_along = guides._compiled[DATE]
    for count in range(1, MAX_COMPILED + 10):
        guides.check(Guide("regex", f"a{{{count}}}"))
        guides.check(DATE)
    assert len(guides._compiled) == MAX_COMPILED
    assert guides._compiled[DATE] is used_all_along
    assert guides.check_soon(DATE).result() is None


# ── the sampler ──

VOCAB = TinyCheckpoint().config.vocab_size


def draw_with(logits, allowed, **fields):
    mask = np.zeros(VOCAB, np.bool_)
    mask[allowed] = True
    row = np.float32(logits)
    before = row.copy()
    draw = Draw(guided(DATE, **fields), 1, array("i", [1, 2]), 1, 0)
    [sampled] = Sampler(ReferenceOps(), (5, 6)).sample(row[None], [(0, draw)], lambda _: mask)
    np.testing.assert_array_equal(row, before)
    return sampled.token_id


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -np.inf])
def test_whatever_the_logits_a_token_that_is_allowed_is_drawn(value, temperature):
    assert draw_with(np.full(VOCAB, value), [7], temperature=temperature) == 7
    only_others = np.where(np.arange(VOCAB) == 7, -np.inf, value)
    assert draw_with(only_others, [7], temperature=temperature) == 7
    assert draw_with(only_others, [], temperature=temperature) == -1


@pytest.mark.parametrize("fields", [{"min_tokens": 9}, {"ignore_eos": True}])
def test_ends_are_drawn_early_only_where_nothing_else_is_left(fields):
    logits = np.where(np.arange(VOCAB) == 5, 50.0, 0.0)
    assert draw_with(logits, [5, 6, 8], **fields) == 8
    assert draw_with(logits, [5, 6], **fields) == 5


def test_a_stop_token_is_drawn_early_where_nothing_else_is_left():
    assert draw_with(np.zeros(VOCAB), [9], min_tokens=9, stop_token_ids=[9]) == 9
    assert draw_with(np.zeros(VOCAB), [9, 5, 11], min_tokens=9, stop_token_ids=[9]) == 11
