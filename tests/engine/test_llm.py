"""The Python API: prompts in, texts out, and an engine that stays clean whatever is asked of it."""

import os
import signal
from array import array
from itertools import groupby

import numpy as np
import pytest
from tests.surprise import expect_short_answers

from octavo.engine import llm as module
from octavo.engine.llm import LLM, Logprob, engine_config
from octavo.errors import ConfigError, InvalidRequest, OctavoError, RequestTooLarge
from octavo.types import Output, PageLabel, Sampled, SamplingParams

from .conftest import END, Alphabet, TinyCheckpoint

GREEDY = SamplingParams(temperature=0, max_tokens=12)
VOCAB = TinyCheckpoint().config.vocab_size


def params(**fields):
    return SamplingParams(**{"temperature": 0, "max_tokens": 40, **fields})


def texts(outputs):
    return [[choice.text for choice in output.outputs] for output in outputs]


def held_pages(llm):
    return llm.stats()["pages_referenced"]


# ── prompts ──


def test_a_text_is_one_prompt(alphabet):
    [output] = alphabet.generate("AB", params())
    assert output.prompt == "AB"
    assert output.prompt_token_ids == [65, 66]
    assert output.finished
    [choice] = output.outputs
    assert choice.text == "CDEFGHIJKLMNOPQRSTUVWXYZ"
    assert choice.index == 0
    assert choice.finish_reason == "stop"
    assert choice.stop_reason is None
    assert choice.token_ids[-1] == alphabet.tokenizer.encode(END)[0]
    assert choice.logprobs is None
    assert choice.cumulative_logprob is None
    assert output.prompt_logprobs is None


def test_tokens_lists_and_mixtures(alphabet):
    for prompt in ([65, 66], (65, 66), array("i", [65, 66])):
        [output] = alphabet.generate(prompt, params(max_tokens=3))
        assert (output.prompt, output.prompt_token_ids, output.outputs[0].text) == (None, [65, 66], "CDEF")
    outputs = alphabet.generate(["W", [65], (88,), "Y"], params())
    assert texts(outputs) == [["XYZ"], ["BCDEFGHIJKLMNOPQRSTUVWXYZ"], ["YZ"], ["Z"]]
    assert alphabet.generate([], params()) == []


def test_the_default_is_sixteen_sampled_tokens(llm):
    [output] = llm.generate("hello")
    assert len(output.outputs[0].token_ids) == 16 or output.outputs[0].finish_reason == "stop"


def test_each_prompt_may_have_its_own_params(alphabet):
    outputs = alphabet.generate(["A", "A", "A"], [params(max_tokens=count) for count in (1, 2, 3)])
    assert texts(outputs) == [["B"], ["BC"], ["BCDE"]]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 3
    for number in (0, 2, 4):
        with pytest.raises(InvalidRequest, match=f"params: there are {number} for 3 prompts"):
            alphabet.generate(["A", "A", "A"], [GREEDY] * number)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt: is empty"),
        ([""], "prompt: is empty"),
        ([[]], "prompt: is empty"),
        ([-1], "prompt: -1 is not a token id"),
        ([VOCAB], f"prompt: {VOCAB} is not a token id from 0 to {VOCAB - 1}"),
        ([2**31], "prompt: 2147483648 is not"),
        ([2**63], "prompt: 9223372036854775808 is not"),
        ([1.5], "prompt: 1.5 is not"),
        ([65, True], "prompt: True is not"),
        ([True], "prompt: True is not"),
        ([None], "prompt: None is not"),
        (["A", [65, -7]], r"prompts\[1\]: -7 is not a token id"),
        (["A", "B", ""], r"prompts\[2\]: is empty"),
        (["A", 65], r"prompts\[1\]: must be a text or a list of token ids, got int"),
        (["A", None], r"prompts\[1\]: must be a text or a list of token ids, got NoneType"),
        (65, "prompt: must be a text or a list, got int"),
        (None, "prompt: must be a text or a list, got NoneType"),
        (b"A", "prompt: must be a text or a list, got bytes"),
        ({"prompt": "A"}, "prompt: must be a text or a list, got dict"),
        ("\ud800", "prompt: is not valid Unicode"),
    ],
)
def test_bad_prompts_are_refused_before_anything_is_queued(alphabet, prompt, message):
    for ask in (alphabet.generate, alphabet.stream):
        with pytest.raises(InvalidRequest, match=f"^{message}"):
            ask(prompt, GREEDY)
    assert alphabet.stats()["prompt_tokens"] == alphabet.stats()["num_steps"] == 0
    assert texts(alphabet.generate("Y", GREEDY)) == [["Z"]]


