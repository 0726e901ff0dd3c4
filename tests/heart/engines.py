"""Engines over the token executor, and what each request must answer whatever happens around it."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping

from octavo.cache.manager import CacheManager
from octavo.cache.tiers import Costs
from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.scheduler.scheduler import Scheduler
from octavo.types import Draw, Output, Request, SamplingParams
from tests.heart.token_executor import TokenExecutor

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def make_engine(
    num_pages: int = 64,
    *,
    block_size: int = 4,
    vocab_size: int = 50,
    max_model_len: int = 10_000,
    enable_prefix_caching: bool = True,
    eos: frozenset[int] = frozenset(),
    scheduling_policy: str = "fcfs",
    host_pages: int = 0,
    disk_pages: int = 0,
    costs: Costs | None = None,
    session_ttl: float = 0.0,
    kv_quota: float = 1.0,
    max_pinned_fraction: float = 0.5,
    moves: Mapping[str, int] | None = None,
    executor: type[TokenExecutor] = TokenExecutor,
    **options: int,
) -> EngineCore:
    """`moves` are the token executor's ways with moves."""
    config = EngineConfig(
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
        scheduling_policy=scheduling_policy,
        **options,
    )
    cache = CacheManager(
        num_pages,
        block_size,
        enable_prefix_caching=enable_prefix_caching,
        num_host_pages=host_pages,
        num_disk_pages=disk_pages,
        costs=costs,
        session_ttl=session_ttl,
        kv_quota=kv_quota,
        max_pinned_fraction=max_pinned_fraction,
    )
    scheduler = Scheduler(config, cache, max_model_len=max_model_len, vocab_size=vocab_size, eos_token_ids=eos)
    return EngineCore(scheduler, executor(num_pages, block_size, vocab_size, **(moves or {})), audit=True)


def executor_of(engine: EngineCore) -> TokenExecutor:
    executor = engine._executor
    assert isinstance(executor, TokenExecutor)
    return executor


def run(engine: EngineCore, requests: list[Request], max_steps: int = 100_000) -> dict[str, dict[int, list[Output]]]:
    """Serve the requests to the end: outputs by request and choice."""
    for request in requests:
        engine.add(request)
    outputs: dict[str, dict[int, list[Output]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        for output in engine.step():
            outputs[output.request_id][output.index].append(output)
    raise AssertionError(f"not finished after {max_steps} steps")


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token.token_id for output in outputs for token in output.new_tokens]


def expected(engine: EngineCore, request: Request, choice: int = 0) -> list[int]:
    """What the request must answer: computed from its tokens alone, without pages or scheduler."""
    params, executor = request.params, executor_of(engine)
    assert params.seed is not None or params.greedy
    tokens = array("i", request.prompt_token_ids)
    seed = (params.seed or 0) + choice
    for _ in range(params.max_tokens or 0):
        tokens.append(executor.choose(tokens, Draw(params, seed, tokens, 0, 0)).token_id)
    return list(tokens[len(request.prompt_token_ids) :])
