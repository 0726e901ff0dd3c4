"""LLM: the Python API, and the place where an engine is put together.

It owns texts (prompts to tokens, tokens to texts, stop strings), the wall clock and the choice of parts. It never
schedules, samples or touches a page. Not thread-safe: one thread, and one engine step at a time.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

from octavo import kv_costs
from octavo.allowance import available_memory
from octavo.cache.manager import CacheManager
from octavo.cache.tiers import Costs
from octavo.config import EngineConfig, ModelConfig
from octavo.engine.core import EngineCore
from octavo.engine.guide import Guides
from octavo.engine.kv_store import KVStore
from octavo.engine.page_file import PageFile
from octavo.engine.runner import ModelRunner
from octavo.engine.sampler import Sampler
from octavo.engine.sizing import GIB, host_size, pool_size
from octavo.engine.text import ChoiceText
from octavo.errors import ConfigError, InvalidRequest, OctavoError
from octavo.kv_format import KV_REVISION, KVFormat
from octavo.models import ARCHITECTURES
from octavo.models.catalog import resolve
from octavo.models.llama import Decoder
from octavo.models.tokenizer import Tokenizer
from octavo.models.weights import Checkpoint, open_checkpoint
from octavo.ops.api import Ops
from octavo.scheduler.scheduler import Scheduler
from octavo.types import FinishReason, Output, Request, Sampled, SamplingParams, Slice, StepPlan

_log = logging.getLogger(__name__)

MEASURED_TOKENS, MEASURED_POSITION = 32, 2048
"""How many tokens are computed at the start, and how far from the beginning, to know what a token takes here."""

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


# ── what comes out ───────────────────────────────────────────────────────────────────────────────────────────────


class Logprob(NamedTuple):
    """A token's natural log-probability under the raw logits, its rank (1 = most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str


Logprobs = dict[int, Logprob]
"""By token id: the token at this position first, then the most likely ones that were asked for."""


@dataclass(slots=True)
class Metrics:
    """Times in seconds since the request was queued, None while they are open.

    num_cached_tokens: prompt tokens found in the cache. num_preemptions: of the choice that was preempted most.
    """

    num_cached_tokens: int = 0
    num_preemptions: int = 0
    time_to_first_token_s: float | None = None
    total_s: float | None = None


@dataclass(slots=True)
class Completion:
    """One choice. `token_ids` end with the stop token, if one ended it; `text` does not.

    `stop_reason` is the stop string or the token of `stop_token_ids` that was met, None for the model's own end.
    `logprobs` (one dict a token) and `cumulative_logprob` are None unless asked for. `score` is a beam's.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    score: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its `n` choices. `prompt` is None where tokens were given.

    `prompt_logprobs`, when asked for, has an entry for each prompt token; the first, which nothing precedes, is None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[Logprobs | None] | None = None
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.outputs)


class StreamEvent(NamedTuple):
    """News of one choice: text that will not change any more, and the tokens that came, which may be ahead of it."""

    prompt_index: int
    choice_index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None


# ── the engine, put together ─────────────────────────────────────────────────────────────────────────────────────


class Engine(NamedTuple):
    """An engine's parts, ready to step."""

    core: EngineCore
    decoder: Decoder
    tokenizer: Tokenizer
    sampler: Sampler
    guides: Guides
    config: EngineConfig
    model: ModelConfig
    format: KVFormat
    max_model_len: int
    store: KVStore
    ops: Ops


