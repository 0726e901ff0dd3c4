"""What a running server's metrics say after known requests, and `octavo chat --url` talking to it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tests.server.serving import Served, until

from octavo import LLM, SamplingParams


def counts(served: Served) -> dict[str, float]:
    """Counters and histograms' counts and sums, by name and what tells them apart."""
    found = {}
    for family in text_string_to_metric_families(served.http.get("/metrics").text):
        for sample in family.samples:
            own = "".join(f"[{text}]" for name, text in sample.labels.items() if name in ("finished_reason", "code"))
            if sample.name.startswith("octavo:") and sample.name.endswith(("_total", "_count", "_sum")):
                found[sample.name.removeprefix("octavo:") + own] = sample.value
    return found


def change(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}


def test_a_request_is_counted_once(served: Served) -> None:
    prompt = [3000 + i for i in range(40)]
    before = counts(served)
    served.complete(prompt, max_tokens=5, ignore_eos=True)
    seen = change(before, counts(served))
    expected: dict[str, Any] = {
        "prompt_tokens_total": 40,
        "generation_tokens_total": 5,
        "prefix_cache_queries_total": 40,
        "request_success_total[length]": 1,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 4,
        "request_time_per_output_token_seconds_count": 1,
        "e2e_request_latency_seconds_count": 1,
        "request_queue_time_seconds_count": 1,
        "request_prefill_time_seconds_count": 1,
        "request_decode_time_seconds_count": 1,
        "request_prompt_tokens_sum": 40,
        "request_generation_tokens_sum": 5,
        "request_params_n_sum": 1,
        "request_params_max_tokens_sum": 5,
        "iteration_tokens_total_count": 5,
        "iteration_tokens_total_sum": 44,
    }
    assert {name: seen.get(name) for name in expected} == expected
    parts = ("request_queue_time_seconds_sum", "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum")
    assert abs(sum(seen.get(part, 0) for part in parts) - seen["e2e_request_latency_seconds_sum"]) < 1e-6
    assert "prefix_cache_hits_total" not in seen

    again = counts(served)
    served.complete(prompt, max_tokens=1, n=2, temperature=1, ignore_eos=True)
    seen = change(again, counts(served))
    assert seen["prefix_cache_hits_total"] == 32  # the two pages that it filled
    assert seen["prompt_tokens_total"] == 40
    assert seen["request_success_total[length]"] == seen["time_to_first_token_seconds_count"] == 2
    assert "inter_token_latency_seconds_count" not in seen


def test_ends_are_counted_by_reason_and_replies_by_code(served: Served) -> None:
    text = served.complete("One two three four", max_tokens=20, ignore_eos=True)["choices"][0]["text"]
    before = counts(served)
    served.complete("One two three four", max_tokens=20, ignore_eos=True, stop=text[8:12])
    served.refused("/v1/completions", prompt="x", temperature=-1)
    served.raw(b'{"prompt": "One", "max_tokens": 400, "ignore_eos": true}').close()
    until(lambda: change(before, counts(served)).get("request_success_total[abort]") == 1)
    seen = change(before, counts(served))
    assert seen["request_success_total[stop]"] == 1
    assert seen["http_responses_total[400]"] == 1
    assert "request_success_total[error]" not in seen


def test_chat_talks_to_it_as_to_a_model_of_its_own(served: Served, llm: LLM) -> None:
    turns, messages, expected = ("Name a colour.", "Another one!"), [], ""
    params = SamplingParams(temperature=0.0, max_tokens=12)
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        answer = llm.chat(messages, params)[0].outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        expected += answer + "\n"
    before = counts(served)
    options = ["--temperature", "0", "--top-p", "1", "--max-tokens", "12"]
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "chat", "--url", served.url, *options],
        input="\n".join(turns),
        capture_output=True,
        text=True,
        env={**os.environ, "OPENAI_API_KEY": ""},
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")
    assert change(before, counts(served))["prefix_cache_hits_total"] >= 16  # the second turn finds the first


def test_a_request_is_seen_while_its_only_step_is_computed(served: Served) -> None:
    seen = False
    for attempt in range(100):  # the step may be over before anybody looks
        prompt = [100 + attempt * 120 + i for i in range(120)]
        sock = served.raw(json.dumps({"prompt": prompt, "max_tokens": 1}).encode())
        while not seen and not select.select([sock], [], [], 0)[0]:
            seen = served.metric("num_requests_running") == 1 and served.metric("kv_pages", state="referenced") == 8
        assert sock.recv(12) == b"HTTP/1.1 200"
        sock.close()
        if seen:
            break
    assert seen
