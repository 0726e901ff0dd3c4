"""The engine in a process of its own: commands in, the outputs of each step out, over one socket.

Owns the messages of that socket, their framing, and the child's loop. Requests come as token ids and answers leave as
token ids: nothing here tokenises, renders or waits for a client. The parent's side is `octavo.engine.async_llm`.

    parent ── Launch, Add, Abort, Finish, ListSessions, TouchSession, Save, Stop ──►  child
           ◄── Ready | Failed, Accepted, Refused, Broke, Stepped, Changed, Sessions, Saved, Denied, Logged, Crashed ──

and what `octavo.engine.watching` adds for who watches.

The child steps while there is work and sleeps in `poll` while there is none. It leaves when the parent does, however
the parent ended, and leaves signals that stop a service to the parent.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from array import array
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, wait
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from octavo import kv_costs
from octavo.cache.explain import Explainer
from octavo.cache.manager import CacheStats, TierPages
from octavo.cache.tiers import TierStats
from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.llm import Engine, assemble
from octavo.engine.watching import Branches, LookAtPage, LookAtTree, Mapped, Observing, Page, Watch
from octavo.errors import (
    ConfigError,
    InvalidRequest,
    ModelError,
    OctavoError,
    PinRefused,
    RequestFailed,
    RequestTooLarge,
    UnknownSession,
)
from octavo.models.weights import open_checkpoint
from octavo.scheduler.limits import Limits
from octavo.scheduler.scheduler import SchedulerStats
from octavo.types import Note, Output, Request, SamplingParams, SessionInfo, Tier

_log = logging.getLogger("octavo.engine.process")  # where it runs by itself, __name__ says less

CHUNK = 1 << 20
"""Bytes read at most between two steps: a flood of commands delays no step for long."""
LONGEST_SLEEP_S = 3600.0
"""An idle child sleeps no longer at a time: the system does not take every number."""
COMPILING_S = 0.005
"""How long an idle child that waits for a guide to be compiled lets commands wait."""

# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Message(msgspec.Struct, array_like=True):
    """Travels as a msgpack array: its class's name and its fields."""


class Launch(Message, tag=True):
    """The first thing a child is told."""

    path: str
    config: EngineConfig


class Add(Message, tag=True):
    """A request. `prompt` holds C ints; answered with Accepted or Refused."""

    request_id: str
    prompt: bytes
    params: SamplingParams
    identity: tuple[str, ...]
    priority: int
    tenant: str
    session_id: str | None


class Abort(Message, tag=True):
    """Drop a request."""

    request_id: str


class Finish(Message, tag=True):
    """End one choice of a request: its text holds a stop string."""

    request_id: str
    index: int


class ListSessions(Message, tag=True):
    """Answered by Sessions of the same number: up to `limit`, the longest idle first. None is every tenant."""

    number: int
    tenant: str | None
    limit: int


class TouchSession(Message, tag=True):
    """Look at a session or change what becomes of its pages; answered by Sessions or Denied of the same number.

    `ttl_s` is for "pin", which 0 undoes.
    """

    number: int
    action: Literal["show", "pin", "release", "demote"]
    tenant: str
    session_id: str
    ttl_s: float = 0.0


class Save(Message, tag=True):
    """Write what can be found to disk. Answered when all is written, by Saved or Denied of the same number."""

    number: int


class Stop(Message, tag=True):
    """Audit the pages and exit."""


class TierNews(Message):
    """The tiers at one moment: their pages, those of them that are pinned, those that idle sessions may come back for,
    and what it takes here to have them again.

    `load_s` is the time to bring back a page of each tier below the pool, `token_s` that to compute a token.
    """

    pages: dict[Tier, TierPages] = msgspec.field(default_factory=lambda: dict.fromkeys(Tier, TierPages(0, 0, 0, 0)))
    num_pinned: dict[Tier, int] = msgspec.field(default_factory=lambda: dict.fromkeys(Tier, 0))
    num_kept: dict[Tier, int] = msgspec.field(default_factory=lambda: dict.fromkeys(Tier, 0))
    num_sessions: int = 0
    load_s: dict[Tier, float] = {}
    token_s: float = 0.0