def test_the_last_token_of_the_vocabulary_is_accepted(llm):
    assert llm.generate([[VOCAB - 1], [0]], GREEDY)[0].finished


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_token_ids": [VOCAB]}, f"stop_token_ids: {VOCAB} is not"),
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias: {VOCAB} is not"),
        ({"logprobs": VOCAB + 1}, "logprobs:"),
    ],
)
def test_params_beyond_the_vocabulary_are_refused(alphabet, fields, message):
    with pytest.raises(InvalidRequest, match=f"^{message}"):
        alphabet.generate("A", params(**fields))
    with pytest.raises(InvalidRequest, match=rf"^prompts\[1\] {message}"):
        alphabet.generate(["A", "B"], [GREEDY, params(**fields)])
    with pytest.raises(InvalidRequest, match="params: must be SamplingParams, got dict"):
        alphabet.generate("A", [{"temperature": 0}])
    with pytest.raises(InvalidRequest, match="params: must be SamplingParams or a list of them, got int"):
        alphabet.generate("A", 3)


def test_a_prompt_begins_with_bos_where_the_model_wants_it(make_llm):
    llm = make_llm(TinyCheckpoint(add_bos=True), decoder=Alphabet)
    [output] = llm.generate("", params(max_tokens=1))
    assert output.prompt_token_ids == [llm.tokenizer.bos_token_id]


# ── lengths ──


