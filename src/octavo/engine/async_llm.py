"""AsyncLLM: an engine in another process, as an asyncio program sees it.

Owns the child process (its start, its one restart, its end), the streams of the requests under way, and what was last
heard of the engine's state. It never computes or waits for whoever reads a stream: news of a request is looked at when
it comes, and kept until it is asked for, which is no more than the answer's own length. One event loop, and not
thread-safe.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar, overload

import msgspec

from octavo.cache.look import PageInfo, Tree
from octavo.config import EngineConfig, ModelConfig
from octavo.engine.guide import Guides
from octavo.engine.process import (
    Abort,
    Accepted,
    Add,
    Answer,
    Broke,
    Changed,
    Command,
    Crashed,
    Denied,
    EngineStats,
    Failed,
    Finish,
    Frames,
    Launch,
    ListSessions,
    Logged,
    Ready,
    Refused,
    Reply,
    Save,
    Saved,
    Sessions,
    Stepped,
    Stop,
    TouchSession,
    error_of,
    framed,
)
from octavo.engine.watching import Branches, LookAtPage, LookAtTree, Mapped, Page, Watch
from octavo.errors import EngineDead, InvalidRequest, Overloaded, RequestFailed, UnknownSession
from octavo.models.tokenizer import Tokenizer
from octavo.models.weights import open_checkpoint
from octavo.scheduler.limits import Limits
from octavo.types import Guide, Note, Output, Request, SessionInfo, Tier

_log = logging.getLogger(__name__)

PROGRAM = "octavo.engine.process"
"""The module that a child runs."""

MAX_COMPILING = 64
"""Guides that may wait to be compiled: hostile ones take up to a second each."""
CLOSE_S = 10.0
"""How long a child may take to end, once told to, before it is killed."""


ABORT_S = 1.0
"""How long a child that hangs may take to say where, before it is killed."""

T = TypeVar("T")


class _Asked(NamedTuple):
    """A question that the child has not answered yet, and when it was sent."""

    answer: asyncio.Future[Answer]
    at: float


class RequestStream(Generic[T]):
    """What `take` made of the outputs of one request, in order, until every choice has ended.

    `take` is called with each output as soon as the engine had it, and with the time of that, however late the stream
    is read; it may `finish` a choice. What it returns is an item of the stream unless that is None. What it raises ends
    the request, and the stream.

    Times are CLOCK_MONOTONIC seconds, None while they are open: queued at `queued_at`, first in a step from
    `scheduled_at` on, the first and the latest token known at `first_token_at` and `last_token_at`.

    `num_generated` tokens came, of all choices; `on_output` sees each output before `take` does.

    Whoever leaves a stream before its end calls `abort` (or `aclose`); nothing else stops the engine.
    """

    def __init__(self, owner: AsyncLLM, request: Request, take: Take[T]) -> None:
        self.request = request
        self.queued_at = time.monotonic()
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.num_generated = 0
        self.on_output: Callable[[Output, float], None] | None = None
        self._owner = owner
        self._take = take
        self._news: deque[T] = deque()
        self._open = set(range(request.params.n))
        self._failure: Exception | None = None
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def finish(self, index: int) -> None:
        """End one choice early, once there was news of it: no more comes of it."""
        if self.first_token_at is None:  # its choices are still one sequence
            raise ValueError(f"choice {index} of request {self.request_id} has not begun")
        if index in self._open:
            self._owner._finish(self, index)

    def abort(self) -> None:
        """End the request; iteration ends too. Does nothing to one that has ended."""
        self._news.clear()
        if self._open:
            self._owner._abort(self)

    async def aclose(self) -> None:
        """The same as `abort`."""
        self.abort()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """The next item. Raises, after what came before it, EngineDead, RequestFailed, and what `take` raised."""
        while not self._news:
            if self._failure is not None:
                raise self._failure
            if not self._open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._news.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


Take = Callable[[RequestStream[T], Output, float], T | None]


def _as_it_is(stream: RequestStream[Output], output: Output, now: float) -> Output:
    return output


class AsyncLLM:
    """An engine in a child process. Made by `start`, ended by `close`.

    `on_step` is called after each step that computed tokens, with how many; `on_map` with what a watched engine tells.
    `on_begin` and `on_end`, with the reason, are called with each request's stream, `on_note` with what befell one in a
    step that began and ended at these times.

    If the child dies, every open stream raises EngineDead and the child is started again, once; when that one dies too,
    `on_fatal` is called with the reason and every later `submit` raises EngineDead. A child that has work and says
    nothing for `step_timeout` seconds (0: for ever) is made to die.
    """

    def __init__(
        self,
        model_path: Path,
        config: EngineConfig,
        max_queued_requests: int | None,
        step_timeout: float,
        on_fatal: Callable[[str], None],
    ) -> None:
        self.config = config
        self.model: ModelConfig
        self.tokenizer: Tokenizer
        self.limits: Limits
        self._guides: Guides
        self._num_compiling = 0
        self._path = model_path
        self._max_queued = max_queued_requests
        self._step_timeout = step_timeout
        self._on_fatal = on_fatal
        self.on_step: Callable[[int], None] = lambda num_tokens: None
        self.on_map: Callable[[Mapped], None] = lambda news: None
        self.on_begin: Callable[[RequestStream[Any]], None] = lambda stream: None
        self.on_end: Callable[[RequestStream[Any], str], None] = lambda stream, reason: None
        self.on_note: Callable[[Note, float, float], None] = lambda note, began, ended: None
        self._watched = False
        self._streams: dict[str, RequestStream[Any]] = {}
        self._asked: dict[int, _Asked] = {}
        self._num_asked = 0
        self._finished: Counter[str] = Counter()
        self._stats = EngineStats()
        self._before = EngineStats()  # what the counters had reached when the last child died
        self._child: _Child
        self._up = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_restarts = 0
        self._ended: str | None = None  # why nothing is taken any more
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(
        cls,
        model_path: Path,
        config: EngineConfig,
        *,
        max_queued_requests: int | None = None,
        step_timeout: float = 0,
        on_fatal: Callable[[str], None] = lambda reason: None,
    ) -> AsyncLLM:
        """Start a child on the model at `model_path`, a GGUF file or a folder. Raises ConfigError, ModelError."""
        self = cls(model_path, config, max_queued_requests, step_timeout, on_fatal)
        child = asyncio.create_task(_Child.start(self))
        try:
            checkpoint = await asyncio.to_thread(open_checkpoint, model_path)
            self.model = checkpoint.config
            self.config = config.for_model(self.model.context_length)
            self.tokenizer = await asyncio.to_thread(checkpoint.tokenizer)
            self._guides = Guides(self.tokenizer, self.model.vocab_size)
        except BaseException:
            child.cancel()
            await asyncio.wait([child])
            if not child.cancelled() and child.exception() is None:
                await child.result().end(kill=True)
            raise
        self._install(await child)
        if step_timeout:
            self._begin(self._watch())
        return self

    @property
    def max_model_len(self) -> int:
        """The longest prompt and answer together, in tokens."""
        return self.limits.max_model_len

    @property
    def healthy(self) -> bool:
        """Whether requests are taken and an engine is there to compute them."""
        return self._ended is None and self._up.is_set()

    @property
    def num_restarts(self) -> int:
        return self._num_restarts

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def num_open_of(self, tenant: str) -> int:
        """Those of one tenant."""
        return sum(stream.request.tenant == tenant for stream in self._streams.values())

    def stream(self, request_id: str) -> RequestStream[Any] | None:
        """The stream of a request that has not ended."""
        return self._streams.get(request_id)

    @property
    def num_queued(self) -> int:
        """Requests that no step has served yet."""
        return sum(stream.scheduled_at is None for stream in self._streams.values())

    def stats(self) -> EngineStats:
        """The engine after its latest step or command. Counters go on over a restart.

        What the engine has not looked at yet, as it is in the middle of a step or not there, is waiting too.
        """
        before, now = self._before, self._stats
        num_waiting = now.num_waiting + sum(not stream._accepted.done() for stream in self._streams.values())
        sums = {name: _added(getattr(before, name), getattr(now, name)) for name in ("scheduler", "cache", "moves")}
        return msgspec.structs.replace(now, **sums, num_waiting=num_waiting, finished=dict(self._finished))

    @overload
    async def submit(self, request: Request) -> RequestStream[Output]: ...
    @overload
    async def submit(self, request: Request, take: Take[T]) -> RequestStream[T]: ...
    async def submit(self, request: Request, take: Take[Any] = _as_it_is) -> RequestStream[Any]:
        """Queue a request, whose outputs go through `take`. While the engine is being restarted, this waits for it.

        Raises InvalidRequest, RequestTooLarge, Overloaded, EngineDead, RequestFailed.
        """
        self.limits.check(request)
        if request.params.guide is not None:
            await self._compile(request.params.guide)
        await self._up.wait()
        if self._ended is not None:
            raise EngineDead(self._ended)
        if request.request_id in self._streams:
            raise InvalidRequest("request_id", f"{request.request_id!r} is in use")
        if self._max_queued is not None and self.num_queued >= self._max_queued:
            raise Overloaded(f"{self._max_queued} requests are queued already (max_queued_requests)")
        prompt = array("i", request.prompt_token_ids).tobytes()
        add = Add(
            *(request.request_id, prompt, request.params, request.identity),
            *(request.priority, request.tenant, request.session_id),
        )
        try:
            frame = framed(add)
        except UnicodeEncodeError:
            raise InvalidRequest("request", "holds half a surrogate pair, which is no character") from None
        stream = RequestStream(self, request, take)
        self._streams[request.request_id] = stream
        self._idle.clear()
        self.on_begin(stream)
        self._child.send(frame)
        try:
            await stream._accepted
        except asyncio.CancelledError:
            stream.abort()
            raise
        return stream

    async def sessions(self, tenant: str | None = None, limit: int = 100) -> list[SessionInfo]:
        """Sessions of a tenant, or of all: up to `limit`, the longest idle first. Raises EngineDead."""
        return _sessions(await self._ask(lambda number: ListSessions(number, tenant, limit)))

    async def session(self, tenant: str, session_id: str) -> SessionInfo:
        """What a session holds. Raises UnknownSession, EngineDead."""
        return await self._touch("show", tenant, session_id)

    async def pin(self, tenant: str, session_id: str, ttl_s: float) -> SessionInfo:
        """Keep a session's pages where they are for `ttl_s` seconds; 0 ends that.

        Raises UnknownSession, PinRefused, EngineDead.
        """
        return await self._touch("pin", tenant, session_id, ttl_s)

    async def release_session(self, tenant: str, session_id: str) -> SessionInfo:
        """Forget a session and drop the idle pages that are its alone; returns what it held.

        Raises UnknownSession, EngineDead.
        """
        return await self._touch("release", tenant, session_id)

    async def demote_session(self, tenant: str, session_id: str) -> SessionInfo:
        """Have the idle pages that are a session's alone leave the pool. Raises UnknownSession, EngineDead."""
        return await self._touch("demote", tenant, session_id)

    async def save(self) -> Saved:
        """Write what can be found to disk, and wait until all is written. Raises ConfigError, EngineDead.

        Whoever asks during a save is told of that one's end; whoever stops waiting stops nothing.
        """
        saved = await self._ask(Save)
        assert isinstance(saved, Saved)
        return saved

    async def look_at(self, tier: Tier, page: int) -> PageInfo:
        """What is known of a page that there is. Raises EngineDead."""
        answer = await self._ask(lambda number: LookAtPage(number, tier, page))
        assert isinstance(answer, Page)
        return answer.info

    async def tree(self, tenant: str | None, limit: int) -> Tree:
        """What is shared of a tenant's pages, or of all: `limit` chains at most. Raises EngineDead."""
        answer = await self._ask(lambda number: LookAtTree(number, tenant, limit))
        assert isinstance(answer, Branches)
        return answer.tree

    def watch(self, on: bool) -> None:
        """Have the engine tell `on_map` what becomes of its pages, beginning with all of them, or end that.

        An engine that is started again begins anew.
        """
        self._watched = on
        if self._up.is_set():
            self._child.send(framed(Watch(on)))

    async def drain(self, timeout_s: float) -> int:
        """Take no more requests and wait for what is under way; after `timeout_s` the rest fail. Returns how many."""
        self._end("the engine is shutting down")
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        cut = list(self._streams.values())
        for stream in cut:
            self._child.send(framed(Abort(stream.request_id)))
        self._fail_all("the engine is shutting down and the request took too long")
        return len(cut)

    async def close(self) -> None:
        """Fail what is open and end the child; it audits its pages first. May be called again."""
        self._child.on_death = None
        self._end("the engine is closed")
        self._fail_all("the engine is closed")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._child.end()

    async def _compile(self, guide: Guide) -> None:
        """Compile a guide here first, so that a bad one is refused before the engine hears of it.

        Raises InvalidRequest, and Overloaded if too many others wait for that.
        """
        compiled = self._guides.check_soon(guide)
        if not compiled.done() and self._num_compiling >= MAX_COMPILING:
            compiled.cancel()
            raise Overloaded(f"{MAX_COMPILING} schemas, expressions or grammars wait to be compiled already")
        self._num_compiling += 1
        try:
            await asyncio.wrap_future(compiled)
        finally:
            self._num_compiling -= 1

    async def _touch(
        self, action: Literal["show", "pin", "release", "demote"], tenant: str, session_id: str, ttl_s: float = 0.0
    ) -> SessionInfo:
        touch = await self._ask(lambda number: TouchSession(number, action, tenant, session_id, ttl_s))
        return _sessions(touch)[0]

    async def _ask(self, command: Callable[[int], Command]) -> Answer:
        """Have a numbered command answered. While the engine is being restarted, this waits for it."""
        await self._up.wait()
        if self._ended is not None:
            raise EngineDead(self._ended)
        self._num_asked += 1
        number = self._num_asked
        try:
            frame = framed(command(number))
        except UnicodeEncodeError:
            raise UnknownSession("no session's name holds half a surrogate pair") from None
        asked = self._asked[number] = _Asked(asyncio.get_running_loop().create_future(), time.monotonic())
        self._idle.clear()
        self._child.send(frame)
        try:
            return await asked.answer
        finally:
            del self._asked[number]
            self._check_idle()

    # ── called by streams ──

    def _finish(self, stream: RequestStream[Any], index: int) -> None:
        self._child.send(framed(Finish(stream.request_id, index)))
        self._close_choice(stream, index, "stop")

    def _abort(self, stream: RequestStream[Any]) -> None:
        self._child.send(framed(Abort(stream.request_id)))
        self._drop(stream, "abort")

    # ── called at times ──

    async def _watch(self) -> None:
        """Make a child die that hangs."""
        while True:
            await asyncio.sleep(self._step_timeout / 10)
            if self._silent_s > self._step_timeout:
                await asyncio.sleep(0.1)  # this process may have been the one that slept: read what has come
                if self._silent_s > self._step_timeout:
                    self._child.give_up(f"no step ended within {self._step_timeout:g} s (step_timeout)")

    @property
    def _silent_s(self) -> float:
        """For how long nothing was heard although there is work."""
        since = [stream.queued_at for stream in self._streams.values()][:1]
        since += [asked.at for asked in self._asked.values()][:1]
        if not since or not self._up.is_set():
            return 0.0
        return time.monotonic() - max(self._child.heard_at, min(since))

    # ── called by the child ──

    def _take(self, reply: Reply) -> None:
        match reply:
            case Stepped():
                computed = reply.stats.scheduler.computed_tokens - self._stats.scheduler.computed_tokens
                if computed:  # a step may only have moved pages
                    self.on_step(computed)
                self._stats = reply.stats
                for request_id in reply.scheduled:
                    if (stream := self._streams.get(request_id)) is not None:
                        stream.scheduled_at = reply.began
                for note in reply.notes:
                    self.on_note(note, reply.began, reply.ended)
                for output in reply.outputs:
                    self._deliver(output, reply.ended)
            case Changed(stats):
                self._stats = stats
            case Mapped():
                self.on_map(reply)
            case Accepted(request_id):
                if (stream := self._streams.get(request_id)) is not None and not stream._accepted.done():
                    stream._accepted.set_result(None)
            case Refused(request_id, kind, field, message):
                if (stream := self._streams.pop(request_id, None)) is not None:
                    self.on_end(stream, "refused")
                    stream._open.clear()
                    if not stream._accepted.done():
                        stream._accepted.set_exception(error_of(kind, field, message))
                    self._check_idle()
            case Broke(request_id, cause):
                if (stream := self._streams.get(request_id)) is not None:
                    self._fail(stream, RequestFailed(f"the engine could not compute this request: {cause}"))
            case Sessions() | Saved() | Page() | Branches() | Denied():
                asked = self._asked.get(reply.number)
                if asked is not None and not asked.answer.done():
                    if isinstance(reply, Denied):
                        asked.answer.set_exception(error_of(reply.kind, reply.place, reply.message))
                    else:
                        asked.answer.set_result(reply)
            case Logged(name, level, text):
                logging.getLogger(name).log(level, "%s", text)

    def _deliver(self, output: Output, now: float) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None or output.index not in stream._open:
            return
        if stream.first_token_at is None:
            stream.first_token_at = now
        stream.last_token_at = now
        stream.num_generated += len(output.new_tokens)
        if stream.on_output is not None:
            stream.on_output(output, now)
        try:
            item = stream._take(stream, output, now)
        except Exception as error:
            self._child.send(framed(Abort(stream.request_id)))
            self._fail(stream, error)
            return
        if item is not None:
            stream._news.append(item)
        if output.finish_reason is not None and output.index in stream._open:
            self._close_choice(stream, output.index, output.finish_reason)
        stream._wake()

    def _close_choice(self, stream: RequestStream[Any], index: int, reason: str) -> None:
        stream._open.discard(index)
        self._finished[reason] += 1
        if not stream._open:
            self._drop(stream, reason)

    def _drop(self, stream: RequestStream[Any], reason: str) -> None:
        self._finished[reason] += len(stream._open)
        stream._open.clear()
        if self._streams.pop(stream.request_id, None) is not None:
            self.on_end(stream, reason)
        stream._wake()
        self._check_idle()

    def _check_idle(self) -> None:
        if not self._streams and not self._asked:
            self._idle.set()

    def _fail_all(self, reason: str) -> None:
        for stream in list(self._streams.values()):
            self._fail(stream, EngineDead(reason))
        for asked in self._asked.values():
            if not asked.answer.done():
                asked.answer.set_exception(EngineDead(reason))

    def _fail(self, stream: RequestStream[Any], error: Exception) -> None:
        stream._failure = error
        if not stream._accepted.done():
            stream._accepted.set_exception(error)
        self._drop(stream, "error")

    # ── the child's life ──

    def _install(self, child: _Child) -> None:
        self._child = child
        self.limits, self._stats = child.ready.limits, child.ready.stats
        child.on_death = self._died
        self._up.set()
        if self._watched:
            self.watch(True)

    def _died(self, cause: str) -> None:
        """The child is gone without having been told to go."""
        self._up.clear()
        _log.error("the engine died with %d requests open: %s", len(self._streams), cause)
        self._before, self._stats = self.stats(), EngineStats()
        self._fail_all(f"the engine died: {cause}")
        if self._num_restarts or self._ended is not None:
            self._fatal(cause)
        else:
            self._num_restarts += 1
            self._begin(self._restart())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _restart(self) -> None:
        try:
            self._install(await _Child.start(self))
        except Exception as error:
            self._fatal(f"it could not be started again: {error}")
        else:
            _log.warning("the engine runs again")

    def _fatal(self, cause: str) -> None:
        self._end(f"the engine is dead: {cause}")
        self._on_fatal(cause)

    def _end(self, reason: str) -> None:
        if self._ended is None:
            self._ended = reason
        self._up.set()  # whoever waits for an engine is told