class EngineStats(Message):
    """The engine at one moment: pages and sequences now, and what it counted since the start.

    `slots_filled` and `slots_unused` are token slots in the pages of running sequences, and `pages_spared` pages that
    these are left while another waits. `finished` has choices by reason, "error" included; it is the parent that counts
    them.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    pages_referenced: int = 0
    pages_cached: int = 0
    pages_free: int = 0
    page_bytes: int = 0
    token_bytes: int = 0
    slots_filled: int = 0
    slots_unused: int = 0
    pages_spared: int = 0
    scheduler: SchedulerStats = msgspec.field(default_factory=SchedulerStats)
    cache: CacheStats = msgspec.field(default_factory=CacheStats)
    moves: TierStats = msgspec.field(default_factory=TierStats)
    tiers: TierNews = msgspec.field(default_factory=TierNews)
    finished: dict[str, int] = {}


class Ready(Message, tag=True):
    """The model is loaded."""

    limits: Limits
    stats: EngineStats


class Failed(Message, tag=True):
    """The model could not be loaded: the error's class, its `option` or `path`, and what it says."""

    kind: str
    place: str
    message: str


class Accepted(Message, tag=True):
    """The request is queued."""

    request_id: str


class Refused(Message, tag=True):
    """The request is wrong: the error's class, its field, and what it says."""

    request_id: str
    kind: str
    field: str
    message: str


class Broke(Message, tag=True):
    """Computing this request failed, and that of no other: it is dropped."""

    request_id: str
    cause: str


class Stepped(Message, tag=True):
    """One step: when it began and ended (CLOCK_MONOTONIC, the same in every process), and what is new after it.

    `scheduled` names the requests that it served for the first time; `notes` are the scheduler's.
    """

    began: float
    ended: float
    scheduled: list[str]
    outputs: list[Output]
    stats: EngineStats
    notes: list[Note]


class Changed(Message, tag=True):
    """Commands changed what there is, and a step that follows is still being computed."""

    stats: EngineStats


class Sessions(Message, tag=True):
    """The sessions that were asked for, or the one that was touched; of a released one, what it held."""

    number: int
    sessions: list[SessionInfo]


class Saved(Message, tag=True):
    """How many pages are written, how many could not be, and how long that took."""

    number: int
    pages: int
    failed: int
    seconds: float


class Denied(Message, tag=True):
    """What was asked under this number cannot be done: the error's class, its option if it has one, what it says."""

    number: int
    kind: str
    place: str
    message: str


class Logged(Message, tag=True):
    """A record of the child's log."""

    name: str
    level: int
    text: str


class Crashed(Message, tag=True):
    """The last word of a child that an exception ends."""

    cause: str
    trace: str


Command = Launch | Add | Abort | Finish | ListSessions | TouchSession | Save | Watch | LookAtPage | LookAtTree | Stop
Answer = Sessions | Saved | Page | Branches | Denied
Reply = Ready | Failed | Accepted | Refused | Broke | Stepped | Changed | Mapped | Answer | Logged | Crashed

_ERRORS: dict[str, type[Any]] = {
    error.__name__: error
    for error in (
        *(ConfigError, ModelError, InvalidRequest, RequestTooLarge),
        *(UnknownSession, PinRefused, RequestFailed),
    )
}


def error_of(kind: str, place: str, message: str) -> OctavoError:
    """The error that a Failed, Refused or Denied stands for; those that blame no place have none."""
    error: OctavoError = _ERRORS[kind](*([place] if place else []), message)
    return error


def _told(error: Exception) -> tuple[str, str, str]:
    place = next((str(getattr(error, name)) for name in ("option", "field", "path") if hasattr(error, name)), "")
    return type(error).__name__, place, str(error).removeprefix(f"{place}: ")


# ── framing ──────────────────────────────────────────────────────────────────────────────────────────────────────

_encoder = msgspec.msgpack.Encoder()


def framed(message: msgspec.Struct) -> bytes:
    """A message as it travels: its length in four bytes, then the message."""
    frame = bytearray()
    _encoder.encode_into(message, frame, 4)
    frame[:4] = (len(frame) - 4).to_bytes(4, "little")
    return bytes(frame)


class Frames:
    """Cuts a stream of bytes into messages again."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def push(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete now, each still encoded."""
        self._bytes += data
        start, held = 0, len(self._bytes)
        while held - start >= 4:
            end = start + 4 + int.from_bytes(self._bytes[start : start + 4], "little")
            if end > held:
                break
            yield bytes(self._bytes[start + 4 : end])
            start = end
        del self._bytes[:start]


# ── the child ────────────────────────────────────────────────────────────────────────────────────────────────────