def assemble(checkpoint: Checkpoint, config: EngineConfig, *, audit: bool = False) -> Engine:
    """Build an engine for a model; with `audit`, pages are checked after every step. Raises ModelError, ConfigError."""
    model, tokenizer = checkpoint.config, checkpoint.tokenizer()
    given, config = config, config.for_model(model.context_length)
    if config is not given:
        _log.info("kv_layout contiguous: each sequence reserves %d tokens; block_size is ignored", config.block_size)
    kv_format = config.kv_format(model)
    available = available_memory() - checkpoint.stored_bytes
    num_pages, max_model_len = pool_size(config, kv_format, model.context_length, available)
    num_host_pages = host_size(config, kv_format, available - num_pages * kv_format.page_bytes)
    ops = _backend(config)
    decoder = ARCHITECTURES[model.architecture](checkpoint, ops, max_model_len)
    eos_token_ids = frozenset(tokenizer.eos_token_ids)
    sampler, guides = Sampler(ops, eos_token_ids), Guides(tokenizer, model.vocab_size)
    disk = _page_file(checkpoint, config, kv_format, ops)
    try:
        store = KVStore(ops, kv_format, num_pages, num_host_pages=num_host_pages, disk=disk)
        runner = ModelRunner(decoder, store, sampler, guides)
        cache = CacheManager(
            num_pages,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            num_host_pages=num_host_pages,
            num_disk_pages=disk.max_records if disk is not None else 0,
            costs=_costs(config, runner, store, min(max_model_len, num_pages * config.block_size)),
            session_ttl=config.session_ttl,
            max_pinned_fraction=config.max_pinned_fraction,
            kv_quota=config.kv_quota,
        )
        if disk is not None and (labels := disk.labels()):
            _log.info("found %d pages in %s", cache.restore(labels), config.kv_offload_dir)
    except BaseException:
        if disk is not None:
            disk.close()
        raise
    scheduler = Scheduler(
        config, cache, max_model_len=max_model_len, vocab_size=model.vocab_size, eos_token_ids=eos_token_ids
    )
    core = EngineCore(scheduler, runner, audit=audit)
    return Engine(core, decoder, tokenizer, sampler, guides, config, model, kv_format, max_model_len, store, ops)