def test_answers_fill_the_context_and_no_more(make_llm):
    for length in (33, 47, 48, 2):
        llm = make_llm(max_model_len=length)
        [output] = llm.generate([1] * (length - 1), SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 1
        assert output.outputs[0].finish_reason == "length"
        with pytest.raises(RequestTooLarge, match=f"has {length} tokens, and a context of {length}"):
            llm.generate([1] * length, GREEDY)
        with pytest.raises(RequestTooLarge, match="max_tokens"):
            llm.generate([1] * (length - 1), params(max_tokens=2))
    [output] = make_llm(max_model_len=48).generate([1] * 10, SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 38


def test_a_pool_smaller_than_the_context_cuts_the_length(make_llm):
    page = make_llm().stats()["page_bytes"]
    llm = make_llm(kv_cache_memory_bytes=3 * page)
    assert llm.max_model_len == 49
    assert llm.stats()["num_pages"] == 3
    [output] = llm.generate([1] * 48, SamplingParams(max_tokens=None))
    assert len(output.outputs[0].token_ids) == 1


# ── the promise ──


def test_company_chunks_caches_and_preemption_change_nothing(make_llm):
    """Prompts of a page more or less, alone and together, in engines of every shape: the same tokens and bits."""
    noise = np.random.default_rng(0)
    shared = noise.integers(0, 250, 20).tolist()
    prompts = [shared + noise.integers(0, 250, length).tolist() for length in (1, 5, 12, 13, 30, 2)]
    wanted = [
        SamplingParams(temperature=temperature, seed=i, n=n, max_tokens=20, logprobs=2, ignore_eos=True, top_p=0.9)
        for i, (temperature, n) in enumerate([(0, 1), (1.5, 2), (2.0, 1), (0, 2), (3.0, 3), (1.0, 1)])
    ]

    def answers(outputs):
        return [
            [(choice.token_ids, choice.text, choice.logprobs, choice.cumulative_logprob) for choice in output.outputs]
            for output in outputs
        ]

    plain = make_llm(enable_prefix_caching=False)
    alone = [answers(plain.generate([prompt], one))[0] for prompt, one in zip(prompts, wanted, strict=True)]
    page = make_llm(block_size=4).stats()["page_bytes"]
    small = make_llm(block_size=4, kv_cache_memory_bytes=26 * page, max_num_batched_tokens=9)
    expect_short_answers(small)
    for llm in (
        make_llm(),
        make_llm(block_size=8, max_num_batched_tokens=7),
        make_llm(max_num_seqs=2),
        small,
    ):
        assert answers(llm.generate(prompts, wanted)) == alone  # cold
        again = llm.generate(prompts, wanted)  # warm
        assert answers(again) == alone
        if llm is not small:
            assert all(output.metrics.num_cached_tokens >= 16 for output in again)
    assert small.stats()["num_preemptions"] > 0


def test_choices_differ_and_each_is_its_seeds_own(llm):
    prompt, fields = [5] * 19, {"temperature": 2.0, "max_tokens": 15, "ignore_eos": True}
    [output] = llm.generate(prompt, SamplingParams(n=4, seed=7, **fields))
    ids = [choice.token_ids for choice in output.outputs]
    assert [choice.index for choice in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(tokens) for tokens in ids}) == 4
    singles = llm.generate([prompt] * 4, [SamplingParams(seed=7 + i, **fields) for i in range(4)])
    assert [single.outputs[0].token_ids for single in singles] == ids
    [greedy] = llm.generate(prompt, SamplingParams(n=3, temperature=0))
    assert len({tuple(choice.token_ids) for choice in greedy.outputs}) == 1


def test_requests_without_a_seed_draw_theirs_from_the_engines(make_llm):
    fields = {"temperature": 3.0, "max_tokens": 10, "ignore_eos": True}
    first, second, other = (
        [o.outputs[0].token_ids for o in make_llm(seed=seed).generate(["x", "x"], SamplingParams(**fields))]
        for seed in (1, 1, 2)
    )
    assert first == second
    assert first[0] != first[1]
    assert first != other


def test_beams(llm):
    beams = SamplingParams(n=2, use_beam_search=True, beam_width=3, max_tokens=10, logprobs=2)
    [output] = llm.generate([9] * 19, beams)
    best, second = output.outputs
    assert best.score > second.score
    assert best.token_ids != second.token_ids
    assert best.text == llm.tokenizer.decode(best.token_ids)
    assert best.cumulative_logprob / len(best.token_ids) == pytest.approx(best.score)
    assert all(next(iter(entry)) == token for token, entry in zip(best.token_ids, best.logprobs, strict=True))
    assert {len(entry) for entry in best.logprobs} <= {2, 3}
    [greedy] = llm.generate([9] * 19, SamplingParams(temperature=0, max_tokens=10, logprobs=0))
    assert best.cumulative_logprob >= greedy.outputs[0].cumulative_logprob - 1e-6


# ── stops ──


@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"),
    [
        ("DEFGHIJ", "BC", 8),  # across tokens
        ("E", "BCD", 3),  # inside the token "DE"
        ("B", "", 1),
        (["GH", "FGHI"], "BCDEF", 6),
        (["Q", "H"], "BCDEFG", 6),
    ],
)
def test_stop_strings(alphabet, stop, text, num_tokens):
    [output] = alphabet.generate("A", params(stop=stop))
    [choice] = output.outputs
    assert (choice.text, choice.finish_reason, len(choice.token_ids)) == (text, "stop", num_tokens)
    assert choice.stop_reason in ([stop] if isinstance(stop, str) else stop)
    assert held_pages(alphabet) == 0
    events = list(alphabet.stream("A", params(stop=stop)))
    assert "".join(event.text for event in events) == text
    assert sum(len(event.token_ids) for event in events) == num_tokens
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["stop"]
    [whole] = alphabet.generate("A", params(stop=stop, include_stop_str_in_output=True))
    assert whole.outputs[0].text == text + choice.stop_reason


def test_a_stop_that_never_completes(alphabet):
    [output] = alphabet.generate("A", params(stop="DEFX"))
    assert output.outputs[0].text == "BCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert output.outputs[0].stop_reason is None
    [output] = alphabet.generate("A", params(stop="DEFX", max_tokens=4))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("BCDEF", "length")


