"""Loads any server with OpenAI's API and notes what it does: `octavo bench serve`.

Owns the sending, the turns of several servers and the record of a run; octavo.bench.loads says what is sent,
octavo.bench.figures what it comes to. While a run lasts, replies are only stamped: what they say is read after it, but
for a conversation's next turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import uvloop

from octavo.bench.figures import Outcome, Price, figures, summary
from octavo.bench.loads import VOCAB_SIZE, Load, Talk, at_rate, words
from octavo.bench.wire import DONE, Broken, Connection, Reply, series
from octavo.bench.workloads import WORKLOADS, Work
from octavo.client import SILENCE_S, Endpoint, message_of
from octavo.errors import OctavoError

SAMPLE_S = 0.5
"""Between two looks at a server's /metrics."""
OPTIONAL: list[dict[str, Any]] = [
    {"stream_options": {"include_usage": True}, "ignore_eos": True},
    {"stream_options": {"include_usage": True}},
    {},
]
"""What is asked for beyond the plainest API: the first that a server takes."""
WARM_UP_SEED, WARM_UP_TOKENS = 1_000_003, 32
BUSY = 0.8
LATE_MS = 50.0
"""From here on the client's own slowness is told."""
GAUGES = {"running": "num_requests_running", "waiting": "num_requests_waiting", "usage": "kv_cache_usage_perc"}
STATES = ("running", "cached", "free")

Tell = Callable[[str, int, int], None]
"""Hears what is being run, how many of its requests are answered, and of how many."""


@dataclass
class Target:
    """A server under load. `as_text`: prompts are words, not token ids; `extras`: further fields that it takes."""

    name: str
    endpoint: Endpoint
    model: str
    path: Literal["/v1/completions", "/v1/chat/completions"]
    as_text: bool
    vocab: int
    extras: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def find(
        cls,
        url: str,
        name: str | None,
        model: str | None,
        key: str | None,
        path: Any,
        as_text: bool,
        vocab: int | None,
        timeout_s: float = SILENCE_S,
    ) -> Target:
        """Ask the server for its model, and which tokens that knows. Raises OctavoError where none is told or given."""
        endpoint, told = Endpoint(url, key), list[dict[str, Any]]()
        try:
            told = endpoint.models(timeout_s)
        except OctavoError:
            if model is None:
                raise
        chosen = next((one for one in told if one["id"] == (model or one["id"])), {"id": model})
        meta = chosen.get("meta")
        vocab = vocab or (meta.get("n_vocab") if isinstance(meta, dict) else None) or VOCAB_SIZE
        return cls(name or endpoint.authority, endpoint, model or str(chosen["id"]), path, as_text, int(vocab))

    def body(self, said: Sequence[tuple[Work, str]], work: Work) -> bytes:
        """A request that continues what was said: turns and their answers."""
        request = {"model": self.model, "max_tokens": work.max_tokens, "temperature": 0, "stream": True, **self.extras}
        if self.path == "/v1/completions":
            if self.as_text:
                request["prompt"] = "".join(words(turn.prompt) + answer for turn, answer in [*said, (work, "")])
            else:
                request["prompt"] = work.prompt
        else:
            messages = []
            for turn, answer in said:
                messages.append({"role": "user", "content": words(turn.prompt)})
                messages.append({"role": "assistant", "content": answer})
            request["messages"] = [*messages, {"role": "user", "content": words(work.prompt)}]
        return msgspec.json.encode(request)


