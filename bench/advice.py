"""Whether advice holds on a real engine: each kind of work served by the recommended configuration and by others.

    python bench/advice.py smollm2-135m --only mixed uniform --json advice.json

Six kinds of work (octavo/bench/trials.py) are served by all of a small sweep of configurations, in turn, round after
round, there and back, each round with other tokens. Advice is asked for with the calibration of this machine, made
first if there is no such file. Told is, for each kind, the goal's seconds of every configuration by the median of its
rounds, and how far the recommended one is from the best. A request is timed from when it is due; a turn waits for its
session's last answer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from octavo.allowance import available_memory
from octavo.bench import trials
from octavo.bench.calibrate import calibrate
from octavo.bench.machine import machine
from octavo.bench.trials import ARCHETYPES, Archetype, Turn, arrivals_of, prompts_of
from octavo.config import EngineConfig
from octavo.engine.llm import Engine, assemble
from octavo.engine.sizing import GIB
from octavo.kv_format import KVFormat
from octavo.models.catalog import resolve
from octavo.models.weights import Checkpoint, open_checkpoint
from octavo.planner.advisor import GOALS, Result
from octavo.planner.known import Shape
from octavo.simulator.cost import Measured
from octavo.types import Request, SamplingParams


def serve(engine: Engine, turns: Sequence[Turn], seed: int) -> Result:
    """Serve the turns at their times."""
    core, prompt = engine.core, prompts_of(turns, engine.model.vocab_size, seed)
    answers: dict[int, list[int]] = {turn.session: [] for turn in turns}
    ends: dict[int, tuple[float, float]] = {}  # of each turn: to its first token, and to its last
    waiting, busy = list(range(len(turns))), set()
    running: list[int] = []
    before, preempted = core.stats[1].hit_tokens, core.stats[0].num_preemptions
    num_prompt, first = 0, {}
    start = time.perf_counter()
    while waiting or core.has_work:
        now = time.perf_counter() - start
        for number in [number for number in waiting if turns[number].at <= now and turns[number].session not in busy]:
            turn = turns[number]
            if turn.session in busy:  # another turn of it has just begun
                continue
            tokens = prompt(number, answers[turn.session])
            params = SamplingParams(temperature=0, max_tokens=turn.answer, ignore_eos=True)
            core.add(Request(str(number), tokens, params))
            answers[turn.session] = []
            num_prompt += len(tokens)
            busy.add(turn.session)
            waiting.remove(number)
        if not core.has_work:
            time.sleep(max(turns[waiting[0]].at - now, 0))
            continue
        outputs = core.step(now=time.monotonic())
        running.append(core.scheduler.num_running)
        now = time.perf_counter() - start
        for output in outputs:
            number = int(output.request_id)
            turn = turns[number]
            answers[turn.session] += [token.token_id for token in output.new_tokens]
            first.setdefault(number, now - turn.at)
            if output.finish_reason is not None:
                ends[number] = (first[number], now - turn.at)
                busy.remove(turn.session)
    seconds = time.perf_counter() - start
    firsts, wholes = zip(*ends.values(), strict=True)
    return Result(
        output_tokens_per_s=sum(turn.answer for turn in turns) / seconds,
        request_s=statistics.fmean(wholes),
        request_p99_s=max(wholes),
        first_token_p99_s=max(firsts),
        running=statistics.fmean(running),
        most_running=max(running),
        hit_rate=(core.stats[1].hit_tokens - before) / num_prompt,
        num_preemptions=core.stats[0].num_preemptions - preempted,
        num_refused=0,
    )


def sweep(base: EngineConfig) -> dict[str, EngineConfig]:
    """Configurations that differ from the usual one in a knob each."""
    host_gib = 4 * (base.kv_cache_memory_bytes or 0) / GIB
    return {
        "as usual": base,
        "reservations": replace(base, kv_layout="contiguous"),
        "pages of 64": replace(base, block_size=64),
        "16 at once": replace(base, max_num_seqs=16),
        "steps of 512": replace(base, max_num_batched_tokens=512),
        "no prefix cache": replace(base, enable_prefix_caching=False),
        "int8": replace(base, kv_cache_dtype="int8"),
        "a host tier": replace(base, swap_space=host_gib),
    }


def compare(kind: Archetype, checkpoint: Checkpoint, cost: Measured, rounds: int, against: list[str]) -> dict[str, Any]:
    model = checkpoint.config
    memory = kind.pool_tokens * KVFormat("bf16", model.num_layers, model.num_kv_heads, model.head_dim, 16).token_bytes
    base = EngineConfig(max_model_len=kind.max_model_len, kv_cache_memory_bytes=memory)
    shape = Shape(cost.model, model, weight_bytes=checkpoint.stored_bytes)
    arrivals, cost_of = arrivals_of(kind.turns), trials.timed(shape, cost)
    found = trials.advice(kind.name, shape, base, arrivals, available_memory(), cost_of, goal=kind.goal)
    configs = sweep(base)
    name = next((name for name, config in configs.items() if config == found.config), "as advised")
    configs = {name: found.config, **{one: configs[one] for one in against if one != name}}
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    with ExitStack() as stack:
        engines = {}
        for one, config in configs.items():
            engines[one] = assemble(checkpoint, config)
            stack.callback(engines[one].core.close)
        for number in range(rounds):
            for one in list(engines)[:: -1 if number % 2 else 1]:
                engine = engines[one]
                engine.core.cache.drop_cached()
                result = serve(engine, kind.turns, seed=100 * number + 7)
                seconds[one].append(GOALS[kind.goal](result))
                print(f"{kind.name}: {one}: {seconds[one][-1]:.4f} s", file=sys.stderr)
    medians = {one: statistics.median(of) for one, of in seconds.items()}
    predicted = {
        one: GOALS[kind.goal](trials.simulated(config, cost_of, arrivals, model.context_length))
        for one, config in configs.items()
    }
    return {
        "goal": kind.goal,
        "advised": name,
        "config": asdict(found.config),
        "pays": found.pays,
        "paging": list(found.paging),
        "seconds": seconds,
        "predicted": predicted,
        "of_best": medians[name] / min(medians.values()),
        "best": min(medians, key=lambda one: medians[one]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", type=Path, default=Path("calibration.json"))
    parser.add_argument("--only", nargs="+", choices=ARCHETYPES, default=list(ARCHETYPES))
    parser.add_argument("--against", nargs="+", choices=sweep(EngineConfig()), help="a part of the sweep")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="figures are added to those of an earlier call")
    asked = parser.parse_args()
    path = resolve(asked.model)
    if not asked.calibration.exists():
        print("calibrating", file=sys.stderr)
        fit = calibrate(path, asked.model, EngineConfig(max_num_seqs=32), 1)
        fit.cost.save(asked.calibration, machine=machine(), error=fit.error)
    cost, checkpoint = Measured.open(asked.calibration), open_checkpoint(path)
    figures = json.loads(asked.json.read_text()) if asked.json is not None and asked.json.exists() else {}
    against = asked.against or list(sweep(EngineConfig()))
    for name in asked.only:
        figures[name] = {"machine": machine(), **compare(ARCHETYPES[name], checkpoint, cost, asked.rounds, against)}
        if asked.json is not None:
            asked.json.write_text(json.dumps(figures, indent=1) + "\n")
    for name, of in figures.items():
        told = f"{name:<10} {of['goal']:<11} advised: {of['advised']:<16} {of['of_best']:.2f} of the best, {of['best']}"
        print(told)
        for one, seconds in of["seconds"].items():
            spread = " ".join(f"{value:8.4f}" for value in seconds)
            print(f"    {one:<16} {spread} s, simulated {of['predicted'][one]:8.4f} s")


if __name__ == "__main__":
    main()