def test_a_stop_on_the_last_token_is_a_stop(alphabet):
    [output] = alphabet.generate("A", params(stop="C", max_tokens=2))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("B", "stop")


def test_tokens_beyond_a_stop_are_not_the_choices(alphabet, monkeypatch):
    """Several tokens in one output, as an engine that drafts them gives."""
    ids = [66, 67, 68, 69]
    news = Output("0", 0, [Sampled(token, -0.5, 1, ()) for token in ids], None, 0, 0)
    monkeypatch.setattr(alphabet._core, "step", lambda now: [news])
    [output] = alphabet.generate("A", params(stop="D", logprobs=0))
    [choice] = output.outputs
    assert (choice.text, choice.token_ids, len(choice.logprobs), choice.cumulative_logprob) == ("BC", ids[:3], 3, -1.5)
    assert held_pages(alphabet) == 0


def test_a_stop_ends_one_choice_and_no_other(llm):
    fields = {"temperature": 2.0, "max_tokens": 20, "ignore_eos": True, "seed": 3, "n": 3}
    [free] = llm.generate("once", SamplingParams(**fields))
    stop = free.outputs[1].text[8:10]
    [cut] = llm.generate("once", SamplingParams(stop=stop, **fields))
    assert cut.outputs[1].finish_reason == "stop"
    for before, after in zip(free.outputs, cut.outputs, strict=True):
        assert after.text == before.text.split(stop)[0]
        assert after.finish_reason == ("stop" if stop in before.text else "length")
    assert held_pages(llm) == 0


def test_stop_tokens(alphabet):
    end = alphabet.tokenizer.encode(END)[0]
    [output] = alphabet.generate("A", params(stop_token_ids=[ord("J"), ord("L")]))
    [choice] = output.outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("BCDEFGHI", "stop", ord("J"))
    assert choice.token_ids[-1] == ord("J")
    [output] = alphabet.generate("A", params(stop_token_ids=[ord("J")], include_stop_str_in_output=True))
    assert output.outputs[0].text == "BCDEFGHIJ"
    [output] = alphabet.generate("X", params(stop_token_ids=[end]))
    assert output.outputs[0].stop_reason is None  # the model's own end
    [output] = alphabet.generate("X", params(stop_token_ids=[end], ignore_eos=True))
    assert output.outputs[0].stop_reason == end
    [output] = alphabet.generate("X", params(ignore_eos=True, max_tokens=5))
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 5
    [output] = alphabet.generate("X", params(max_tokens=3))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("YZ", "stop")  # the end as the last token


def test_min_tokens_puts_every_stop_off(alphabet):
    [output] = alphabet.generate("A", params(min_tokens=4, stop=["B", "DE", "I"]))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("BCDEFGH", "I")
    [output] = alphabet.generate("X", params(min_tokens=5))
    assert output.outputs[0].finish_reason == "length" or len(output.outputs[0].token_ids) > 5


def test_characters_of_several_bytes_come_whole(make_llm):
    """The prompt ends after the first byte of "é"; the answer may only complete it."""

    class Bytes(Alphabet):
        script = "é한🙂!".encode()

        def logits(self, x, rows):
            logits = np.zeros((len(rows), self.vocab), np.float32)
            for row, token in zip(logits, x[rows].tolist(), strict=True):
                row[self.script[self.script.index(token) + 1]] = 30.0
            return logits

    llm = make_llm(decoder=Bytes)
    script = list(Bytes.script)
    events = list(llm.stream([script[0]], params(max_tokens=len(script) - 1)))
    assert [event.text for event in events if event.text] == ["é", "한", "🙂", "!"]
    events = list(llm.stream(script[:2], params(max_tokens=5)))
    assert "".join(event.text for event in events) == "한\N{REPLACEMENT CHARACTER}"


# ── log-probabilities ──


