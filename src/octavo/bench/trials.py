"""Six kinds of work that servers see, and advice on any work, by trials in the simulator.

Owns the archetypes on which advice is checked, in simulation and on a real engine, and joins the advisor to the
simulator. What comes of a trial follows from the configuration and the arrivals alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from octavo.bench.workloads import log_normal
from octavo.config import EngineConfig
from octavo.engine.sizing import GIB
from octavo.errors import ConfigError, InvalidRequest
from octavo.gpus import Gpu
from octavo.planner.advisor import Advice, Result, Workload, advise
from octavo.planner.known import Shape
from octavo.planner.memory import Demand, Device, plan
from octavo.simulator.cost import Cost, Measured, Sheet
from octavo.simulator.simulate import Simulation, engine
from octavo.simulator.traces import Arrival, own_token, paced, tokens_of


class Turn(NamedTuple):
    """At a time in seconds a session says so many new tokens after all before, and gets an answer of so many.

    The first `shared` tokens of a first message are those of all sessions.
    """

    at: float
    session: int
    message: int
    answer: int
    shared: int = 0


class Archetype(NamedTuple):
    """A kind of work: what it is judged by, the longest sequence, and memory for so many tokens."""

    name: str
    about: str
    goal: str
    max_model_len: int
    pool_tokens: int
    turns: list[Turn]


def _mixed(count: int) -> list[Turn]:
    chance = random.Random(1)
    lengths = [(log_normal(chance, 80, 4, 384), log_normal(chance, 70, 4, 256)) for _ in range(count)]
    return [Turn(0.0, number, *one) for number, one in enumerate(lengths)]


def _rounds(sessions: int, rounds: int, gap_s: float, first: int, message: int, answer: int) -> list[Turn]:
    """Sessions take turns, evenly."""
    return [
        Turn(gap_s * (number * sessions + session), session, message if number else first, answer)
        for number in range(rounds)
        for session in range(sessions)
    ]


ARCHETYPES = {
    kind.name: kind
    for kind in (
        Archetype("chat", "one person, six turns", "latency", 1024, 4096, _rounds(1, 6, 1.0, 60, 40, 32)),
        Archetype("mixed", "a batch of all lengths", "throughput", 640, 3 * 640, _mixed(32)),
        Archetype(
            "uniform", "a batch of full length", "throughput", 256, 8 * 256,
            [Turn(0.0, number, 208, 48) for number in range(16)],
        ),
        Archetype(
            "system", "all begin with one system prompt", "throughput", 512, 4 * 512,
            [Turn(0.0, number, 272, 24, shared=256) for number in range(24)],
        ),
        Archetype(
            "documents", "long documents, short answers", "throughput", 2048, 2 * 2048,
            [Turn(0.0, number, 1000, 16) for number in range(6)],
        ),
        Archetype(
            "agents", "six sessions return after a pause", "latency", 1024, 1024,
            _rounds(6, 4, 0.5, 256, 80, 16),
        ),
    )
}  # fmt: skip


def arrivals_of(turns: Sequence[Turn]) -> list[Arrival]:
    """The turns as requests. A conversation is one run of tokens, answers included, and what is shared another."""
    said: dict[int, int] = {}
    found = []
    for turn in turns:
        length = said.get(turn.session, 0) + turn.message
        said[turn.session] = length + turn.answer
        prompt = tokens_of(0, turn.shared) + tokens_of(turn.session + 1, length - turn.shared)
        found.append(Arrival(turn.at, prompt, turn.answer, own_token(turn.session + 1) if turn.shared else 0))
    return found


def of_lengths(lengths: str, shared: int, count: int, rate: float | None, seed: int) -> list[Arrival]:
    """So many requests, of lengths such as 100+20,4000+10 in turn. Raises InvalidRequest."""
    try:
        pairs = [(int(prompt), int(answer)) for prompt, answer in (one.split("+") for one in lengths.split(","))]
    except ValueError:
        raise InvalidRequest("lengths", f"must look like 161+338,1000+20, got {lengths!r}") from None
    if min(map(min, pairs)) < 1:
        raise InvalidRequest("lengths", f"must be numbers of tokens above 0, got {lengths!r}")
    if any(pair[0] < shared for pair in pairs):
        raise InvalidRequest("shared_tokens", f"{shared:,} are more than a prompt has")
    turns = [Turn(0.0, number, *pairs[number % len(pairs)], shared) for number in range(count)]
    return list(paced(arrivals_of(turns), rate or 0.0, seed))


def prompts_of(turns: Sequence[Turn], vocab: int, seed: int = 1) -> Callable[[int, Sequence[int]], list[int]]:
    """The same for a real engine: a function from a turn's number, and what its session was answered before, to the
    prompt, of random tokens.
    """
    chance, common = random.Random(seed), random.Random(seed + 1)
    system = [common.randrange(100, vocab) for _ in range(max(turn.shared for turn in turns))]
    said: dict[int, list[int]] = {}

    def prompt(number: int, answer: Sequence[int]) -> list[int]:
        turn = turns[number]
        before = [*said.get(turn.session, system[: turn.shared]), *answer]
        new = turn.message if turn.session in said else turn.message - turn.shared
        said[turn.session] = before + [chance.randrange(100, vocab) for _ in range(new)]
        return list(said[turn.session])

    return prompt


# ── advice ───────────────────────────────────────────────────────────────────────────────────────────────────────

ALIKE = 16
"""Tokens by which prompts are told apart."""
CostOf = Callable[[EngineConfig], Cost]


def sheet(shape: Shape, gpu: Gpu, count: int) -> CostOf:
    """Costs by a data sheet. Raises ConfigError for a mixture of experts."""
    if shape.experts > 1:
        raise ConfigError("model", f"has {shape.experts} experts: what its steps take is not known")

    weights = shape.weight_bytes or (None if shape.feed_forward is None else 2 * shape.num_parameters)

    def cost(config: EngineConfig) -> Cost:
        pages = config.kv_format(shape.model)
        return Sheet(shape.model, gpu, count, pages.dtype, pages.block_size, weight_bytes=weights)

    return cost


def timed(shape: Shape, calibration: Measured) -> CostOf:
    """Costs as measured, whatever pages hold. Raises ConfigError for another model's."""
    c, timed = shape.model, calibration.format
    if (c.num_layers, c.num_kv_heads, c.head_dim) != (timed.num_layers, timed.num_kv_heads, timed.head_dim):
        raise ConfigError("calibration", f"is of another model, {calibration.model}")
    return lambda config: calibration.holding(config.kv_format(c))