class Run:
    """One load on one server. After `go`, whole or cut short, `outcomes` and the rest are what was seen."""

    def __init__(self, target: Target, at_once: int | None, timeout_s: float, tell: Callable[[int], None]) -> None:
        self.whole = False
        self.seconds = self.client_share = self.late_s = 0.0
        self.timeline: dict[str, list[float]] = {}
        self._target, self._timeout_s, self._tell = target, timeout_s, tell
        self._path = target.endpoint.root + target.path
        self._places = asyncio.Semaphore(at_once) if at_once else None
        self._idle: list[Connection] = []
        self._raw: list[tuple[Work, float, Reply | None, str, str]] = []
        self._start = 0.0

    async def go(self, talks: Sequence[Talk]) -> None:
        bodies = [self._target.body([], talk.turns[0]) for talk in talks]  # not while the clock runs
        watch = asyncio.create_task(self._watch())
        await asyncio.sleep(0)
        self._start, before = time.perf_counter(), time.process_time()
        try:
            async with asyncio.TaskGroup() as group:
                for talk, body in zip(talks, bodies, strict=True):
                    group.create_task(self._talk(talk, body))
            self.whole = True
        finally:
            self.seconds = time.perf_counter() - self._start
            self.client_share = (time.process_time() - before) / self.seconds
            watch.cancel()
            for connection in self._idle:
                connection.close()
            with suppress(asyncio.CancelledError):
                await watch

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome(*one, since=self._start) for one in self._raw]

    async def _talk(self, talk: Talk, body: bytes) -> None:
        due = self._start + talk.at
        await asyncio.sleep(due - time.perf_counter() if talk.at else 0)
        if self._places is None:
            self.late_s = max(self.late_s, time.perf_counter() - due)
            await self._turns(talk, body)
        else:
            async with self._places:
                await self._turns(talk, body)

    async def _turns(self, talk: Talk, body: bytes) -> None:
        said: list[tuple[Work, str]] = []
        for work, pause in zip(talk.turns, talk.pauses, strict=True):
            if said:
                body = self._target.body(said, work)
                await asyncio.sleep(pause)
            await self._ask(work, body)
            if len(talk.turns) > 1:
                seen = outcome(*self._raw[-1], since=self._start)
                if seen.failure:
                    return
                said.append((work, seen.text))

    async def _ask(self, work: Work, body: bytes) -> None:
        sent, reply, failure, detail = time.perf_counter(), None, "", ""
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._send(body)
        except TimeoutError:
            failure, detail = "timed out", f"no end after {self._timeout_s:g} s"
        except Broken as error:
            failure, detail = "broken off", str(error)
        except OSError as error:
            failure, detail = "not reached", str(error)
        self._raw.append((work, sent, reply, failure, detail))
        self._tell(len(self._raw))

    async def _send(self, body: bytes) -> Reply:
        """A reply on a connection that is there, or on a new one; one that lay idle may have been closed meanwhile."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                try:
                    return await self._post(connection, body)
                except Broken:
                    if connection.reply.status:
                        raise
        return await self._post(await Connection.open(self._target.endpoint), body)

    async def _post(self, connection: Connection, body: bytes) -> Reply:
        whole = False
        try:
            reply = await connection.post(self._path, body)
            whole = True
            return reply
        finally:
            if whole and not connection.closed:
                self._idle.append(connection)
            else:
                connection.close()

    async def _watch(self) -> None:
        """Note what the server's metrics say, if it has any under the names of vLLM or ours."""
        with suppress(Broken, OSError, ValueError):
            connection = await Connection.open(self._target.endpoint)
            try:
                while True:
                    reply = await connection.get(self._target.endpoint.root + "/metrics")
                    found = series(reply.body) if reply.status == 200 else {}
                    if GAUGES["running"] not in found:
                        return
                    self._sample(found)
                    await asyncio.sleep(SAMPLE_S)
            finally:
                connection.close()

    def _sample(self, found: Mapping[str, float]) -> None:
        told = {name: found[full] for name, full in GAUGES.items() if full in found}
        told |= {
            f"{state}_bytes": found[f"kv_cache_bytes{{holder={state}}}"]
            for state in STATES
            if f"kv_cache_bytes{{holder={state}}}" in found
        }
        if "kv_slots{state=unused}" in found and "running_bytes" in told:
            unused, filled = found["kv_slots{state=unused}"], found["kv_slots{state=filled}"]
            told["empty_bytes"] = told["running_bytes"] * unused / max(unused + filled, 1)
        for name, value in {"at": time.perf_counter() - self._start, **told}.items():
            self.timeline.setdefault(name, []).append(value)


# ── what a reply says ────────────────────────────────────────────────────────────────────────────────────────────


def outcome(work: Work, sent: float, reply: Reply | None, failure: str, detail: str, *, since: float) -> Outcome:
    """What became of a request: a failure that was seen already, or what the reply's events say."""
    seen = _Seen()
    end = sent
    if reply is not None:
        try:
            failure, detail = seen.read(reply)
        except (msgspec.DecodeError, AttributeError, TypeError, ValueError, LookupError) as error:
            failure, detail = "unreadable", f"{type(error).__name__}: {error}"
        end = seen.end or sent
    return Outcome(
        sent - since,
        [at - since for at in seen.times],
        end - since,
        seen.num_prompt or len(work.prompt),
        seen.num_output or len(seen.times),
        work.max_tokens,
        failure,
        detail[:300],
        "".join(seen.texts),
    )