class _Child(asyncio.Protocol):
    """One child process and the parent's end of its socket."""

    def __init__(self, owner: AsyncLLM) -> None:
        self.ready: Ready
        self.heard_at = time.monotonic()
        self.on_death: Callable[[str], None] | None = None
        self._owner = owner
        self._frames = Frames()
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._process: subprocess.Popen[bytes]
        self._transport: asyncio.Transport
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lost = asyncio.Event()
        self._gone: asyncio.Task[None]
        self._cause: str | None = None

    @classmethod
    async def start(cls, owner: AsyncLLM) -> _Child:
        """A child with its model loaded. Raises ConfigError, ModelError, or EngineDead if it ended on the way."""
        self = cls(owner)
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs:
            self._transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": path},
            )
        self._gone = asyncio.create_task(self._watch())
        self.send(framed(Launch(str(owner._path), owner.config)))
        try:
            await self._started
        except BaseException:
            await self.end(kill=True)
            raise
        return self

    def send(self, frame: bytes) -> None:
        """Send a message, without waiting; to a child that is gone, nothing."""
        if not self._transport.is_closing():
            self._transport.write(frame)

    async def end(self, *, kill: bool = False) -> None:
        """Have the child exit, and wait until it has."""
        self.on_death = None
        if kill:
            self._process.kill()
        else:
            self.send(framed(Stop()))
        try:
            await asyncio.wait_for(asyncio.shield(self._gone), CLOSE_S)
        except TimeoutError:
            _log.error("the engine did not end within %.0f s and is killed", CLOSE_S)
            self._process.kill()
            await self._gone

    def give_up(self, cause: str) -> None:
        """Have a child die that does not answer; on its way it writes to standard error where it hangs."""
        if self._cause is None:
            self._cause = cause
            self._process.send_signal(signal.SIGABRT)
            asyncio.get_running_loop().call_later(ABORT_S, self._process.kill)

    # ── asyncio.Protocol ──

    def data_received(self, data: bytes) -> None:
        self.heard_at = time.monotonic()
        for frame in self._frames.push(data):
            match reply := self._decoder.decode(frame):
                case Ready():
                    self.ready = reply
                    if not self._started.done():
                        self._started.set_result(None)
                case Failed(kind, place, message):
                    if not self._started.done():
                        self._started.set_exception(error_of(kind, place, message))
                case Crashed(cause, trace):
                    self._cause = cause
                    _log.error("the engine's process failed\n%s", trace)
                case _:
                    self._owner._take(reply)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost.set()

    async def _watch(self) -> None:
        """Wait for the end of the socket, then for that of the process, and report it."""
        await self._lost.wait()
        try:
            code = await asyncio.to_thread(self._process.wait, CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = await asyncio.to_thread(self._process.wait)
        cause = self._cause or (f"killed by signal {-code}" if code < 0 else f"its process ended with code {code}")
        if not self._started.done():
            self._started.set_exception(EngineDead(f"the engine died while starting: {cause}"))
        if self.on_death is not None:
            self.on_death(cause)


def _sessions(answer: Answer) -> list[SessionInfo]:
    assert isinstance(answer, Sessions)
    return answer.sessions


def _added(before: Any, now: Any) -> Any:
    """Two statistics of one kind as one: sums of counts, the larger peak."""
    sums = {}
    for name in [field.name for field in fields(now)]:
        a, b = getattr(before, name), getattr(now, name)
        sums[name] = max(a, b) if name.startswith("peak_") else _sum(a, b)
    return type(now)(**sums)


def _sum(before: Any, now: Any) -> Any:
    if isinstance(now, dict):
        return {key: before.get(key, 0) + now.get(key, 0) for key in before | now}
    return before + now
