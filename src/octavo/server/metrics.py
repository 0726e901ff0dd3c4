"""What /metrics says: vLLM's names and meanings under a chosen namespace, and a few of our own.

Two sources. The engine's gauges and counters are read from its latest statistics when somebody scrapes, so that they
are right when nothing runs. What only the server's side sees (latencies, ends, HTTP codes) is noted as it happens, in a
registry of this object's own. Nothing here waits, reads a request's text, or grows with the number of requests.

As in vLLM, a choice counts as a request wherever an end or a latency is counted; a prompt is counted once.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, Self

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.errors import ConfigError
from octavo.server.recent import Recent
from octavo.types import Tier

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM
    from octavo.engine.process import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
End = Literal["stop", "length", "abort", "error"]
ENDS = ("stop", "length", "abort", "error")

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = tuple(float(2**exponent) for exponent in (0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14))
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)


class Histogram:
    """Counts of observations up to each bound, and their sum: what prometheus_client keeps, without its locks."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics:
    """Everything /metrics shows. All methods are cheap; they belong to the thread of the server's loop.

    `engine_stats` gives the latest statistics of the engine; `cache_config` is what vLLM calls the cache's
    configuration: names to printable values. Raises ConfigError for a namespace Prometheus cannot read.
    """

    def __init__(
        self,
        namespace: str,
        model_name: str,
        max_model_len: int,
        engine_stats: Callable[[], EngineStats],
        cache_config: Mapping[str, object],
    ) -> None:
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", namespace):
            raise ConfigError(
                "metrics_namespace", f"must be letters, digits and _, not starting with a digit; got {namespace!r}"
            )
        lengths = up_to(max_model_len)
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.token_s = Histogram(TOKEN_S)
        self.mean_token_s = Histogram(TOKEN_S)
        self.request_s = Histogram(REQUEST_S)
        self.queue_s = Histogram(REQUEST_S)
        self.prefill_s = Histogram(REQUEST_S)
        self.running_s = Histogram(REQUEST_S)
        self.decode_s = Histogram(REQUEST_S)
        self.prompt_length = Histogram(lengths)
        self.answer_length = Histogram(lengths)
        self.longest_answer = Histogram(lengths)
        self.max_tokens = Histogram(lengths)
        self.n = Histogram(CHOICES)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.recent_first_token_s = Recent()
        self.recent_token_s = Recent()
        self.prompt_tokens = 0
        self.responses: dict[int, int] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._registry.register(_Page(self, namespace, model_name, engine_stats, cache_config))

    @classmethod
    def of(cls, llm: AsyncLLM, namespace: str, model_name: str) -> Self:
        """Metrics of a running engine."""
        stats, config = llm.stats(), llm.config
        tokens = stats.num_pages * config.block_size
        self = cls(
            namespace,
            model_name,
            llm.max_model_len,
            llm.stats,
            {
                "block_size": config.block_size,
                "cache_dtype": config.kv_cache_dtype,
                "enable_prefix_caching": config.enable_prefix_caching,
                "num_gpu_blocks": stats.num_pages,
                "num_cpu_blocks": stats.tiers.pages[Tier.HOST].total,
                "kv_cache_memory_bytes": stats.num_pages * stats.page_bytes,
                "kv_cache_size_tokens": tokens,
                "kv_cache_max_concurrency": tokens / llm.max_model_len,
            },
        )
        llm.on_step = self.step_tokens.observe
        return self

    def request_started(
        self, num_prompt_tokens: int, n: int, max_tokens: int | None, arrived: float | None = None
    ) -> RequestMetrics:
        """Note a prompt that goes to the engine. `arrived` is when it came, by time.monotonic(); None means now."""
        return RequestMetrics(self, num_prompt_tokens, n, max_tokens, time.monotonic() if arrived is None else arrived)

    def responded(self, code: int) -> None:
        """Note the status code of an HTTP response, once for each."""
        self.responses[code] = self.responses.get(code, 0) + 1

    def page(self) -> bytes:
        """The metrics in Prometheus's text format; see CONTENT_TYPE."""
        return generate_latest(self._registry)