class _Seen:
    def __init__(self) -> None:
        self.times: list[float] = []
        self.texts: list[str] = []
        self.num_prompt = self.num_output = 0  # as far as the server counts them
        self.end = 0.0

    def read(self, reply: Reply) -> tuple[str, str]:
        """(failure, detail), both empty for an answer that is whole."""
        if reply.status != 200:
            return f"status {reply.status}", _said(reply.body)
        if b"event-stream" not in reply.content_type:
            return "no stream", f"the reply is {reply.content_type.decode(errors='replace') or 'of no type'}"
        ended = False
        for at, data in reply.data():
            if data == DONE:
                ended = True
                continue
            event = msgspec.json.decode(data)
            if event.get("error"):
                return "error in the stream", message_of(event)
            if usage := event.get("usage"):
                self.num_prompt, self.num_output = (
                    int(usage.get(f"{of}_tokens") or 0) for of in ("prompt", "completion")
                )
            for choice in event.get("choices") or ():
                self.end = at
                ended = bool(choice.get("finish_reason")) or ended
                text = _text(choice)
                if text is not None:
                    self.times.append(at)
                    self.texts.append(text)
        if not ended:
            return "broken off", "the stream ends before the answer does"
        if not self.times:
            return "no tokens", "the answer is empty"
        return "", ""


def _text(choice: Mapping[str, Any]) -> str | None:
    """The text of a token, which may be empty where it ends no character; None where an event brings no token."""
    delta = choice.get("delta")
    if delta is None:
        text, opening = choice.get("text"), False
    else:
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("content")
        opening = bool(delta.get("role")) and not text
    if text is not None and not isinstance(text, str):
        raise TypeError(f"a text is {type(text).__name__}")
    return None if text is None or (not text and (opening or choice.get("finish_reason"))) else text


def _said(body: bytes) -> str:
    with suppress(msgspec.DecodeError):
        return message_of(msgspec.json.decode(body))
    return body[:300].decode(errors="replace")


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Plan(msgspec.Struct):
    """What is run: a load at each of some rates (0 for all at once) and bounds, in rounds, on each server."""

    load: Load
    rates: list[float | None]
    bounds: list[int | None]
    rounds: int
    seed: int
    timeout_s: float
    num_warmups: int
    ignore_eos: bool
    goals: dict[str, float]
    price: Price | None

    @property
    def points(self) -> list[tuple[float | None, int | None]]:
        return [(rate, bound) for rate in self.rates for bound in self.bounds]

    def draw(self, number: int, rate: float | None, vocab: int) -> list[Talk]:
        """A run's requests. A rate of None keeps their times."""
        seed = self.seed + 1009 * number
        talks = self.load.draw(seed, vocab)
        return talks if rate is None else at_rate(talks, rate, seed)


def measure(targets: Sequence[Target], plan: Plan, tell: Tell) -> tuple[list[dict[str, Any]], bool]:
    """(servers, whole): for each server its runs. Ctrl-C ends the last one early; what it had measured is kept.

    Raises OctavoError for a server that does not answer the warm-up.
    """
    found: list[dict[str, Any]] = [
        {"name": one.name, "url": one.endpoint.url, "model": one.model, "endpoint": one.path, "runs": []}
        for one in targets
    ]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return found, runner.run(_measure(targets, plan, tell, found))


async def _measure(targets: Sequence[Target], plan: Plan, tell: Tell, found: list[dict[str, Any]]) -> bool:
    try:
        vocab = min(target.vocab for target in targets)
        for target, record in zip(targets, found, strict=True):
            await warm_up(target, plan, tell)
            record |= {
                "ignore_eos": "ignore_eos" in target.extras,
                "counts_by_usage": "stream_options" in target.extras,
            }
        for number, turn, (rate, bound), place in _turns(plan, len(targets)):
            target = targets[place]
            talks = plan.draw(number, rate, vocab)
            total, about = sum(len(talk.turns) for talk in talks), _about(target, turn, rate, bound)
            at_once = min(bound or total, plan.load.at_once or total)
            run = Run(target, at_once if at_once < total else None, plan.timeout_s, _counter(tell, about, total))
            point = {"round": turn, "request_rate": rate, "max_concurrency": bound, "num_requests": total}
            try:
                await run.go(talks)
            finally:
                if outcomes := run.outcomes:
                    found[place]["runs"].append(point | record_of(run, outcomes, plan))
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        return False
    return True


