"""Public trace formats, read line by line: when a request comes, which tokens it brings, how many it is answered.

Traces tell lengths, at most which parts of prompts are equal, and never a token. So tokens are made up, in runs: one
number that is the own one of the run, then 1, 2, 3, … Pages are equal only after equal ones, so that tells runs apart.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

from octavo.errors import InvalidRequest

MAX_TOKENS = 1 << 30
VOCAB_SIZE = 2 * MAX_TOKENS - 1
"""No made-up token is above it: a run has less than MAX_TOKENS tokens, and there are as many runs."""
LONGEST = 1 << 24
"""Tokens of a prompt or an answer that a trace may tell: beyond any model's context, and soon made up."""
BLOCK_TOKENS = 512
"""Tokens that a hash of a Mooncake trace stands for."""
_SPREAD = 0x2545F491  # odd, so that no two of 2^30 runs get the same number


class Arrival(NamedTuple):
    """A request: when it comes, in seconds from the first; its prompt; the tokens of its answer, `seed` + position."""

    at: float
    prompt: array[int]
    num_output: int
    seed: int


def own_token(run: int) -> int:
    """What the run of this number begins with."""
    return run * _SPREAD % MAX_TOKENS


def tokens_of(run: int, count: int) -> array[int]:
    """The first tokens of a run."""
    tokens = _numbers(count.bit_length())[:count]  # a copy of memory
    if count > 0:
        tokens[0] = own_token(run)
    return tokens


def numbers(start: int, stop: int) -> Iterable[int]:
    """Those from `start` on, and below `stop`; copied where they are small."""
    if stop >> 20:
        return range(start, stop)
    return _numbers(stop.bit_length())[start:stop]


@cache
def _numbers(bits: int) -> array[int]:
    return array("i", range(1 << bits))


def read(path: Path, kind: str | None = None, *, chars_per_token: float = 4.0) -> Iterator[Arrival]:
    """The requests of a trace file, in order of time; `kind` is one of READERS, None tells it by the first line.

    A name that ends in .gz is that of a compressed file. Where there are only texts, a token has so many characters.
    Raises InvalidRequest("trace").
    """
    opened: Any = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opened(path, "rt", encoding="utf-8-sig") as file:
            first = file.read(4096)
            file.seek(0)
            arrivals = READERS[kind or kind_of(first)](file, chars_per_token)
            for arrival in _in_order(arrivals):
                number += 1
                yield arrival
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InvalidRequest("trace", f"{path} cannot be read: {error}") from error
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError, csv.Error) as error:
        if isinstance(error, InvalidRequest):
            raise
        what = f"{type(error).__name__}: {error}"
        raise InvalidRequest(
            "trace", f"{path} is not a trace of this kind, after {number:,} requests: {what}"
        ) from error
    if not number:
        raise InvalidRequest("trace", f"{path} holds no request")


def arrivals_of(work: Iterable[tuple[Sequence[int], int]]) -> Iterator[Arrival]:
    """Requests of given tokens and lengths of answers, all at once."""
    for number, (prompt, num_output) in enumerate(work):
        yield Arrival(0.0, array("i", prompt), num_output, own_token(number))


def kind_of(first: str) -> str:
    """The kind of a trace, by its beginning."""
    line = first.lstrip().partition("\n")[0]
    if not line:
        raise InvalidRequest("trace", "the file is empty")
    if "ContextTokens" in line:
        return "azure"
    if '"hash_ids"' in first or '"input_length"' in first:
        return "mooncake"
    if '"conversations"' in first or '"messages"' in first:
        return "sharegpt"
    raise InvalidRequest("trace", f"{line[:60]!r} begins no trace that is known: name its --kind")


def paced(arrivals: Iterable[Arrival], rate: float, seed: int) -> Iterator[Arrival]:
    """The same requests as independent people send them: `rate` a second on average; 0 is all at once."""
    for arrival, at in zip(arrivals, times_at(rate, seed), strict=False):
        yield arrival._replace(at=at)


def times_at(rate: float, seed: int) -> Iterator[float]:
    """The times of a Poisson process, the first at 0; all 0 for a rate of 0."""
    chance, now = random.Random(seed), 0.0
    while True:
        yield now
        now += chance.expovariate(rate) if rate else 0.0


