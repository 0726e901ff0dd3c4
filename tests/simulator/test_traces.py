"""Trace files become requests: their times and lengths, and tokens that are equal where the trace says so."""

from __future__ import annotations

import gzip
import json
import math
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from octavo.errors import InvalidRequest
from octavo.simulator.traces import BLOCK_TOKENS, Arrival, arrivals_of, kind_of, own_token, paced, read, tokens_of

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE = f"""{HEAD.strip()}
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,0,0
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
    {"timestamp": 1500, "input_length": 1030, "output_length": 6, "hash_ids": [7, 8, 11]},
    {"timestamp": 1500, "input_length": 20, "output_length": 1, "hash_ids": [0]},
]
SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "x" * 40},
            {"from": "gpt", "value": "y" * 80},
            {"from": "human", "value": "z" * 20},
            {"from": "gpt", "value": "…" * 8},
        ],
    },
    {"id": "b", "conversations": [{"from": "gpt", "value": "no question"}]},
    {"id": "c", "messages": [{"role": "user", "content": "12345678"}, {"role": "assistant", "content": ""}]},
]


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_azure(tmp_path: Path) -> None:
    first, second, third = read(write(tmp_path, AZURE))
    assert [first.at, second.at, third.at] == pytest.approx([0, 4.314579, 4.541877])
    assert [(len(one.prompt), one.num_output) for one in (first, second, third)] == [(374, 44), (396, 109), (1, 1)]
    assert first.prompt[0] != second.prompt[0] and first.prompt[1:] == second.prompt[1:374]


def test_the_parts_of_mooncake_prompts_are_equal_where_their_hashes_are(tmp_path: Path) -> None:
    first, second, third = read(write(tmp_path, "\n".join(map(json.dumps, MOONCAKE))))
    assert [one.at for one in (first, second, third)] == [0, 1.5, 1.5]
    assert list(map(len, (first.prompt, second.prompt, third.prompt))) == [1100, 1030, 20]
    assert first.prompt[: 2 * BLOCK_TOKENS] == second.prompt[: 2 * BLOCK_TOKENS]
    assert first.prompt[2 * BLOCK_TOKENS] != second.prompt[2 * BLOCK_TOKENS]
    assert first.prompt[0] != first.prompt[BLOCK_TOKENS]
    assert third.prompt[0] == own_token(0) and len({one.seed for one in (first, second, third)}) == 3


@pytest.mark.parametrize("lines", [False, True])
def test_a_turn_of_a_conversation_follows_all_before_it(tmp_path: Path, lines: bool) -> None:
    text = "\n".join(map(json.dumps, SHAREGPT)) if lines else json.dumps(SHAREGPT, indent=1)
    first, second, third = read(write(tmp_path, text))
    assert [len(one.prompt) for one in (first, second, third)] == [10, 35, 2]
    assert [one.num_output for one in (first, second, third)] == [20, 2, 1]
    answer = [first.seed + position for position in range(10, 30)]
    assert second.prompt[:30].tolist() == [*first.prompt, *answer]
    [half, *_] = read(tmp_path / "trace", chars_per_token=8)
    assert len(half.prompt) == 5


def test_objects_may_be_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    long = {"conversations": [{"from": "human", "value": "x" * (3 << 20)}, {"from": "gpt", "value": "y"}]}
    assert [len(one.prompt) for one in read(write(tmp_path, json.dumps([long, *SHAREGPT])))] == [786432, 10, 35, 2]


def test_runs_of_tokens_differ_in_the_first_one_only() -> None:
    assert len({own_token(run) for run in range(100_000)}) == 100_000
    for count in (0, 1, 2, 15, 16, 17, 1000):
        tokens = tokens_of(3, count)
        assert len(tokens) == count and tokens[1:].tolist() == list(range(1, count))
    assert tokens_of(3, 8)[0] == own_token(3) != tokens_of(4, 8)[0]


def test_a_rate_replaces_the_times() -> None:
    arrivals = list(arrivals_of([([5, 6], 3)] * 5000))
    assert {arrival.at for arrival in arrivals} == {0.0}
    times = [arrival.at for arrival in paced(arrivals, 4.0, seed=1)]
    gaps = [after - before for before, after in pairwise(times)]
    assert times == sorted(times) and statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert times == [arrival.at for arrival in paced(arrivals, 4.0, seed=1)]
    assert next(iter(paced([Arrival(9.0, tokens_of(1, 1), 1, 0)], 0.0, seed=1))).at == 0.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        (HEAD, "holds no request"),
        ("a,b\n1,2\n", "begins no trace that is known"),
        (HEAD + "2023-11-16 18:15:46,many,3\n", "of this kind, after 0 .*: ValueError"),
        (HEAD + "2023-11-16 18:15:46,-3,3\n", "-3.0 is not a number of tokens"),
        (HEAD + "2023-11-16 18:15:46,99999999999,3\n", "from 0 to 16,777,216"),
        (AZURE + "2023-11-16 18:15:52+00:00,3,3\n", "after 3 requests: TypeError"),
        (json.dumps(MOONCAKE[0] | {"timestamp": math.nan}), "nan is no time"),
        (json.dumps(MOONCAKE[0] | {"timestamp": math.inf}), "inf is no time"),
        (json.dumps(MOONCAKE[2] | {"input_length": 5.5}), "5.5 is not a number of tokens"),
        (json.dumps(MOONCAKE[2] | {"output_length": math.inf}), "inf is not a number of tokens"),
        (json.dumps(MOONCAKE[2] | {"input_length": True}), "True is not a number of tokens"),
        (json.dumps(MOONCAKE[0]) + "\n7", "'7' is no JSON object"),
        (HEAD + "9" * 200_000, "field larger than field limit"),
        (AZURE + "2023-11-16 18:15:40.0000000,3,3\n", r"request 4 comes 11\.2225 s before the one above it"),
        (json.dumps(MOONCAKE[0] | {"hash_ids": [1]}), "request 1 names 1 parts for 1100 tokens"),
        ('{"timestamp": 0, "input_length": 3}', "KeyError: 'output_length'"),
        ('[{"conversations": [}', "is not JSON"),
        ('[{"conversations": [{"from": "gpt"}]}]', "KeyError: 'content'"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        list(read(write(tmp_path, text)))


@pytest.mark.parametrize("how", ["crlf", "bom", "blank lines", "gz", "floats", "spaces"])
def test_files_as_people_have_them(tmp_path: Path, how: str) -> None:
    text = {
        "crlf": AZURE.replace("\n", "\r\n"),
        "bom": "\ufeff" + AZURE,
        "blank lines": AZURE.replace("\n", "\n\n  \n"),
        "floats": AZURE.replace(",374,44", ",374.0,44.0"),
        "spaces": AZURE.replace(",", ", "),
    }.get(how, AZURE)
    path = write(tmp_path, text)
    if how == "gz":
        path = tmp_path / "trace.csv.gz"
        path.write_bytes(gzip.compress(text.encode()))
        (tmp_path / "cut.gz").write_bytes(path.read_bytes()[:60])
        with pytest.raises(InvalidRequest, match=r"cut.gz cannot be read"):
            list(read(tmp_path / "cut.gz"))
    assert [(len(one.prompt), one.num_output) for one in read(path)] == [(374, 44), (396, 109), (1, 1)]


def test_mooncake_requests_may_be_a_list_and_begin_at_any_time(tmp_path: Path) -> None:
    later = [row | {"timestamp": row["timestamp"] + 5_000_000} for row in MOONCAKE]
    lines = list(read(write(tmp_path, "\n".join(map(json.dumps, MOONCAKE)))))
    assert list(read(write(tmp_path, json.dumps(later, indent=1)))) == lines


def test_texts_in_parts_and_calls_of_tools(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "x" * 40}, {"type": "image_url"}]
    said = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": []}]
    [one] = read(write(tmp_path, json.dumps([{"messages": said}])))
    assert (len(one.prompt), one.num_output) == (10, 1)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot be read: .*No such file"):
        next(read(tmp_path / "none"))


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("azure_2023_conv.csv", "azure", 19366),
        ("azure_2023_code.csv", "azure", 8819),
        ("mooncake_conversation.jsonl", "mooncake", 12031),
        ("mooncake_synthetic.jsonl", "mooncake", 3993),
    ],
)
def test_public_traces_are_read_whole(shared: Path, name: str, kind: str, count: int) -> None:
    path = shared / "traces" / name
    assert kind_of(path.read_text()[:4096]) == kind
    assert sum(1 for _ in read(path)) == count
