"""The engine in its own process: the same answers as offline, and an end to everything that is begun."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.engine import faulty_engine, saving_engine
from tests.models import tiny

from octavo.config import EngineConfig
from octavo.engine import async_llm
from octavo.engine.async_llm import AsyncLLM, RequestStream
from octavo.engine.llm import LLM
from octavo.engine.process import (
    Abort,
    Add,
    Channel,
    Command,
    Finish,
    Frames,
    ListSessions,
    Save,
    Stop,
    TouchSession,
    framed,
)
from octavo.errors import (
    ConfigError,
    EngineDead,
    InvalidRequest,
    ModelError,
    Overloaded,
    RequestFailed,
    RequestTooLarge,
    UnknownSession,
)
from octavo.types import Guide, Output, Request, SamplingParams, Tier

CONFIG = EngineConfig(kv_cache_memory_bytes=1 << 20, block_size=4, num_threads=1)
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, 512 tokens of context."""
    shape = tiny.config("llama")
    return tiny.write_folder(tmp_path_factory.mktemp("model") / "tiny", shape, tiny.tensors(shape))


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_llm, "PROGRAM", faulty_engine.__name__)


@pytest.fixture
def slow(faulty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEP_S", "0.02")


def drive(
    work: Callable[[AsyncLLM], Awaitable[None]], model: Path, config: EngineConfig = CONFIG, **options: Any
) -> None:
    """Run `work` on an engine and close it."""

    async def main() -> None:
        llm = await AsyncLLM.start(model, config, **options)
        try:
            await work(llm)
        finally:
            await llm.close()
        assert pid_is_gone(pid_of(llm))

    asyncio.run(main())


def pid_of(llm: AsyncLLM) -> int:
    return llm._child._process.pid


def pid_is_gone(pid: int) -> bool:
    """Whether the process has ended; one that nobody has waited for yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.005)


def at_rest(llm: AsyncLLM) -> bool:
    """Nothing runs or waits, and no page is held."""
    stats = llm.stats()
    assert stats.pages_free + stats.pages_cached + stats.pages_referenced == stats.num_pages
    return (stats.num_running, stats.num_waiting, stats.pages_referenced) == (0, 0, 0) and stats.num_pages > 0


async def read(stream: RequestStream[Output]) -> list[Output]:
    return [output async for output in stream]


def tokens(outputs: list[Output]) -> list[tuple[int, int]]:
    """(choice, token) of all of them, in the order of the choices."""
    news = [(output.index, token.token_id) for output in outputs for token in output.new_tokens]
    return sorted(news, key=lambda one: one[0])


async def answer(llm: AsyncLLM, request: Request) -> list[Output]:
    return await read(await llm.submit(request))


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(10, 250), k=length)


# ── the same answers ─────────────────────────────────────────────────────────────────────────────────────────────


def test_many_requests_at_once_are_answered_as_offline(model: Path) -> None:
    plain = {"ignore_eos": True, "max_tokens": 12}
    asked = [
        SamplingParams(temperature=0, **plain),
        SamplingParams(temperature=1, seed=7, n=3, logprobs=2, **plain),
        SamplingParams(temperature=0.7, seed=2**64 - 1, top_p=0.9, min_p=0.01, logit_bias={65: 5, 66: -3.5}, **plain),
        SamplingParams(temperature=0, logprobs=0, prompt_logprobs=3, **plain),
        SamplingParams(use_beam_search=True, n=2, beam_width=3, logprobs=1, **plain),
        SamplingParams(temperature=1, seed=1, repetition_penalty=1.3, stop_token_ids=list(range(30)), max_tokens=200),
    ]
    prompts = [prompt(20 + i % 5, seed=i) for i in range(24)]
    params = [asked[i % len(asked)] for i in range(24)]
    with LLM(model, **asdict(CONFIG)) as llm:
        right = llm.generate(prompts, params)

    async def work(llm: AsyncLLM) -> None:
        requests = [Request(f"r{i}", ids, wanted) for i, (ids, wanted) in enumerate(zip(prompts, params, strict=True))]
        for offline, outputs in zip(right, await asyncio.gather(*(answer(llm, r) for r in requests)), strict=True):
            by_choice: dict[int, list[Output]] = defaultdict(list)
            for output in outputs:
                by_choice[output.index].append(output)
            assert sorted(by_choice) == [choice.index for choice in offline.outputs]
            for choice in offline.outputs:
                news = by_choice[choice.index]
                drawn = [token for output in news for token in output.new_tokens]
                assert [token.token_id for token in drawn] == choice.token_ids
                assert news[-1].finish_reason == choice.finish_reason
                assert news[-1].score == choice.score
                for token, scores in zip(drawn, choice.logprobs or (), strict=choice.logprobs is not None):
                    assert scores[token.token_id].logprob == token.logprob
                    assert {top for top, _ in token.top} <= set(scores)
            scored = by_choice[0][0].prompt_logprobs or ()
            for token, scores in zip(scored, (offline.prompt_logprobs or [None])[1:], strict=True):
                assert scores is not None
                assert scores[token.token_id].logprob == token.logprob
        await until(lambda: at_rest(llm))
        stats = llm.stats()
        assert stats.scheduler.prompt_tokens == sum(map(len, prompts))
        assert stats.cache.queried_tokens > 0
        assert sum(stats.finished.values()) == sum(wanted.n for wanted in params)

    drive(work, model)


def test_parameters_arrive_as_they_were_sent() -> None:
    odd = SamplingParams(
        n=3, temperature=2, top_p=0.5, top_k=-1, min_p=1, seed=2**64 - 1, presence_penalty=-2, frequency_penalty=2,
        repetition_penalty=1e3, stop=["ab", "é"], stop_token_ids=(1, 2), include_stop_str_in_output=True, min_tokens=2,
        max_tokens=None, ignore_eos=True, logprobs=0, prompt_logprobs=5, logit_bias={3: 1, 4: -9.5}, length_penalty=-1,
    )  # fmt: skip
    sent = [
        Add("é", b"\1\0\0\0", odd, ("key", "a", "salt", "b"), -5, "tenant", "é"),
        Add("b", b"", SamplingParams(use_beam_search=True, max_tokens=1), (), 0, "", None),
        *(Abort("a"), Finish("a", 3), Stop(), ListSessions(1, None, 5), ListSessions(2, "", 5), Save(3)),
        *(TouchSession(4, "pin", "tenant", "é", 0.5), TouchSession(5, "release", "", "x")),
    ]
    decoder = msgspec.msgpack.Decoder(Command)
    got = [decoder.decode(frame) for frame in Frames().push(b"".join(framed(message) for message in sent))]
    assert got == sent


@pytest.mark.parametrize("seed", range(3))
def test_messages_survive_any_cut(seed: int) -> None:
    chance = random.Random(seed)
    sent = [framed(Abort("x" * chance.choice([0, 1, 31, 300, 70_000]))) for _ in range(20)]
    data, frames, got = b"".join(sent), Frames(), []
    while data:
        length = chance.choice([1, 2, 5, 1000, 100_000])
        got += list(frames.push(data[:length]))
        data = data[length:]
    assert [len(frame).to_bytes(4, "little") + frame for frame in got] == sent


def test_a_parent_that_does_not_read_makes_no_step_wait() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(theirs)
        sent = [Abort(str(number) + "x" * 5000) for number in range(500)]
        for message in sent:
            channel.send(message)
            channel.flush()  # the socket takes a part of the 2.5 MB, and the rest is kept
        decoder, frames, got = msgspec.msgpack.Decoder(Command), Frames(), []
        while len(got) < len(sent):
            got += [decoder.decode(frame) for frame in frames.push(ours.recv(1 << 16))]
            channel.flush()
        assert got == sent


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_wrong_is_refused_and_harms_nobody(model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        other = await llm.submit(Request("other", prompt(5), LONG))
        for error, field, ids, params in (
            (InvalidRequest, "request_id", [1], SHORT),  # first, while the other one surely runs
            (InvalidRequest, "prompt", [], SHORT),
            (InvalidRequest, "prompt", [2**40], SHORT),
            (InvalidRequest, "prompt", [-1], SHORT),
            (InvalidRequest, "stop_token_ids", [1], SamplingParams(stop_token_ids=[2**30])),
            (RequestTooLarge, "prompt", [1] * 10**6, SHORT),
            (RequestTooLarge, "max_tokens", [1], SamplingParams(max_tokens=10**6)),
            (InvalidRequest, "request", [1], SamplingParams(stop="\ud800")),
            (InvalidRequest, "guide", [1], SamplingParams(guide=Guide("regex", "("))),
        ):
            with pytest.raises(error) as caught:
                await llm.submit(Request("other" if field == "request_id" else "wrong", ids, params))
            assert caught.value.field == field
        with pytest.raises(InvalidRequest, match="priority"):
            await llm.submit(Request("wrong", [1], SHORT, priority=2**70))

        right, llm.limits = llm.limits, llm.limits._replace(vocab_size=10**6)  # so that the engine itself has to refuse
        with pytest.raises(InvalidRequest, match="prompt: 1000 is not a token id") as caught:
            await llm.submit(Request("wrong", [1000], SHORT))
        assert type(caught.value) is InvalidRequest
        assert caught.value.field == "prompt"
        llm.limits = right
        assert len(await answer(llm, Request("wrong", [1], SHORT))) == 5
        assert len(await read(other)) == 300

    drive(work, model)


def test_errors_of_the_start_come_as_themselves(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="context of 512") as config_error:
        asyncio.run(AsyncLLM.start(model, EngineConfig(max_model_len=513)))
    assert config_error.value.option == "max_model_len"
    with pytest.raises(ModelError, match="nowhere") as model_error:
        asyncio.run(AsyncLLM.start(tmp_path / "nowhere", CONFIG))
    assert model_error.value.path == str(tmp_path / "nowhere")


def test_a_full_queue_refuses(slow: None, model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        streams = [await llm.submit(Request("0", prompt(4), LONG))]
        await anext(streams[0])
        streams += [await llm.submit(Request(str(i), prompt(4), LONG)) for i in (1, 2)]
        assert llm.num_queued == 2
        with pytest.raises(Overloaded, match="2 requests are queued"):
            await llm.submit(Request("3", prompt(4), LONG))
        streams[1].abort()
        streams.append(await llm.submit(Request("3", prompt(4), LONG)))
        for stream in streams:
            stream.abort()
        await until(lambda: at_rest(llm))

    drive(work, model, EngineConfig(kv_cache_memory_bytes=1 << 20, max_num_seqs=1), max_queued_requests=2)


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_abort_at_every_stage_gives_everything_back(slow: None, model: Path) -> None:
    config = EngineConfig(kv_cache_memory_bytes=1 << 20, block_size=4, max_num_seqs=2, max_num_batched_tokens=8)

    async def work(llm: AsyncLLM) -> None:
        streaming = await llm.submit(Request("streaming", prompt(4), LONG))
        await anext(streaming)
        prefilling = await llm.submit(Request("prefilling", prompt(400), SHORT))
        queued = await llm.submit(Request("queued", prompt(4), LONG))
        await until(lambda: (llm.stats().num_running, llm.stats().num_waiting) == (2, 1))
        assert prefilling.scheduled_at is not None
        assert prefilling.first_token_at is None
        assert queued.scheduled_at is None
        submitting = asyncio.create_task(llm.submit(Request("submitting", prompt(4), LONG)))
        await asyncio.sleep(0)
        submitting.cancel()
        waiting = asyncio.create_task(anext(queued))
        await asyncio.sleep(0)
        for stream in (queued, prefilling, streaming):
            stream.abort()
            assert await read(stream) == []
            stream.abort()
        for task in (submitting, waiting):
            with pytest.raises((asyncio.CancelledError, StopAsyncIteration)):
                await task
        await until(lambda: at_rest(llm))
        assert llm.num_open == 0
        assert llm.stats().finished == {"abort": 4}
        generated = llm.stats().scheduler.generation_tokens
        assert len(await answer(llm, Request("streaming", prompt(4), SHORT))) == 5  # the id is free again
        assert llm.stats().scheduler.generation_tokens == generated + 5

    drive(work, model, config)


def test_a_choice_is_finished_early(model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        params = SamplingParams(n=3, seed=1, max_tokens=100, ignore_eos=True)
        with pytest.raises(ValueError, match="has not begun"):
            RequestStream(llm, Request("new", prompt(5), params), lambda *news: None).finish(0)
        stream = await llm.submit(Request("r", prompt(5), params))
        counts = [0, 0, 0]
        async for output in stream:
            counts[output.index] += 1
            if counts[1] == 3:
                stream.finish(1)
        assert counts[0] == counts[2] == 100
        assert 3 <= counts[1] < 100
        assert llm.stats().finished == {"length": 2, "stop": 1}
        await until(lambda: at_rest(llm))

        stream = await llm.submit(Request("r", prompt(5), params))
        async for output in stream:
            stream.finish(output.index)
        await until(lambda: at_rest(llm))
        assert llm.num_open == 0

    drive(work, model)


def test_who_does_not_read_holds_nobody_up_and_misses_nothing(model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        lazy = [await llm.submit(Request(f"lazy{i}", prompt(5, i), LONG)) for i in range(8)]
        eager = await answer(llm, Request("eager", prompt(5, 3), LONG))
        await until(lambda: at_rest(llm))
        assert llm.num_open == 0
        assert [output.new_tokens for output in await read(lazy[3])] == [output.new_tokens for output in eager]
        assert [len(await read(stream)) for stream in lazy] == [300, 300, 300, 0, 300, 300, 300, 300]

    drive(work, model)


def test_outputs_are_taken_as_they_come(model: Path) -> None:
    """However late they are read; what the taker ends, says and raises counts at once."""

    async def work(llm: AsyncLLM) -> None:
        counts = [0, 0]

        def take(stream: RequestStream[str], output: Output, now: float) -> str | None:
            assert now == stream.last_token_at
            counts[output.index] += 1
            if counts[output.index] == 4 + output.index:
                stream.finish(output.index)
            return f"{output.index}" if counts[output.index] != 2 else None

        lazy = await llm.submit(Request("r", prompt(5), replace(LONG, n=2)), take)
        await until(lambda: llm.num_open == 0)
        await until(lambda: at_rest(llm))
        assert counts == [4, 5]
        assert llm.stats().finished == {"stop": 2}
        assert sorted([item async for item in lazy]) == ["0"] * 3 + ["1"] * 4

        def refuse(stream: RequestStream[str], output: Output, now: float) -> str:
            if output.index:
                raise LookupError("no such thing")
            return "first"

        broken = await llm.submit(Request("r", prompt(5), replace(LONG, n=2)), refuse)
        await until(lambda: llm.num_open == 0)
        await until(lambda: at_rest(llm))
        assert await anext(broken) == "first"
        with pytest.raises(LookupError, match="no such thing"):
            await anext(broken)
        assert llm.stats().finished == {"stop": 2, "error": 2}

    drive(work, model)


def test_times_are_in_order(slow: None, model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        began = time.monotonic()
        first = await llm.submit(Request("first", prompt(30), SHORT))
        second = await llm.submit(Request("second", prompt(30, 1), SHORT))
        await asyncio.gather(read(first), read(second))
        for stream in (first, second):
            times = [began, stream.queued_at, stream.scheduled_at, stream.first_token_at, stream.last_token_at]
            assert times == sorted(times)
            assert stream.last_token_at < time.monotonic()
            assert stream.first_token_at - stream.scheduled_at >= 0.06  # the prompt takes four steps of 0.02 s
        assert second.scheduled_at >= first.last_token_at

    drive(work, model, EngineConfig(kv_cache_memory_bytes=1 << 20, max_num_seqs=1, max_num_batched_tokens=8))


# ── sessions and saves ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_session_is_its_tenants(model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        for i, tenant in enumerate(("a", "b", "b")):
            await answer(llm, Request(f"r{i}", prompt(9, i), SHORT, tenant=tenant, session_id="s"))
        await answer(llm, Request("none", prompt(9), SHORT, tenant="c"))
        assert [(one.tenant, one.num_requests) for one in await llm.sessions()] == [("a", 1), ("b", 2)]
        assert [one.tenant for one in await llm.sessions("b", 1)] == ["b"]
        assert await llm.sessions("c") == []
        assert (await llm.pin("a", "s", 100)).pinned_s > 90
        assert (await llm.session("a", "s")).pinned_s > 90
        assert (await llm.session("b", "s")).pinned_s == 0
        assert (await llm.demote_session("a", "s")).session_id == "s"
        assert sum((await llm.release_session("b", "s")).pages) > 0
        for tenant, name in (("b", "s"), ("a", "t"), ("", "s"), ("a", "\ud800")):
            for ask in (llm.session, llm.release_session, llm.demote_session, lambda *who: llm.pin(*who, 5)):
                with pytest.raises(UnknownSession):
                    await ask(tenant, name)
        with pytest.raises(ConfigError) as caught:
            await llm.save()
        assert caught.value.option == "kv_offload_dir"
        assert llm.num_open == 0

    drive(work, model)


def test_a_pin_ends_though_nobody_asks(model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        await answer(llm, Request("r", prompt(40), SHORT, session_id="s"))
        assert (await llm.pin("", "s", 1e300)).pinned_s > 1e299
        assert llm.stats().tiers.num_pinned[Tier.DEVICE] == llm.stats().pages_referenced > 0
        await llm.pin("", "s", 0.05)
        await until(lambda: at_rest(llm))
        assert llm.stats().tiers.num_pinned[Tier.DEVICE] == 0

    drive(work, model)


def test_many_ask_at_once_and_some_stop_waiting(slow: None, model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        stream = await llm.submit(Request("r", prompt(5), LONG, session_id="s"))
        await anext(stream)
        asked = [asyncio.create_task(llm.session("", "s") if i % 2 else llm.sessions()) for i in range(40)]
        await asyncio.sleep(0)
        for task in asked[::4]:
            task.cancel()
        for i, answered in enumerate(await asyncio.gather(*asked, return_exceptions=True)):
            if i % 4 == 0:
                assert isinstance(answered, asyncio.CancelledError)
            else:
                [one] = [answered] if i % 2 else answered
                assert (one.session_id, one.num_running, one.idle_s) == ("s", 1, 0)
        stream.abort()
        assert (await llm.session("", "s")).num_running == 0

    drive(work, model)


def test_who_asks_during_a_save_is_told_of_its_end(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_llm, "PROGRAM", saving_engine.__name__)
    pages = saving_engine.PAGES

    async def work(llm: AsyncLLM) -> None:
        first = asyncio.create_task(llm.save())
        gone = asyncio.create_task(llm.save())
        beside = await answer(llm, Request("r", prompt(9), SHORT))  # requests go on
        assert len(beside) == 5
        gone.cancel()
        second = asyncio.create_task(llm.save())
        assert await llm.sessions() == []
        assert not first.done()
        one, two = await asyncio.gather(first, second)
        assert (one.pages, one.failed) == (two.pages, two.failed) == (pages - 1, 1)  # one save for all of them
        assert one.seconds == two.seconds > 0
        assert (await llm.save()).failed == 2
        last = asyncio.create_task(llm.save())
        await asyncio.sleep(0)
        assert await llm.drain(30) == 0
        assert last.done()
        assert last.result().failed == 3
        with pytest.raises(EngineDead, match="shutting down"):
            await llm.save()

    drive(work, model)


def test_a_save_that_outlasts_the_drain_is_told_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_llm, "PROGRAM", saving_engine.__name__)

    async def work(llm: AsyncLLM) -> None:
        saving = asyncio.create_task(llm.save())
        await asyncio.sleep(0)
        await llm.drain(0)
        with pytest.raises(EngineDead, match="took too long"):
            await saving

    drive(work, model)


# ── the death of engines ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("poison", "cause"),
    [
        (faulty_engine.EXIT, f"ended with code {faulty_engine.EXIT_CODE}"),
        (faulty_engine.SEGFAULT, "killed by signal 11"),
    ],
)
def test_a_crash_is_told_to_all_and_mended_once(
    faulty: None, model: Path, caplog: pytest.LogCaptureFixture, poison: int, cause: str
) -> None:
    fatal: list[str] = []

    async def work(llm: AsyncLLM) -> None:
        right = await answer(llm, Request("before", prompt(9), SHORT))
        generated = llm.stats().scheduler.generation_tokens
        pids = [pid_of(llm)]
        streams = [await llm.submit(Request(f"r{i}", prompt(5, i), LONG)) for i in range(3)]
        seen = [await anext(stream) for stream in streams]
        poisoned = await llm.submit(Request("poison", [poison, 5, 6], SHORT))
        for stream in (poisoned, *streams):
            with pytest.raises(EngineDead, match=cause):
                seen += await read(stream)
        assert llm.num_open == 0
        assert cause in caplog.text
        assert not llm.healthy
        assert fatal == []

        again = await answer(llm, Request("after", prompt(9), SHORT))  # waits for the new engine
        assert [output.new_tokens for output in again] == [output.new_tokens for output in right]
        assert llm.healthy
        assert llm.num_restarts == 1
        await until(lambda: at_rest(llm))
        assert llm.stats().scheduler.generation_tokens >= generated + 3 + 5  # counters do not go back
        assert llm.stats().finished == {"length": 10 // 5, "error": 4}
        pids.append(pid_of(llm))

        with pytest.raises(EngineDead, match=cause):
            await answer(llm, Request("poison", [poison], SHORT))
        await until(lambda: bool(fatal))
        assert len(fatal) == 1
        assert cause in fatal[0]
        assert not llm.healthy
        with pytest.raises(EngineDead, match="dead"):
            await llm.submit(Request("late", prompt(9), SHORT))
        assert all(pid_is_gone(pid) for pid in pids)

    drive(work, model, on_fatal=fatal.append)


@pytest.mark.parametrize("alone", [False, True])
def test_what_only_one_request_breaks_ends_only_that(
    faulty: None, model: Path, caplog: pytest.LogCaptureFixture, alone: bool
) -> None:
    async def work(llm: AsyncLLM) -> None:
        params = SamplingParams(n=2, seed=3, temperature=1, max_tokens=300, ignore_eos=True)
        asked = [] if alone else [Request(f"r{i}", prompt(5, i), params) for i in range(3)]
        right = [await answer(llm, request) for request in asked]
        streams = [await llm.submit(request) for request in asked]
        for _ in range(2):
            with pytest.raises(RequestFailed, match=f"RuntimeError: {faulty_engine.CAUSE}"):
                await answer(llm, Request("poison", [faulty_engine.RAISE, 5, 6], LONG))
        for stream, expected in zip(streams, right, strict=True):
            assert tokens(await read(stream)) == tokens(expected)
        assert (llm.num_open, llm.num_restarts) == (0, 0)
        assert "break_or_execute" in caplog.text  # the trace
        assert len(await answer(llm, Request("poison", prompt(3), SHORT))) == 5
        await until(lambda: at_rest(llm))
        assert llm.stats().finished["error"] == 2

    drive(work, model)


def test_an_engine_that_can_compute_nothing_crashes(
    faulty: None, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(llm: AsyncLLM) -> None:
        for error in (RequestFailed, RequestFailed, EngineDead):
            with pytest.raises(error, match=f"RuntimeError: {faulty_engine.CAUSE}"):
                await answer(llm, Request("r", [faulty_engine.BREAK, 5], SHORT))
        assert caplog.records[-1].message.endswith(f"RuntimeError: {faulty_engine.CAUSE}")
        assert len(await answer(llm, Request("after", prompt(9), SHORT))) == 5
        assert llm.num_restarts == 1

    drive(work, model)


def test_an_engine_that_hangs_is_as_one_that_died(
    faulty: None, model: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async def work(llm: AsyncLLM) -> None:
        await asyncio.sleep(1.2)  # without work it may be as silent as it likes
        assert llm.num_restarts == 0
        beside = await llm.submit(Request("beside", prompt(5), LONG))
        hung = await llm.submit(Request("hung", [faulty_engine.HANG, 5, 6], SHORT))
        for stream in (hung, beside):
            with pytest.raises(EngineDead, match="no step ended within 1 s"):
                await read(stream)
        assert "no step ended" in caplog.text
        assert len(await answer(llm, Request("after", prompt(9), SHORT))) == 5
        assert llm.num_restarts == 1

    drive(work, model, step_timeout=1.0)
    assert "break_or_execute" in capfd.readouterr().err  # where it was


def test_questions_end_with_the_engine_and_are_put_to_the_next(
    faulty: None, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def work(llm: AsyncLLM) -> None:
        await answer(llm, Request("r", prompt(5), SHORT, session_id="s"))
        hung = await llm.submit(Request("hung", [faulty_engine.HANG, 5, 6], SHORT))
        asked = [asyncio.create_task(ask) for ask in (llm.sessions(), llm.session("", "s"), llm.save())]
        for waiting in (read(hung), *asked):
            with pytest.raises(EngineDead, match="no step ended within 1 s"):
                await waiting
        assert await llm.sessions() == []  # waits for the new engine, which knows none
        with pytest.raises(UnknownSession):
            await llm.session("", "s")

        os.kill(pid_of(llm), signal.SIGSTOP)
        with pytest.raises(EngineDead, match="no step ended within 1 s"):
            await llm.sessions()
        with pytest.raises(EngineDead, match="the engine is dead"):
            await llm.sessions()

    drive(work, model, step_timeout=1.0)


def test_a_long_answer_is_no_hang(slow: None, model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        assert len(await answer(llm, Request("r", prompt(5), LONG))) == 300
        assert llm.num_restarts == 0

    drive(work, model, step_timeout=1.0)


def test_an_engine_that_cannot_be_started_again_is_fatal(
    faulty: None, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fatal: list[str] = []

    async def work(llm: AsyncLLM) -> None:
        monkeypatch.setattr(async_llm, "PROGRAM", "tests.engine.no_such_module")
        with pytest.raises(EngineDead):
            await answer(llm, Request("poison", [faulty_engine.EXIT], SHORT))
        with pytest.raises(EngineDead, match="could not be started again"):
            await llm.submit(Request("next", prompt(3), SHORT))
        assert len(fatal) == 1

    drive(work, model, on_fatal=fatal.append)


PARENT = """
import asyncio, sys
from pathlib import Path
from octavo.engine import async_llm
from tests.engine.test_async_llm import CONFIG, LONG, Request

async def main():
    async_llm.PROGRAM = "tests.engine.faulty_engine"
    llm = await async_llm.AsyncLLM.start(Path(sys.argv[1]), CONFIG)
    if sys.argv[2] == "computing":
        await llm.submit(Request("r", [4, 5], LONG))  # HANG: a step that takes ten minutes
    print(llm._child._process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture(params=["idle", "computing"])
def parent(request: pytest.FixtureRequest, model: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process with an engine, and the engine's pid."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PARENT, str(model), request.param]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        yield process, pid
        process.kill()
        if not pid_is_gone(pid):
            os.kill(pid, signal.SIGKILL)


def test_an_engine_does_not_outlive_its_parent(parent: tuple[subprocess.Popen[str], int]) -> None:
    process, pid = parent
    assert not pid_is_gone(pid)
    process.kill()
    process.wait()
    asyncio.run(until(lambda: pid_is_gone(pid)))


def children() -> set[int]:
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def test_a_start_that_is_given_up_leaves_nothing(model: Path) -> None:
    async def main() -> None:
        before = children()
        starting = asyncio.create_task(AsyncLLM.start(model, CONFIG))
        await until(lambda: children() > before)
        new = children() - before
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert all(pid_is_gone(pid) for pid in new)

    asyncio.run(main())


def test_closing_ends_a_restart(faulty: None, model: Path) -> None:
    async def main() -> None:
        before = children()
        llm = await AsyncLLM.start(model, CONFIG)
        with pytest.raises(EngineDead):
            await answer(llm, Request("poison", [faulty_engine.EXIT], SHORT))
        waiting = asyncio.create_task(llm.submit(Request("r", prompt(5), SHORT)))
        await until(lambda: children() > before)
        await llm.close()
        assert children() == before
        with pytest.raises(EngineDead, match="closed"):
            await waiting

    asyncio.run(main())


def test_signals_meant_for_the_service_are_left_to_the_parent(model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        stream = await llm.submit(Request("r", prompt(5), LONG))
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid_of(llm), number)
        assert len(await read(stream)) == 300
        assert llm.num_restarts == 0

    drive(work, model)


# ── shutting down, and rest ──────────────────────────────────────────────────────────────────────────────────────


def test_draining_lets_what_runs_finish_and_cuts_what_takes_too_long(slow: None, model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        short = await llm.submit(Request("short", prompt(5), SHORT))
        long = await llm.submit(Request("long", prompt(5), LONG))
        draining = asyncio.create_task(llm.drain(2.0))
        await asyncio.sleep(0)
        assert not llm.healthy
        with pytest.raises(EngineDead, match="shutting down"):
            await llm.submit(Request("late", prompt(5), SHORT))
        assert len(await read(short)) == 5
        assert await draining == 1
        assert isinstance(await anext(long), Output)  # what came in time is not lost
        with pytest.raises(EngineDead, match="took too long"):
            await read(long)
        await until(lambda: at_rest(llm))
        assert await llm.drain(0) == 0

    drive(work, model)


def test_closing_fails_what_is_open(model: Path) -> None:
    async def main() -> None:
        llm = await AsyncLLM.start(model, CONFIG)
        stream = await llm.submit(Request("r", prompt(5), LONG))
        reading = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        await llm.close()
        with pytest.raises(EngineDead, match="closed"):
            await reading
        with pytest.raises(EngineDead, match="closed"):
            await llm.submit(Request("r", prompt(5), LONG))
        await llm.close()
        assert llm._child._process.returncode == 0  # its audit found every page

    asyncio.run(main())


def test_an_idle_engine_takes_no_time(model: Path) -> None:
    def ticks(llm: AsyncLLM) -> int:
        fields = Path(f"/proc/{pid_of(llm)}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    async def work(llm: AsyncLLM) -> None:
        await answer(llm, Request("r", prompt(5), SHORT))
        await until(lambda: at_rest(llm))
        await asyncio.sleep(0.1)
        before = ticks(llm)
        await asyncio.sleep(0.5)
        assert ticks(llm) - before <= 1  # of 50

    drive(work, model)


def test_the_engines_log_is_the_parents(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work(llm: AsyncLLM) -> None:
        assert llm.max_model_len < 512

    drive(work, model, EngineConfig(kv_cache_memory_bytes=1 << 16))
    [record] = [record for record in caplog.records if record.name == "octavo.engine.sizing"]
    assert record.levelno == logging.WARNING
    assert "max_model_len is" in record.getMessage()