class RequestMetrics:
    """One prompt on its way: `tokens` with each news of a choice, `finished` at each choice's end, `close` always.

    An end by "abort" or "error" gives no latencies: an abandoned request says nothing about how long one takes. How
    often they happen is counted where requests end, in AsyncLLM.
    """

    __slots__ = ("_arrived", "_choices", "_longest", "_max_tokens", "_metrics", "_num_open", "_num_prompt_tokens")

    def __init__(
        self, metrics: Metrics, num_prompt_tokens: int, n: int, max_tokens: int | None, arrived: float
    ) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._max_tokens = max_tokens
        self._arrived = arrived
        self._choices = [_Choice() for _ in range(n)]
        self._num_open = n
        self._longest = 0

    def tokens(self, index: int, count: int, now: float, queue_s: float = 0.0) -> None:
        """`count` new tokens of a choice, which the engine had at `now`, however late its client takes them. `queue_s`,
        which counts with the first, is how long the request waited for a place.
        """
        choice, metrics = self._choices[index], self._metrics
        if choice.num_tokens == 0:
            if self._longest == 0:
                metrics.prompt_tokens += self._num_prompt_tokens
            metrics.first_token_s.observe(now - self._arrived)
            metrics.recent_first_token_s.observe(now - self._arrived, now)
            choice.first, choice.queue_s = now, queue_s
        else:
            between = (now - choice.last) / max(count, 1)
            metrics.token_s.observe(between)
            metrics.recent_token_s.observe(between, now)
        choice.last = now
        choice.num_tokens += count
        self._longest = max(self._longest, choice.num_tokens)

    def finished(self, index: int, reason: End) -> None:
        """A choice's end; a second one is ignored."""
        choice, metrics = self._choices[index], self._metrics
        if choice.done:
            return
        choice.done = True
        self._num_open -= 1
        if reason in ("stop", "length") and choice.num_tokens:
            decode_s = choice.last - choice.first
            metrics.request_s.observe(choice.last - self._arrived)
            metrics.queue_s.observe(choice.queue_s)
            metrics.prefill_s.observe(max(choice.first - self._arrived - choice.queue_s, 0.0))
            metrics.decode_s.observe(decode_s)
            metrics.running_s.observe(max(choice.last - self._arrived - choice.queue_s, 0.0))
            if choice.num_tokens > 1:
                metrics.mean_token_s.observe(decode_s / (choice.num_tokens - 1))
            metrics.prompt_length.observe(self._num_prompt_tokens)
            metrics.answer_length.observe(choice.num_tokens)
        if self._num_open == 0:
            metrics.n.observe(len(self._choices))
            metrics.longest_answer.observe(self._longest)
            if self._max_tokens is not None:
                metrics.max_tokens.observe(self._max_tokens)

    def close(self, reason: End = "abort") -> None:
        """The request is over: whatever has not finished ends for this reason."""
        for index in range(len(self._choices)):
            self.finished(index, reason)


class _Choice:
    __slots__ = ("done", "first", "last", "num_tokens", "queue_s")

    def __init__(self) -> None:
        self.num_tokens = 0
        self.first = self.last = self.queue_s = 0.0
        self.done = False