def test_logprobs_have_the_chosen_token_and_the_best(llm):
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    fields = {"temperature": 4.0, "seed": 1, "max_tokens": 12, "ignore_eos": True}
    outputs = llm.generate([prompt] * 3, [SamplingParams(logprobs=count, **fields) for count in (0, 1, 5)])
    ids = outputs[0].outputs[0].token_ids
    for count, output in zip((0, 1, 5), outputs, strict=True):
        [choice] = output.outputs
        assert choice.token_ids == ids
        assert len(choice.logprobs) == len(ids)
        for token, entry in zip(ids, choice.logprobs, strict=True):
            assert next(iter(entry)) == token
            chosen = entry[token]
            assert len(entry) == max(count, 1) if chosen.rank <= count else count + 1
            assert sorted(logprob.rank for logprob in entry.values()) == sorted({*range(1, count + 1), chosen.rank})
            assert all(logprob.decoded_token == llm.tokenizer.token_text(t) for t, logprob in entry.items())
            assert isinstance(chosen, Logprob)
        assert choice.cumulative_logprob == pytest.approx(
            sum(entry[t].logprob for t, entry in zip(ids, choice.logprobs, strict=True))
        )


@pytest.mark.parametrize("batched", [2048, 5])
def test_prompt_logprobs_cold_and_warm(make_llm, batched):
    llm = make_llm(max_num_batched_tokens=batched)
    prompt = np.random.default_rng(2).integers(0, 250, 3 * 16 + 5).tolist()
    wanted = params(prompt_logprobs=2, max_tokens=2)
    [cold] = llm.generate(prompt, wanted)
    [warm] = llm.generate(prompt, wanted)
    assert warm.prompt_logprobs == cold.prompt_logprobs
    assert len(cold.prompt_logprobs) == len(prompt)
    assert cold.prompt_logprobs[0] is None
    for i in (1, 20, len(prompt) - 1):
        [before] = llm.generate(prompt[:i], params(max_tokens=1, logprobs=VOCAB))
        expected = before.outputs[0].logprobs[0][prompt[i]]
        assert cold.prompt_logprobs[i][prompt[i]].logprob == expected.logprob
        assert len(cold.prompt_logprobs[i]) in (2, 3)
    [one] = llm.generate(prompt[:1], wanted)
    assert one.prompt_logprobs == [None]


# ── streams ──


def test_a_stream_says_what_generate_says(llm):
    prompts = ["a", "bb", [1, 2, 3]]
    wanted = SamplingParams(temperature=1.5, n=2, seed=5, max_tokens=9, ignore_eos=True)
    outputs = llm.generate(prompts, wanted)
    events = list(llm.stream(prompts, wanted))
    key = lambda event: (event.prompt_index, event.choice_index)  # noqa: E731
    for (prompt, index), group in groupby(sorted(events, key=key), key=key):
        parts, choice = list(group), outputs[prompt].outputs[index]
        assert "".join(part.text for part in parts) == choice.text == llm.tokenizer.decode(choice.token_ids)
        assert [token for part in parts for token in part.token_ids] == choice.token_ids
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
    assert len(events) == 3 * 2 * 9


def test_streams_run_side_by_side(alphabet):
    first, second = alphabet.stream("A", params()), alphabet.stream("Q", params())
    said = {0: "", 1: ""}
    for _ in range(3):
        said[0] += next(first).text
        said[1] += next(second).text
    assert texts(alphabet.generate("W", params())) == [["XYZ"]]
    said[0] += "".join(event.text for event in first)
    said[1] += "".join(event.text for event in second)
    assert said == {0: "BCDEFGHIJKLMNOPQRSTUVWXYZ", 1: "RSTUVWXYZ"}


def test_a_stream_that_is_left_gives_its_pages_back(alphabet):
    stream = alphabet.stream(["A", "B"], params(n=2))
    next(stream)
    assert held_pages(alphabet) > 0
    stream.close()
    assert held_pages(alphabet) == 0
    unused = alphabet.stream("A", params())
    assert alphabet.stats()["num_waiting"] == 0
    assert texts(alphabet.generate("Y", params())) == [["Z"]]
    del unused