class Channel:
    """The child's end of the socket. Neither direction ever makes a step wait: what cannot be sent now is kept."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._frames = Frames()
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._queue: deque[bytes] = deque()  # any thread may log
        self._unsent = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        """Add a message to what `flush` sends. Any thread may."""
        self._queue.append(framed(message))

    def flush(self) -> None:
        """Send as much as the socket takes."""
        while self._queue:
            self._unsent += self._queue.popleft()
        while self._unsent:
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                return

    def drain(self) -> None:
        """Send everything, waiting for the parent to take it."""
        self.flush()
        while self._unsent:
            select.select([], [self._socket], [])
            self.flush()

    def receive(self, *, wait: bool, until: float = inf) -> list[Command]:
        """The commands that have come; with `wait`, sleep until there are bytes, or it is `until` (time.monotonic()).

        Raises EOFError after the last one.
        """
        while wait:
            left = min(max(until - time.monotonic(), 0.0), LONGEST_SLEEP_S)
            readable, _, _ = select.select([self._socket], [self._socket] if self._unsent else [], [], left)
            self.flush()
            wait = not readable and time.monotonic() < until
        try:
            data = self._socket.recv(CHUNK)
        except BlockingIOError:
            return []
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        return [self._decoder.decode(frame) for frame in self._frames.push(data)]


class _Forward(logging.Handler):
    """Hands the child's log to the parent, which knows where it goes and how it looks."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.send(Logged(record.name, record.levelno, self.format(record)))


class _Saving(NamedTuple):
    """A save under way, and under which numbers it was asked for."""

    began: float
    num_pages: int
    numbers: list[int]


def serve(engine: Engine, channel: Channel) -> None:
    """Step until told to stop. Raises EOFError when the parent is gone, and whatever stops the engine as a whole.

    A request with a guide is queued when that is compiled, so that no step waits for it. Whoever asks for a save during
    another one is told of that one's end.
    """
    core = engine.core
    compiling: list[tuple[Future[None], Add]] = []
    saving: _Saving | None = None
    observing = Observing(core, channel.send)
    Explainer(core.cache)

    def planned() -> None:
        channel.send(Changed(stats_of(engine)))
        channel.flush()

    def broke(request_id: str, error: Exception) -> None:
        channel.send(_broke(request_id, error))

    while True:
        due_at = min(core.due_at, observing.due_at)
        commands = channel.receive(wait=not core.has_work and not compiling, until=due_at)
        core.tick(time.monotonic())
        for command in commands:
            match command:
                case Add():
                    if command.params.guide is not None:
                        compiling.append((engine.guides.check_soon(command.params.guide), command))
                    else:
                        channel.send(_add(engine, command))
                case Abort(request_id):
                    compiling = [(guide, add) for guide, add in compiling if add.request_id != request_id]
                    core.abort(request_id)
                case Finish(request_id, index):
                    core.finish(request_id, index)
                case ListSessions() | TouchSession():
                    answer = _answer(core, command)
                    channel.send(Changed(stats_of(engine)))  # before the answer: who has that knows these
                    channel.send(answer)
                case Save(number):
                    if saving is not None:
                        saving.numbers.append(number)
                    elif (denied := _save(core, number)) is not None:
                        channel.send(denied)
                    else:
                        saving = _Saving(time.monotonic(), core.saving + core.save_failed, [number])
                case LookAtPage() | LookAtTree():
                    channel.send(_look(observing, command))
                case Watch(on):
                    observing.turn(on)
                case Stop():
                    core.close()
                    return
        if compiling and not core.has_work:
            wait([compiling[0][0]], COMPILING_S)
        while compiling and compiling[0][0].done():  # they are compiled one by one, in order
            channel.send(_add(engine, compiling.pop(0)[1]))
        if core.has_work:
            channel.flush()
            began = time.monotonic()
            outputs = core.step(planned if commands else None, broke, now=began)
            ended = time.monotonic()
            scheduler = core.scheduler
            channel.send(Stepped(began, ended, scheduler.newly_scheduled, outputs, stats_of(engine), scheduler.notes))
        else:
            channel.send(Changed(stats_of(engine)))
        if saving is not None and not core.saving:
            written, seconds = saving.num_pages - core.save_failed, time.monotonic() - saving.began
            for number in saving.numbers:
                channel.send(Saved(number, written, core.save_failed, seconds))
            saving = None
        observing.tell(time.monotonic())
        channel.flush()