def advice(
    name: str,
    shape: Shape,
    config: EngineConfig,
    arrivals: Sequence[Arrival],
    where: Device | int,
    cost_of: CostOf,
    *,
    goal: str = "",
    quality_loss: bool = False,
    host_bytes: int | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Advice:
    """Advice by simulation: all trials have the memory that `config` would get. Raises ConfigError.

    `host_bytes`: what a host tier may take; None for four times the pool.
    """
    sums = plan(shape, config, [], where)
    if not sums.num_pages:
        raise ConfigError(
            "memory", f"{sums.weight_bytes:,} bytes of weights, and activations, leave no room for a page"
        )

    def trial(candidate: EngineConfig) -> Result:
        candidate = replace(candidate, kv_cache_memory_bytes=sums.pool_bytes, max_model_len=sums.max_model_len)
        return simulated(candidate, cost_of, arrivals, shape.model.context_length)

    most = 4 * sums.pool_bytes if host_bytes is None else host_bytes
    if isinstance(where, int):
        most = min(most, where - sums.weight_bytes - sums.pool_bytes)
    sizes = {round(min(share * sums.pool_bytes, most) / GIB, 3) for share in (1, 2, 4)}
    demands = [Demand(len(one.prompt), one.num_output) for one in arrivals]
    alike = len({one.prompt[:ALIKE].tobytes() for one in arrivals}) < len(arrivals)
    work = Workload(name, demands, all(one.at == 0 for one in arrivals), alike)
    host_gib = sorted(size for size in sizes if size > 0)
    return advise(work, shape, config, where, trial, goal=goal, quality_loss=quality_loss, host_gib=host_gib, tell=tell)


def simulated(config: EngineConfig, cost_of: CostOf, arrivals: Sequence[Arrival], context_length: int) -> Result:
    """What the configuration would do. Raises ConfigError where it cannot be."""
    config = config.for_model(context_length)
    simulation = Simulation(engine(config, cost_of(config)), arrivals)
    simulation.run()
    told, figures = simulation.report(), simulation.figures
    nothing = {"mean": math.inf, "p99": math.inf}
    whole, first = told["request_s"] or nothing, told["first_token_s"] or nothing
    return Result(
        output_tokens_per_s=told["output_tokens_per_s"],
        request_s=whole["mean"],
        request_p99_s=whole["p99"],
        first_token_p99_s=first["p99"],
        running=(figures.whole.total - figures.queue.total) / max(simulation.now, 1e-9),
        most_running=figures.most_running,
        hit_rate=told["hit_rate"],
        num_preemptions=told["num_preemptions"],
        num_refused=told["refused"],
    )