# ── chat ──


def test_chat_goes_through_the_template(alphabet):
    messages = [{"role": "user", "content": "hi"}]
    [output] = alphabet.chat(messages, params(max_tokens=3))
    assert alphabet.tokenizer.decode(output.prompt_token_ids) == "user:hi\na:"
    both = alphabet.chat([messages, [*messages, {"role": "user", "content": "again"}]], params(max_tokens=3))
    assert [alphabet.tokenizer.decode(o.prompt_token_ids) for o in both] == ["user:hi\na:", "user:hi\nuser:again\na:"]
    assert "".join(e.text for e in alphabet.stream_chat(messages, params(max_tokens=3))) == output.outputs[0].text
    assert alphabet.chat([], params()) == []
    for wrong in ([{"content": "no role"}], [[]], "hi", [messages, 3], 3, None):
        with pytest.raises(InvalidRequest, match=r"^messages"):
            alphabet.chat(wrong, params())


# ── interruption and failure ──


class Interrupting(Alphabet):
    """Presses Ctrl-C in the middle of its fifth step, not counting those that a new engine times."""

    steps = -100

    def forward(self, step, pool):
        type(self).steps += 1
        if type(self).steps == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return super().forward(step, pool)


def test_an_interrupt_aborts_the_call_and_leaves_the_engine_clean(make_llm, monkeypatch):
    llm = make_llm(decoder=Interrupting)
    monkeypatch.setattr(Interrupting, "steps", 0)
    handler = signal.getsignal(signal.SIGINT)
    other = llm.stream("T", params())
    said = next(other).text
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["A", "B", "C"], params(n=2))
    assert Interrupting.steps == 5
    assert signal.getsignal(signal.SIGINT) is handler
    assert said + "".join(event.text for event in other) == "UVWXYZ"
    assert held_pages(llm) == 0
    assert llm.stats()["num_running"] == llm.stats()["num_waiting"] == 0
    assert texts(llm.generate("X", params())) == [["YZ"]]


def test_a_step_that_breaks_takes_its_own_requests_along(make_llm):
    class Breaking(Alphabet):
        def forward(self, step, pool):
            if ord("E") in step.token_ids:
                raise MemoryError("no room")
            return super().forward(step, pool)

    llm = make_llm(decoder=Breaking)
    other = llm.stream("A", params())
    next(other)
    with pytest.raises(MemoryError):
        llm.generate("E", params())
    with pytest.raises(OctavoError, match="requests were dropped"):
        list(other)
    assert held_pages(llm) == 0
    assert texts(llm.generate("X", params())) == [["YZ"]]


def test_broken_logits_spoil_one_request(make_llm):
    class Broken(Alphabet):
        def logits(self, x, rows):
            logits = super().logits(x, rows)
            logits[x[rows] == ord("P")] = np.nan
            return logits

    llm = make_llm(decoder=Broken)
    bad, good = llm.generate(["P", "W"], params(max_tokens=4, logprobs=2))
    assert good.outputs[0].text == "XYZ"
    assert bad.finished
    assert all(np.isfinite(entry.logprob) for position in bad.outputs[0].logprobs for entry in position.values())
    assert llm.stats()["num_broken_rows"] == 1


# ── the engine ──


def test_closing_twice_is_closing_once_and_nothing_works_after(make_llm):
    with make_llm(decoder=Alphabet) as llm:
        stream = llm.stream("A", params())
        next(stream)
    llm.close()
    for ask in (llm.generate, llm.stream):
        with pytest.raises(OctavoError, match="the engine is closed"):
            ask("A", params())
    with pytest.raises(OctavoError, match="closed"):
        list(stream)


def test_options_are_checked_by_name():
    with pytest.raises(ConfigError, match="max_num_seq: is not an option of the engine: did you mean max_num_seqs"):
        engine_config({"max_num_seq": 3})
    with pytest.raises(ConfigError, match="zzz: is not an option of the engine: there are block_size, "):
        LLM("no-such-model", zzz=3)
    for size in (5, 24, 0, 1 << 17, 16.0):
        with pytest.raises(ConfigError, match="block_size: must be"):
            engine_config({"block_size": size})
    assert engine_config({"block_size": 2000}).block_size == 2000