def _in_order(arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
    before = 0.0
    for number, arrival in enumerate(arrivals, 1):
        if arrival.at < before:
            raise InvalidRequest("trace", f"request {number} comes {before - arrival.at:g} s before the one above it")
        before = arrival.at
        yield arrival


# ── formats ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _azure(file: IO[str], chars_per_token: float) -> Iterator[Arrival]:
    """TIMESTAMP,ContextTokens,GeneratedTokens: no two prompts have anything in common."""
    began: datetime | None = None
    rows = csv.reader(file, skipinitialspace=True)
    names = next(rows, [])
    at, context, generated = (names.index(name) for name in ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
    for number, row in enumerate(row for row in rows if any(map(str.strip, row))):
        time = datetime.fromisoformat(row[at])
        began = began or time
        prompt = tokens_of(number, _length(float(row[context])))
        yield Arrival((time - began).total_seconds(), prompt, _length(float(row[generated])), 0)


def _mooncake(file: IO[str], chars_per_token: float) -> Iterator[Arrival]:
    """JSON objects. `hash_ids` name the prompt's parts of 512 tokens: equal ids are equal tokens.

    The numbers of answers' runs are odd, those of parts even.
    """
    began = None
    for number, row in enumerate(_objects(file)):
        time = row["timestamp"]
        if not math.isfinite(time):
            raise ValueError(f"{time} is no time")
        began = time if began is None else began
        num_prompt, parts = _length(row["input_length"]), row.get("hash_ids")
        answer = 2 * number + 1
        if parts is None:
            prompt = tokens_of(answer, num_prompt)
        else:
            prompt = array("i")
            for part in parts:
                prompt += tokens_of(2 * part, min(BLOCK_TOKENS, num_prompt - len(prompt)))
            if len(prompt) < num_prompt:
                raise InvalidRequest("trace", f"request {number + 1} names {len(parts)} parts for {num_prompt} tokens")
        yield Arrival((time - began) / 1000, prompt, _length(row["output_length"]), own_token(answer))


def _sharegpt(file: IO[str], chars_per_token: float) -> Iterator[Arrival]:
    """Conversations, in a JSON list or one a line; each of the model's turns is a request for it after all before.

    There are no times: all come at once. A conversation is one run of tokens, so that a turn begins with the one before
    and its answer.
    """
    for number, conversation in enumerate(_objects(file)):
        length = 0
        for turn in conversation.get("conversations") or conversation.get("messages") or ():
            text = turn["value"] if "value" in turn else turn["content"]
            if not isinstance(text, str):  # parts, of which some are texts; nothing beside a call of tools
                text = "".join(part.get("text") or "" for part in text or ())
            count = max(round(len(text) / chars_per_token), 1)
            if length and (turn.get("from") or turn.get("role")) in ("gpt", "chatgpt", "bing", "bard", "assistant"):
                yield Arrival(0.0, tokens_of(number, length), count, 0)
            length += count


def _objects(file: IO[str]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON list, or those that follow each other, without reading all of the file at once."""
    decode, text = json.JSONDecoder().raw_decode, ""
    while more := file.read(1 << 20):
        text += more
        at = 0
        while True:
            at += len(text[at : at + 64]) - len(text[at : at + 64].lstrip("[, \r\n\t"))
            try:
                value, at = decode(text, at)
            except json.JSONDecodeError:
                break
            if not isinstance(value, dict):
                raise ValueError(f"{str(value)[:40]!r} is no JSON object")
            yield value
        text = text[at:]
    if text.strip(", \r\n\t]"):
        raise ValueError(f"{text[:40]!r} is not JSON")


def _length(value: float) -> int:
    """A number of tokens; at least one, as requests that brought or got none are in traces too."""
    if isinstance(value, bool) or value != value // 1 or not 0 <= value <= LONGEST:
        raise ValueError(f"{value!r} is not a number of tokens from 0 to {LONGEST:,}")
    return max(int(value), 1)


READERS: dict[str, Callable[[IO[str], float], Iterator[Arrival]]] = {
    "azure": _azure,
    "mooncake": _mooncake,
    "sharegpt": _sharegpt,
}