def _costs(config: EngineConfig, runner: ModelRunner, store: KVStore, longest: int) -> Costs:
    """Time steps of a token and of a few and, where pages can be brought back, that, and a few far from the beginning.

    Before the first request: what is computed and moved is nobody's.
    """
    count = max(min(MEASURED_TOKENS, config.max_num_batched_tokens, longest // 2), 1)
    far = min(longest - count, MEASURED_POSITION)
    tokens, pages = array("i", [0] * count), array("i", range(-(-(far + count) // config.block_size)))

    def seconds(start: int, count: int) -> float:
        piece = Slice(0, start, tokens[:count], start, pages[: -(-(start + count) // config.block_size)], ())
        return min(runner.execute(StepPlan(0, (), (piece,))).seconds for _ in range(2))

    load_s = store.load_seconds()
    step_s, near_s = seconds(0, 1), seconds(0, count)
    far_s = seconds(far, count) if load_s else near_s
    costs = Costs.fitted(config.preemption_mode, step_s, count, near_s, far, far_s, load_s)
    if load_s:
        page_s = costs.recompute_s(0, config.block_size)
        known = ", ".join(f"{seconds * 1e3:.2f} ms from {tier.name.lower()}" for tier, seconds in load_s.items())
        _log.info("a page takes %s and %.2f ms to compute (preemption mode %s)", known, page_s * 1e3, costs.mode)
    return costs


def _page_file(checkpoint: Checkpoint, config: EngineConfig, format: KVFormat, ops: Ops) -> PageFile | None:
    """The disk tier, if one is wanted: a file for all that keys and values depend on."""
    if not config.kv_offload_dir:
        return None
    origin = repr((checkpoint.digest(), checkpoint.config, format, ops.name, KV_REVISION))
    return PageFile.open(
        config.kv_offload_dir,
        fingerprint=sha256(origin.encode()).digest(),
        page_bytes=format.page_bytes,
        block_size=format.block_size,
        max_bytes=int(config.kv_offload_space * GIB),
        restore=config.restore,
    )


def _backend(config: EngineConfig) -> Ops:
    if config.backend == "reference":
        from octavo.ops.reference import ReferenceOps

        return ReferenceOps()
    from octavo.ops.cpu import CpuOps  # loads the native library

    return CpuOps(config.num_threads)


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """EngineConfig from keywords. Raises ConfigError; a name it lacks is answered with the nearest one."""
    known = [knob.name for knob in fields(EngineConfig)]
    for name in options:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise ConfigError(name, f"is not an option of the engine: {hint}")
    return EngineConfig(**options)


# ── the API ──────────────────────────────────────────────────────────────────────────────────────────────────────


class LLM:
    """A model, ready to generate. Use it as a context manager, or call `close`, which checks that no page is lost.

    `model` is a name of the catalogue, a hub name or a path; the keywords are the fields of EngineConfig.

    Not thread-safe. Streams may be open side by side and `generate` called while they are: requests share the steps.
    Ctrl-C takes effect between two steps; it aborts the requests of the call it interrupts and leaves the engine clean.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        config, checkpoint = engine_config(options), open_checkpoint(resolve(str(model)))
        kv_costs.check(config, checkpoint.config)
        self._start(assemble(checkpoint, config))

    @classmethod
    def from_engine(cls, engine: Engine) -> Self:
        """An LLM over parts that were put together elsewhere."""
        self = cls.__new__(cls)
        self._start(engine)
        return self

    def _start(self, engine: Engine) -> None:
        self._engine = engine
        self._core = engine.core
        self._live: dict[str, _Live] = {}
        self._num_requests = 0
        self._closed = False
        self.tokenizer = engine.tokenizer

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    @property
    def model(self) -> ModelConfig:
        return self._engine.model

    @property
    def format(self) -> KVFormat:
        """What a page is."""
        return self._engine.format

    @property
    def max_model_len(self) -> int:
        """The longest prompt and answer together, in tokens."""
        return self._engine.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue prompts; the outputs are in their order.

        `prompts` is a text, a list of token ids, or a list of either; `params` one for all or one for each, None being
        SamplingParams(). Raises InvalidRequest, naming the prompt, before anything is computed.
        """
        return self._finish(self._batch(_listed(prompts), params), progress)

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[StreamEvent]:
        """Like `generate`, event by event. Requests are checked now, queued at the first event, and aborted if the
        iterator is closed before its end.
        """
        return self._run(self._batch(_listed(prompts), params))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer a conversation (a list of {"role", "content"}), or a list of them, through the model's template."""
        return self._finish(self._batch(self._conversations(messages), params), progress)

    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamEvent]:
        """Like `chat`, event by event; see `stream`."""
        return self._run(self._batch(self._conversations(messages), params))

    def stats(self) -> dict[str, int]:
        """Counts since the start, and the pool as it is now."""
        scheduler, cache = self._core.stats
        pool, pages = self._core.cache.pool, self._engine.format
        return {
            **asdict(scheduler),
            **asdict(cache),
            "num_running": self._core.scheduler.num_running,
            "num_waiting": self._core.scheduler.num_waiting,
            "num_pages": pool.num_pages,
            "pages_referenced": pool.num_referenced,
            "pages_cached": pool.num_cached,
            "pages_free": pool.num_free,
            "page_bytes": pages.page_bytes,
            "token_bytes": pages.token_bytes,
            "num_broken_rows": self._engine.sampler.num_broken_rows,
        }

    def close(self) -> None:
        """Abort what is running and audit the pool; once. Raises AuditError if a page is still held."""
        if not self._closed:
            self._closed = True
            self._live.clear()
            self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ── from prompts to requests ──

    def _conversations(self, messages: Sequence[Any]) -> list[Prompt]:
        if not isinstance(messages, Sequence):
            raise InvalidRequest("messages", f"must be a list of messages, got {type(messages).__name__}")
        one = all(isinstance(message, Mapping) for message in messages) and len(messages) > 0
        return [self.tokenizer.encode_chat(conversation) for conversation in ([messages] if one else messages)]

    def _batch(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None) -> _Batch:
        """The requests of one call, every one of them checked."""
        if self._closed:
            raise OctavoError("the engine is closed")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if not isinstance(params, Sequence):
            raise InvalidRequest("params", f"must be SamplingParams or a list of them, got {type(params).__name__}")
        if len(params) != len(prompts):
            raise InvalidRequest("params", f"there are {len(params)} for {len(prompts)} prompts: give one or as many")
        batch = _Batch(self.tokenizer)
        for i, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            try:
                if not isinstance(wanted, SamplingParams):
                    raise InvalidRequest("params", f"must be SamplingParams, got {type(wanted).__name__}")
                text, ids = self._tokens(prompt)
                request = Request(str(self._num_requests + i), ids, wanted)
                self._core.check(request)
                if wanted.guide is not None:
                    self._engine.guides.check(wanted.guide)
            except InvalidRequest as error:
                if len(prompts) == 1:
                    raise
                place = f"prompts[{i}]" if error.field == "prompt" else f"prompts[{i}] {error.field}"
                raise type(error)(place, str(error).removeprefix(f"{error.field}: ")) from None
            batch.append(request, text)
        self._num_requests += len(prompts)
        return batch

    def _tokens(self, prompt: Any) -> tuple[str | None, Sequence[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if not isinstance(prompt, (list, tuple, array)):
            raise InvalidRequest("prompt", f"must be a text or a list of token ids, got {type(prompt).__name__}")
        return None, tuple(prompt)

    # ── from steps to outputs ──

    def _finish(self, batch: _Batch, progress: bool) -> list[RequestOutput]:
        with closing(self._run(batch)) as events, _progress_bar(batch) if progress else nullcontext() as show:
            for _ in events:
                if show is not None:
                    show()
        return [live.output for live in batch.live]

    def _run(self, batch: _Batch) -> Generator[StreamEvent, None, None]:
        """Queue the batch, step until it is done, and abort what is left if that is cut short."""
        uninterrupted = _Uninterrupted()
        try:
            with uninterrupted:
                for live in batch.live:
                    self._core.add(live.request)
                    self._live[live.request.request_id] = live
                    live.queued_at = time.monotonic()
            while batch.num_open:
                with uninterrupted:
                    self._step()
                if batch.num_open and not self._core.has_work:
                    raise OctavoError("requests were dropped: the engine was closed, or another call's step failed")
                while batch.events:
                    yield batch.events.popleft()
        finally:
            with uninterrupted:
                for live in batch.live:
                    if self._live.pop(live.request.request_id, None) is not None:
                        self._core.abort(live.request.request_id)

    def _step(self) -> None:
        """One step for all that is running, whichever call it belongs to."""
        outputs = self._core.step(now=time.monotonic())
        now = time.monotonic()
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is None or live.output.outputs[output.index].finish_reason is not None:
                continue
            if live.take(output, now):
                self._core.finish(output.request_id, output.index)
            if live.output.finished:
                del self._live[output.request_id]


class _Batch:
    """The requests of one call, what is new of them, and how many are not finished."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.live: list[_Live] = []
        self.events: deque[StreamEvent] = deque()
        self.num_open = 0
        self.num_tokens = 0

    def append(self, request: Request, prompt: str | None) -> None:
        self.live.append(_Live(self, len(self.live), request, prompt))
        self.num_open += 1


class _Live:
    """A request under way: its output so far."""

    def __init__(self, batch: _Batch, prompt_index: int, request: Request, prompt: str | None) -> None:
        self.request = request
        self.queued_at = 0.0
        self._batch = batch
        self._prompt_index = prompt_index
        params, ids = request.params, list(request.prompt_token_ids)
        scored = params.logprobs is not None
        self._texts = [ChoiceText(batch.tokenizer.detokenizer(ids), params) for _ in range(params.n)]
        self.output = RequestOutput(
            request.request_id,
            prompt,
            ids,
            [
                Completion(index, cumulative_logprob=0.0 if scored else None, logprobs=[] if scored else None)
                for index in range(params.n)
            ],
        )

    def take(self, news: Output, now: float) -> bool:
        """Take an engine's output in; whether its text met a stop string, so that the engine has to end the choice."""
        params, choice, metrics = self.request.params, self.output.outputs[news.index], self.output.metrics
        ids = [token.token_id for token in news.new_tokens]
        text, num_tokens, stop = self._texts[news.index].push(ids, news.finish_reason)
        ids = ids[:num_tokens]
        choice.text += text
        choice.token_ids += ids
        choice.score = news.score
        if choice.logprobs is not None and params.logprobs is not None:
            taken = news.new_tokens[:num_tokens]
            choice.logprobs += [self._logprobs(token, params.logprobs) for token in taken]
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + sum(token.logprob for token in taken)
        if stop is not None:
            choice.finish_reason, choice.stop_reason = "stop", stop
        elif news.finish_reason is not None:
            choice.finish_reason = news.finish_reason
            if news.finish_reason == "stop" and ids[-1] in params.stop_token_ids and not self._is_end(ids[-1]):
                choice.stop_reason = ids[-1]
        if news.prompt_logprobs is not None and params.prompt_logprobs is not None:
            scores = [self._logprobs(token, params.prompt_logprobs) for token in news.prompt_logprobs]
            self.output.prompt_logprobs = [None, *scores]
        metrics.num_cached_tokens = news.num_cached_tokens
        metrics.num_preemptions = max(metrics.num_preemptions, news.num_preemptions)
        if metrics.time_to_first_token_s is None:
            metrics.time_to_first_token_s = now - self.queued_at
        self._batch.num_tokens += len(ids)
        self._batch.events.append(
            StreamEvent(self._prompt_index, news.index, text, ids, choice.finish_reason, choice.stop_reason)
        )
        if choice.finish_reason is not None and self.output.finished:
            metrics.total_s = now - self.queued_at
            self._batch.num_open -= 1
        return stop is not None and news.finish_reason is None

    def _is_end(self, token_id: int) -> bool:
        return not self.request.params.ignore_eos and token_id in self._batch.tokenizer.eos_token_ids

    def _logprobs(self, token: Sampled, num_top: int) -> Logprobs:
        text = self._batch.tokenizer.token_text
        scores = {token.token_id: Logprob(token.logprob, token.rank, text(token.token_id))}
        for rank, (token_id, logprob) in enumerate(token.top[:num_top], 1):
            scores.setdefault(token_id, Logprob(logprob, rank, text(token_id)))
        return scores


def _listed(prompts: Any) -> list[Prompt]:
    """One prompt or many, as many. A list whose first item is a number is one prompt's tokens."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple, array)):
        raise InvalidRequest("prompt", f"must be a text or a list, got {type(prompts).__name__}")
    if len(prompts) and not isinstance(prompts[0], (str, list, tuple, array)):
        return [prompts]
    return list(prompts)


class _Uninterrupted:
    """Puts Ctrl-C off to the end of a block, so that it cannot tear the engine's books in the middle of a change.

    One serves many blocks, as asking who handles it is slow. Handlers that are not Python's are left alone.
    """

    def __init__(self) -> None:
        self._applies = callable(signal.getsignal(signal.SIGINT))
        self._entered = self._caught = False
        self._handler: Any = None  # whose turn it is at the end of the block

    def __enter__(self) -> None:
        if self._applies and threading.current_thread() is threading.main_thread():
            self._entered, self._caught = True, False
            self._handler = signal.signal(signal.SIGINT, self._catch)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._entered:
            return
        self._entered = False
        # None is one that was installed meanwhile and is not Python's: it cannot be put back
        signal.signal(signal.SIGINT, signal.default_int_handler if self._handler is None else self._handler)
        if self._caught and kind is None:
            signal.raise_signal(signal.SIGINT)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught = True


@contextmanager
def _progress_bar(batch: _Batch) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(batch.live))

        def show() -> None:
            bar.update(task, completed=len(batch.live) - batch.num_open, description=f"{batch.num_tokens:,} tokens")

        yield show