def test_a_format_must_suit_the_model(make_llm):
    for dtype in ("int3", "INT8", ""):
        with pytest.raises(ConfigError, match=r"kv_cache_dtype: must be one of auto, fp8, bf16, .*int4; got"):
            engine_config({"kv_cache_dtype": dtype})
    with pytest.raises(ConfigError, match="int8 needs a head_dim in sixteens, and this model's is 8"):
        make_llm(kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="kv_cache_dtype_skip_layers: the model has 2 layers, not one 2"):
        make_llm(kv_cache_dtype_skip_layers=(0, 2))
    with pytest.raises(ConfigError, match="kv_cache_dtype_skip_layers: must be a whole number"):
        make_llm(kv_cache_dtype_skip_layers=[-1])
    mixed = make_llm(kv_cache_dtype="fp32", kv_cache_dtype_skip_layers=[1])
    assert mixed.stats()["token_bytes"] == 2 * 2 * 8 * (4 + 2)


def test_the_pool_leaves_room_for_the_model(make_llm, monkeypatch):
    page = make_llm().stats()["page_bytes"]
    monkeypatch.setattr(module, "available_memory", lambda: 150 * page)
    checkpoint = TinyCheckpoint()
    checkpoint.stored_bytes = 50 * page
    assert make_llm(checkpoint, kv_cache_memory_bytes=None).stats()["num_pages"] == 40


def test_tiers_below_the_pool(make_llm, monkeypatch, tmp_path):
    page = make_llm().stats()["page_bytes"]
    record = page + 4096 * 2 - page % 4096
    monkeypatch.setattr(module, "available_memory", lambda: 150 * page)

    def store(seed=0, swap_space=50, **changes):
        """One engine's, of which the one before is closed."""
        options = {"kv_cache_memory_bytes": 100 * page, "kv_offload_space": (10 * record + 4096) / 2**30}
        options = {**options, "swap_space": swap_space * page / 2**30, "kv_offload_dir": str(tmp_path), **changes}
        made.append(make_llm(TinyCheckpoint(seed), **options)._engine)
        return made[-1].store

    made = []
    first = store()
    assert first.host.shape == (50, page)
    assert first.disk.max_records == 10
    with pytest.raises(ConfigError, match="kv_offload_dir: another engine is using"):
        store()
    first.disk.write(3, PageLabel(bytes(32), bytes(32), (1, 2)), np.ones(page, np.uint8).data)
    made[-1].core.executor.close()
    with pytest.raises(ConfigError, match=f"swap_space: {51 * page:,} bytes are more than the {50 * page:,} that are "):
        store(swap_space=51)
    for changes, num_pages in (({}, 1), ({"swap_space": 0}, 1), ({"seed": 1}, 0), ({}, 0)):
        assert len(store(**changes).disk.labels()) == num_pages
        made[-1].core.executor.close()


def test_metrics_and_stats(alphabet):
    prompt = list(range(33))
    [cold] = alphabet.generate(prompt, params(max_tokens=3))
    [warm] = alphabet.generate(prompt, params(max_tokens=3))
    assert (cold.metrics.num_cached_tokens, warm.metrics.num_cached_tokens) == (0, 32)
    for output in (cold, warm):
        assert 0 < output.metrics.time_to_first_token_s <= output.metrics.total_s
        assert output.metrics.num_preemptions == 0
    stats = alphabet.stats()
    assert stats["prompt_tokens"] == 66
    assert stats["generation_tokens"] == 6
    assert stats["hit_tokens"] == 32
    assert stats["pages_free"] + stats["pages_cached"] == stats["num_pages"]
    assert alphabet.config.backend == "reference"
    assert alphabet.model.vocab_size == VOCAB


def test_progress_is_shown(alphabet, capsys):
    pytest.importorskip("rich")
    assert texts(alphabet.generate(["W", "X"], params(), progress=True)) == [["XYZ"], ["YZ"]]
