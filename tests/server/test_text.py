"""A stream joins to the whole reply, and both are what the library says offline, whatever runs beside them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from tests.server.serving import Served

from octavo import LLM, SamplingParams

PATH = "/v1/completions"
KOREAN = "안녕하세요, 제 이름은 김민수입니다. 저는 한국에서"
THAI = "สวัสดีครับ ผมชื่อสมชาย"
EMOJI = "🙂🚀🎉 👩‍👩‍👧 🙂🚀🎉 👩‍👩‍👧 🙂🚀"
CODE = "def main():\n    for i in range(10):\n        print("


async def stream(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, list[str], str]:
    """(text, pieces, finish_reason)"""
    pieces, reason = [], ""
    async with http.stream("POST", PATH, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                pieces.append(choice["text"])
                reason = choice["finish_reason"] or reason
    return "".join(pieces), pieces, reason


async def whole(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, list[str], str]:
    reply = await http.post(PATH, json=body)
    assert reply.status_code == 200
    choice = reply.json()["choices"][0]
    return choice["text"], [choice["text"]], choice["finish_reason"]


def test_streams_whole_replies_and_the_library_say_the_same(served: Served, llm: LLM) -> None:
    prompts = [KOREAN, THAI, EMOJI, CODE]
    settings: list[dict[str, Any]] = [{"temperature": 0, "max_tokens": 24}, {"seed": 5, "max_tokens": 17}]
    expected = {
        (i, prompt): output.outputs[0]
        for i, setting in enumerate(settings)
        for prompt, output in zip(prompts, llm.generate(prompts, SamplingParams(**setting)), strict=True)
    }

    async def main() -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=60, limits=httpx.Limits(max_connections=40)) as http:
            jobs = [
                (ask(http, {"prompt": prompt, **settings[i]}), choice)
                for (i, prompt), choice in expected.items()
                for ask in (stream, whole, stream)
            ]
            results = await asyncio.gather(*(job for job, _ in jobs))
        for (text, pieces, reason), (_, choice) in zip(results, jobs, strict=True):
            assert text == choice.text
            assert reason == choice.finish_reason
            assert "\ufffd" not in "".join(pieces[:-1])  # only a character that is cut off at the end shows as one

    asyncio.run(main())


def test_half_a_character_in_the_prompt(served: Served, llm: LLM) -> None:
    """The answer begins with the rest of the character, and never with the prompt's text."""
    token_bytes = llm.tokenizer.token_bytes
    ids = llm.tokenizer.encode("The Japanese flag is 日")
    cut = next(n for n in range(len(ids), 0, -1) if not _decodes(b"".join(map(token_bytes, ids[:n]))))
    rest = b"".join(map(token_bytes, ids[cut:]))
    assert rest
    bias = {str(ids[cut]): 100}
    for echo in (False, True):
        body = {"prompt": ids[:cut], "max_tokens": 1, "logit_bias": bias, "echo": echo}
        text = served.complete(**body)["choices"][0]["text"]
        assert "".join(event["choices"][0]["text"] for event in served.events(PATH, **body)) == text
        assert text.endswith("日") if len(ids) == cut + 1 else "日" not in text
        assert text.startswith("The Japanese") == echo


def _decodes(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("length", range(1, 7))
def test_an_answer_cut_inside_a_character_ends_once(served: Served, llm: LLM, length: int) -> None:
    """At any length: the stream is the whole, a cut-off character is one U+FFFD at the very end."""
    thai = llm.tokenizer.encode(THAI)
    bias = {str(token): 100 for token in thai[:1]}  # the first half of Thai characters, again and again
    body = {"prompt": THAI, "max_tokens": length, "logit_bias": bias if length == 1 else None}
    [output] = llm.generate(
        THAI,
        SamplingParams(temperature=0, max_tokens=length, logit_bias={thai[0]: 100.0} if length == 1 else None),
    )
    text = served.complete(**body)["choices"][0]["text"]
    assert text == output.outputs[0].text
    pieces = [event["choices"][0]["text"] for event in served.events(PATH, **body)]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces[:-1])
    if length == 1:
        assert text == "\ufffd"