def _add(engine: Engine, command: Add) -> Reply:
    prompt = array("i", command.prompt)
    request = Request(
        *(command.request_id, prompt, command.params, command.identity),
        *(command.priority, command.tenant, command.session_id),
    )
    try:
        if command.params.guide is not None:
            engine.guides.check(command.params.guide)
        engine.core.add(request)
    except InvalidRequest as error:
        return Refused(command.request_id, *_told(error))
    except Exception as error:
        return _broke(command.request_id, error)
    return Accepted(command.request_id)


def _broke(request_id: str, error: Exception) -> Broke:
    _log.error("request %s cannot be computed", request_id, exc_info=error)
    return Broke(request_id, _named(error))


def _answer(core: EngineCore, command: ListSessions | TouchSession) -> Answer:
    try:
        match command:
            case ListSessions(number, tenant, limit):
                return Sessions(number, core.list_sessions(tenant, limit))
            case TouchSession(number, "show", tenant, session_id):
                touched = core.session(tenant, session_id)
            case TouchSession(number, "pin", tenant, session_id, ttl_s):
                touched = core.pin(tenant, session_id, ttl_s)
            case TouchSession(number, "release", tenant, session_id):
                touched = core.release_session(tenant, session_id)
            case TouchSession(number, _, tenant, session_id):
                touched = core.demote_session(tenant, session_id)
        return Sessions(number, [touched])
    except Exception as error:
        return _denied(command.number, error)


def _look(observing: Observing, command: LookAtPage | LookAtTree) -> Answer:
    try:
        return observing.answer(command, time.monotonic())
    except Exception as error:
        return _denied(command.number, error)


def _save(core: EngineCore, number: int) -> Denied | None:
    """Begin a save, unless that cannot be."""
    try:
        core.save()
    except Exception as error:
        return _denied(number, error)
    return None


def _denied(number: int, error: Exception) -> Denied:
    if type(error).__name__ not in _ERRORS:
        _log.error("what was asked about the cache cannot be done", exc_info=error)
        error = RequestFailed(_named(error))
    return Denied(number, *_told(error))


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def stats_of(engine: Engine) -> EngineStats:
    """The engine as it is now."""
    core = engine.core
    scheduler, cache = core.stats
    pool, pages = core.cache.pool, engine.format
    costs = core.cache.tiers.costs
    return EngineStats(
        core.scheduler.num_running,
        core.scheduler.num_waiting,
        pool.num_pages,
        pool.num_referenced,
        pool.num_cached,
        pool.num_free,
        pages.page_bytes,
        pages.token_bytes,
        *core.scheduler.slots,
        core.scheduler.num_spared,
        scheduler,
        cache,
        core.cache.tiers.stats,
        TierNews(
            core.cache.tier_pages(),
            dict(zip(Tier, core.cache.sessions.num_pinned, strict=True)),
            {tier: pool.num_kept for tier, pool in zip(Tier, core.cache.tiers.pools, strict=True)},
            len(core.cache.sessions),
            costs.load_s,
            costs.token_s,
        ),
    )


def _leave_with_parent(sock: socket.socket) -> None:
    """End the process, in the middle of a step if need be, as soon as the parent's end of the socket is closed."""

    def watch() -> None:
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(fd: int) -> int:
    """Run an engine for the parent at the other end of socket `fd`; the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the terminal and a service manager signal the whole group
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    sock = socket.socket(fileno=fd)
    _leave_with_parent(sock)
    channel = Channel(sock)
    try:
        [launch] = channel.receive(wait=True)
        assert isinstance(launch, Launch)
        logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[_Forward(channel)])
        try:
            checkpoint = open_checkpoint(Path(launch.path))
            kv_costs.check(launch.config, checkpoint.config)
            if cost := kv_costs.told(launch.config, checkpoint.config):
                _log.info(cost)
            engine = assemble(checkpoint, launch.config)
        except (ConfigError, ModelError) as error:
            channel.send(Failed(*_told(error)))
            channel.drain()
            return 1
        gc.freeze()  # what is loaded stays: collections between steps need not look at it
        channel.send(Ready(engine.core.scheduler.limits, stats_of(engine)))
        channel.flush()
        serve(engine, channel)
        channel.drain()
    except EOFError:
        return 1
    except BaseException as error:
        channel.send(Crashed(_named(error), traceback.format_exc()))
        channel.drain()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