class _Page(Collector):
    """Writes the page: a snapshot of the engine's statistics and of a Metrics."""

    def __init__(
        self,
        metrics: Metrics,
        namespace: str,
        model_name: str,
        engine_stats: Callable[[], EngineStats],
        cache_config: Mapping[str, object],
    ) -> None:
        self._metrics = metrics
        self._prefix = namespace + ":"
        self._labels = {"model_name": model_name, "engine": "0"}
        self._engine_stats = engine_stats
        self._cache_config = {name: str(value) for name, value in cache_config.items()}

    def collect(self) -> Iterator[Metric]:
        stats, seen = self._engine_stats(), self._metrics
        pages = {"referenced": stats.pages_referenced, "cached": stats.pages_cached, "free": stats.pages_free}
        holders = {"running": "referenced", "cached": "cached", "free": "free"}

        yield self._gauge("num_requests_running", "Sequences in the running batch.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences waiting for a place or for pages.", stats.num_waiting)
        usage = stats.pages_referenced / max(stats.num_pages, 1)
        yield self._gauge("kv_cache_usage_perc", "Share of the pool's pages that are held, 0 to 1.", usage)
        yield self._gauge("kv_pages", "Pages by state.", pages, "state")
        sizes = {holder: pages[state] * stats.page_bytes for holder, state in holders.items()}
        yield self._gauge("kv_cache_bytes", "Bytes of the page pool by class of holder.", sizes, "holder")
        slots = {"filled": stats.slots_filled, "unused": stats.slots_unused}
        yield self._gauge("kv_slots", "Token slots of running sequences' pages by state.", slots, "state")
        spared = "Pages left to running sequences, which are expected to need them, while others wait."
        yield self._gauge("kv_pages_spared", spared, stats.pages_spared)
        yield self._gauge("cache_config_info", "The cache's configuration.", 1, **self._cache_config)

        yield self._counter("prompt_tokens", "Tokens of the prompts that were computed or found.", seen.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.scheduler.generation_tokens)
        yield self._counter(
            "num_preemptions", "Times a sequence gave its pages up to another.", stats.scheduler.num_preemptions
        )
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.cache.queried_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.cache.hit_tokens)
        yield self._counter(
            "prefix_cache_resumed_tokens", "Tokens found again after a preemption; no hits.", stats.cache.resumed_tokens
        )
        yield self._counter("kv_pages_evicted", "Cached pages given to somebody else.", stats.cache.pages_evicted)
        yield from self._tiers(stats)
        ends = {reason: stats.finished.get(reason, 0) for reason in ENDS}
        yield self._counter("request_success", "Ended requests by reason.", ends, "finished_reason")
        yield self._counter(
            "http_responses", "HTTP responses by status code.", {str(k): v for k, v in seen.responses.items()}, "code"
        )

        yield self._histogram("iteration_tokens_total", "Tokens computed in a step.", seen.step_tokens)
        yield self._histogram("time_to_first_token_seconds", "From arrival to the first token.", seen.first_token_s)
        yield self._histogram("inter_token_latency_seconds", "Between two tokens of a choice.", seen.token_s)
        yield self._histogram(
            "time_per_output_token_seconds", "inter_token_latency_seconds by its older name.", seen.token_s
        )
        yield self._histogram(
            "request_time_per_output_token_seconds", "A request's mean time between tokens.", seen.mean_token_s
        )
        yield self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", seen.request_s)
        yield self._histogram("request_queue_time_seconds", "From queued to first scheduled.", seen.queue_s)
        yield self._histogram("request_prefill_time_seconds", "From scheduled to the first token.", seen.prefill_s)
        yield self._histogram("request_decode_time_seconds", "From the first token to the last.", seen.decode_s)
        yield self._histogram("request_inference_time_seconds", "From scheduled to the last token.", seen.running_s)
        yield self._histogram("request_prompt_tokens", "Prompt lengths.", seen.prompt_length)
        yield self._histogram("request_generation_tokens", "Answer lengths.", seen.answer_length)
        yield self._histogram(
            "request_max_num_generation_tokens", "The longest choice of each request.", seen.longest_answer
        )
        yield self._histogram("request_params_n", "Parameter n.", seen.n)
        yield self._histogram("request_params_max_tokens", "Parameter max_tokens.", seen.max_tokens)

    def _tiers(self, stats: EngineStats) -> Iterator[Metric]:
        """Of the pool and the tiers below it: what they hold, what was moved, and what bringing it back costs."""
        tiers = stats.tiers
        by_tier = {
            (tier.name.lower(), state): getattr(held, state)
            for tier, held in tiers.pages.items()
            for state in ("referenced", "cached", "free")
        }
        yield self._gauge("kv_tier_pages", "Pages of each tier by state.", by_tier, "tier", "state")
        sizes_by_tier = {names: count * stats.page_bytes for names, count in by_tier.items()}
        yield self._gauge("kv_tier_bytes", "The same in bytes.", sizes_by_tier, "tier", "state")
        pinned = {tier.name.lower(): count for tier, count in tiers.num_pinned.items()}
        yield self._gauge("kv_pages_pinned", "Pages of each tier that pinned sessions hold.", pinned, "tier")
        kept = {tier.name.lower(): count for tier, count in tiers.num_kept.items()}
        yield self._gauge("kv_pages_idle_sessions", "Cached pages that idle sessions may come back for.", kept, "tier")
        yield self._gauge("num_sessions", "Sessions that are remembered.", tiers.num_sessions)
        load_s = {tier.name.lower(): seconds for tier, seconds in tiers.load_s.items()}
        yield self._gauge("kv_load_page_seconds", "Time to bring a page back from a tier.", load_s, "tier")
        yield self._gauge("kv_recompute_token_seconds", "Time to compute a token instead.", tiers.token_s)
        moves = {(source.name.lower(), to.name.lower()): n for (source, to), n in stats.moves.moved.items()}
        yield self._counter("kv_pages_moved", "Pages copied from one tier to another.", moves, "from", "to")
        yield self._counter(
            "kv_page_moves_failed", "Copies that failed, or of damaged pages.", stats.moves.moves_failed
        )
        yield self._counter("kv_pages_dropped", "Cached pages that were forgotten.", stats.moves.pages_dropped)

    def _gauge(
        self, name: str, about: str, value: float | Mapping[Any, float], *by: str, **labels: str
    ) -> GaugeMetricFamily:
        names = [*self._labels, *labels, *by]
        family = GaugeMetricFamily(self._prefix + name, about, labels=names)
        for own, number in _series(value):
            family.add_metric([*self._labels.values(), *labels.values(), *own], number)
        return family

    def _counter(self, name: str, about: str, value: float | Mapping[Any, float], *by: str) -> CounterMetricFamily:
        family = CounterMetricFamily(self._prefix + name, about, labels=[*self._labels, *by])
        for own, number in _series(value):
            family.add_metric([*self._labels.values(), *own], number)
        return family

    def _histogram(self, name: str, about: str, histogram: Histogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(self._prefix + name, about, labels=list(self._labels))
        bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
        family.add_metric(
            list(self._labels.values()),
            list(zip(bounds, accumulate(histogram.counts), strict=True)),
            histogram.total,
        )
        return family


def _series(value: float | Mapping[Any, float]) -> list[tuple[list[str], float]]:
    """Each number with its labels: a mapping's keys are a label, or a tuple of them."""
    if isinstance(value, Mapping):
        return [([key] if isinstance(key, str) else list(key), number) for key, number in value.items()]
    return [([], value)]


def up_to(limit: int) -> tuple[float, ...]:
    """Bounds 1, 2, 5, 10, 20, 50, … that do not pass `limit`."""
    bounds = (digit * 10**power for power in range(len(str(limit))) for digit in (1, 2, 5))
    return tuple(float(bound) for bound in bounds if bound <= limit)