def _turns(plan: Plan, num_targets: int) -> Iterator[tuple[int, int, tuple[float | None, int | None], int]]:
    """(number of the draw, round, point, server): who is first changes from round to round."""
    places = list(range(num_targets))
    for turn in range(plan.rounds):
        for at, point in enumerate(plan.points):
            for place in places if turn % 2 == 0 else reversed(places):
                yield turn * len(plan.points) + at, turn, point, place


def _about(target: Target, turn: int, rate: float | None, bound: int | None) -> str:
    speed = f", {rate:g} a second" if rate else ""
    return f"{target.name}, round {turn + 1}{speed}" + (f", {bound} at once" if bound else "")


def _counter(tell: Tell, about: str, total: int) -> Callable[[int], None]:
    tell(about, 0, total)
    return lambda done: tell(about, done, total)


def record_of(run: Run, outcomes: Sequence[Outcome], plan: Plan) -> dict[str, Any]:
    """The figures of a run, each request, and what memory held meanwhile."""
    return {
        "whole": run.whole,
        **figures(outcomes, run.seconds, plan.goals, plan.price),
        "client_cpu_share": run.client_share,
        "max_late_ms": 1e3 * run.late_s,
        "timeline": run.timeline,
        "requests": [
            {
                "sent_s": one.sent,
                "ttft_ms": None if one.failure else one.latencies["ttft"][0],
                "e2el_ms": None if one.failure else one.latencies["e2el"][0],
                "input_tokens": one.prompt_tokens,
                "output_tokens": one.output_tokens,
                "failure": one.failure,
            }
            for one in outcomes
        ],
    }


async def warm_up(target: Target, plan: Plan, tell: Tell) -> None:
    """Find out which optional fields the server takes, and have it answer a few requests. Raises OctavoError."""
    _, work = WORKLOADS["uniform"].draw(plan.num_warmups + 1, target.vocab, plan.seed + WARM_UP_SEED)
    work = [Work(one.prompt[:WARM_UP_TOKENS], 4) for one in work]
    seen = None
    for extras in OPTIONAL:
        target.extras = {name: value for name, value in extras.items() if name != "ignore_eos" or plan.ignore_eos}
        seen = await _first(target, work[0], plan.timeout_s)
        if seen.failure not in ("status 400", "status 422"):
            break
    assert seen is not None
    if seen.failure:
        refused = seen.failure in ("status 400", "status 422") and not target.as_text
        hint = "; a server that takes no token ids needs --prompts text" if refused else ""
        raise OctavoError(f"{target.endpoint.url} fails the first request: {seen.failure}, {seen.detail}{hint}")
    run = Run(target, None, plan.timeout_s, _counter(tell, f"{target.name}, warm-up", plan.num_warmups))
    await run.go([Talk.single(one) for one in work[1:]])


async def _first(target: Target, work: Work, timeout_s: float) -> Outcome:
    run = Run(target, None, timeout_s, lambda done: None)
    await run.go([Talk.single(work)])
    return run.outcomes[0]


def summarise(servers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line for each server and point: medians of its rounds, and ratios to the first server's."""
    lines = []
    for server in servers:
        points = dict.fromkeys((run["request_rate"], run["max_concurrency"]) for run in server["runs"])
        for point in points:
            runs, base = (
                [one for one in of["runs"] if (one["request_rate"], one["max_concurrency"]) == point]
                for of in (server, servers[0])
            )
            line = {"server": server["name"], "request_rate": point[0], "max_concurrency": point[1]}
            lines.append(line | {"rounds": len(runs)} | summary(runs, base if server is not servers[0] else []))
    return lines


def warnings(servers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What makes figures less than they seem."""
    for server in servers:
        runs = server["runs"]
        if any(run["client_cpu_share"] > BUSY for run in runs if run["completed"]):
            yield f"{server['name']}: this client was busy itself, so that times may be its own"
        if any(run["max_late_ms"] > LATE_MS for run in runs):
            late = max(run["max_late_ms"] for run in runs)
            yield f"{server['name']}: requests were sent up to {late:.0f} ms late"
        if short := sum(run["short_answers"] for run in runs):
            why = "" if server.get("ignore_eos") else ", as the server does not know ignore_eos"
            yield f"{server['name']}: {short:,} answers are shorter than asked for{why}"
