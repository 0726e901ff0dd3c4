"""Which configuration a workload wants, why, and what each choice gains.

Sums come from memory.py, everything else from trials: `advise` is given a function that tells how a configuration did,
by simulation or by measurement, and never makes a trial itself. It turns one knob after another, as long as that gains.
On a tie the value that stands first wins, so that nothing is recommended without a gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kv_format import whole_block_size
from octavo.planner.known import Shape
from octavo.planner.memory import Demand, Device, Plan, Room, plan, room


class Result(NamedTuple):
    """How a configuration did. Times of requests in seconds; `running`: sequences at once, on average and at most."""

    output_tokens_per_s: float
    request_s: float
    request_p99_s: float
    first_token_p99_s: float
    running: float
    most_running: int
    hit_rate: float
    num_preemptions: int
    num_refused: int


GOALS: dict[str, Callable[[Result], float]] = {
    "throughput": lambda result: 1 / max(result.output_tokens_per_s, 1e-12),
    "latency": lambda result: result.request_s,
    "tail": lambda result: result.request_p99_s,
}
"""Seconds of which less is better: for a token of output, for a request on average, for one of a hundred."""

TIE, QUALITY_TIE = 0.01, 0.03
"""What a change must gain; and one that stores keys and values in fewer bits."""
NOTHING = 0.02
"""Where reservations lose no more than this, paging buys nothing."""
LONG = 1024
"""Tokens from which on attention over larger pages is faster by enough to decide a tie (docs/performance.md)."""
FEW = 4
"""Requests at once that are a low concurrency."""
MAX_PASSES = 3


class Workload(NamedTuple):
    """What is known of some requests: lengths, whether all come at once, whether any begin alike."""

    name: str
    demands: Sequence[Demand]
    at_once: bool
    alike: bool = True


class Recommendation(NamedTuple):
    """One knob: `gain` is what the goal would be with `other` instead, over what it is; None if that cannot be."""

    option: str
    value: Any
    other: Any
    gain: float | None
    reason: str
    tried: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Advice:
    """`config` has the recommended values, `before` is how the one that was asked for did. `paging_gain`: reservations'
    seconds over those of pages, None if reservations cannot be; `paging` says in words whether pages pay.
    """

    workload: str
    goal: str
    config: EngineConfig
    result: Result
    before: Result
    plan: Plan
    room: Room | None
    recommendations: tuple[Recommendation, ...]
    paging_gain: float | None
    pays: bool
    paging: tuple[str, ...]
    num_trials: int

    @property
    def gain(self) -> float:
        """Seconds of the configuration that was asked for, over those of the recommended one."""
        return GOALS[self.goal](self.before) / GOALS[self.goal](self.result)


Measure = Callable[[EngineConfig], Result]
Settings = dict[str, Any]


def advise(
    work: Workload,
    shape: Shape,
    config: EngineConfig,
    where: Device | int,
    measure: Measure,
    *,
    goal: str = "",
    quality_loss: bool = False,
    host_gib: Sequence[float] = (),
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Advice:
    """Search from `config`; raises ConfigError where that cannot be, or where no goal has this name.

    `measure` raises ConfigError for a configuration that cannot be. `host_gib`: sizes that a host tier may have. `tell`
    is told how many trials have been made, of at most how many.
    """
    if (goal := goal or ("throughput" if work.at_once else "latency")) not in GOALS:
        raise ConfigError("goal", f"must be one of {', '.join(GOALS)}; got {goal!r}")
    sums = plan(shape, config, [Demand(1)], where)
    fitting = [demand for demand in work.demands if sum(demand[:2]) - 1 <= sums.reservation_tokens]
    typical = _room(shape, config, sums, fitting) if fitting else None
    knobs = _choices(config, work, typical, quality_loss, host_gib)
    search = _Search(config, knobs, measure, GOALS[goal], tell)
    before = search.result(search.start)
    if before is None:
        measure(config)  # says why
        raise ConfigError("max_model_len", f"no request of this workload fits into {sums.max_model_len:,} tokens")
    best = search.best()
    result = search.result(best)
    assert result is not None
    gain, pays, paging = _paging(search, best, result, sums, typical, goal)
    return Advice(
        workload=work.name,
        goal=goal,
        config=search.config(best) or config,
        result=result,
        before=before,
        plan=sums,
        room=typical,
        recommendations=tuple(_recommendations(search, best, shape, sums, typical)),
        paging_gain=gain,
        pays=pays,
        paging=tuple(paging),
        num_trials=search.num_trials,
    )


def _room(shape: Shape, config: EngineConfig, sums: Plan, demands: Sequence[Demand]) -> Room:
    pages = replace(config, kv_layout="paged").kv_format(shape.model)
    return room(pages, replace(pages, block_size=whole_block_size(sums.max_model_len)), sums.num_pages, demands)


def _choices(
    config: EngineConfig, work: Workload, typical: Room | None, quality_loss: bool, host_gib: Sequence[float]
) -> dict[str, tuple[Any, ...]]:
    """Values of each knob, the one to take on a tie first; none that this work could not tell from others."""
    pages: tuple[int, ...] = (config.block_size, 16, 32, 64, 128)
    if typical is not None and typical.mean_tokens >= LONG:
        pages = (64, *pages)
    dtypes = ("auto", "int8", *(("int4",) if quality_loss else ()))
    found = {
        "max_num_seqs": (config.max_num_seqs, *(count for count in (16, 64, 256, 1024) if count < len(work.demands))),
        "max_num_batched_tokens": (config.max_num_batched_tokens, 512, 1024, 4096, 8192),
        "block_size": pages,
        "kv_cache_dtype": (config.kv_cache_dtype, *(dtypes if config.kv_cache_dtype in dtypes else ())),
        "enable_prefix_caching": (True, False),
        "swap_space": (config.swap_space, 0.0, *(sorted(host_gib) if work.alike else ())),
        "kv_layout": ("paged", "contiguous"),  # last, since reservations exclude the two above
    }
    return {name: tuple(dict.fromkeys(values)) for name, values in found.items()}


class _Search:
    """Trials, each made once."""

    def __init__(
        self,
        config: EngineConfig,
        knobs: Mapping[str, tuple[Any, ...]],
        measure: Measure,
        goal: Callable[[Result], float],
        tell: Callable[[int, int], None],
    ) -> None:
        self.knobs = knobs
        self.start = {name: getattr(config, name) for name in knobs}
        self._config, self._measure, self._goal, self._tell = config, measure, goal, tell
        self._results: dict[EngineConfig, Result | None] = {}
        self._least_refused = -1

    @property
    def num_trials(self) -> int:
        return len(self._results)

    def config(self, settings: Settings) -> EngineConfig | None:
        """None for settings that exclude each other."""
        if settings["kv_layout"] == "contiguous" or not settings["enable_prefix_caching"]:
            settings = settings | {"swap_space": 0.0}
        try:
            return replace(self._config, **settings)
        except ConfigError:
            return None

    def result(self, settings: Settings) -> Result | None:
        """None if it cannot be, or refuses requests that the first configuration served."""
        config = self.config(settings)
        if config is None:
            return None
        if config not in self._results:
            try:
                result: Result | None = self._measure(config)
            except ConfigError:
                result = None
            if result is not None and self._least_refused < 0:
                self._least_refused = result.num_refused
            if result is not None and (result.num_refused > self._least_refused or not result.most_running):
                result = None
            self._results[config] = result
            most = 2 * MAX_PASSES * sum(len(values) - 1 for values in self.knobs.values()) + 1
            self._tell(len(self._results), most)
        return self._results[config]

    def cost(self, settings: Settings) -> float | None:
        result = self.result(settings)
        return None if result is None else self._goal(result)

    def costs(self, name: str, settings: Settings) -> dict[Any, float | None]:
        """Of each value of one knob, the others being as they are."""
        return {value: self.cost(settings | {name: value}) for value in self.knobs[name]}

    def best(self) -> Settings:
        """The better of two searches: with the host tier as it is, and from the largest, as it may take more to pay."""
        starts = [self.start, self.start | {"swap_space": max(self.knobs["swap_space"])}]
        found = [self._climb(start) for start in starts if self.cost(start) is not None]
        ends = [(cost, end) for end in found if (cost := self.cost(end)) is not None]
        least = min(cost for cost, _ in ends)
        return next(end for cost, end in ends if cost <= least * (1 + TIE))

    def _climb(self, best: Settings) -> Settings:
        """Turn the knobs one by one until none gains."""
        for _ in range(MAX_PASSES):
            before = best
            for name in self.knobs:
                tie = QUALITY_TIE if name == "kv_cache_dtype" else TIE
                costs = {value: cost for value, cost in self.costs(name, best).items() if cost is not None}
                least = min(costs.values())
                best = best | {name: next(value for value, cost in costs.items() if cost <= least * (1 + tie))}
            if best == before:
                break
        return best


# ── what is said of it ───────────────────────────────────────────────────────────────────────────────────────────


def _recommendations(
    search: _Search, best: Settings, shape: Shape, sums: Plan, typical: Room | None
) -> Iterator[Recommendation]:
    for name in search.knobs:
        value, costs = best[name], search.costs(name, best)
        cost = costs[value]
        assert cost is not None
        others = [other for other in costs if other != value]
        other = search.start[name]
        if other == value:
            possible = [(costs[one] or float("inf"), place) for place, one in enumerate(others)]
            other = others[min(possible)[1]] if possible else value
        without = costs.get(other)
        tried = {str(one): None if of is None else of / cost for one, of in costs.items()}
        gain = None if without is None else without / cost
        reason = _reason(name, other, search, best, shape, sums, typical)
        yield Recommendation(name, value, other, gain, reason, tried)


def _reason(
    name: str, other: Any, search: _Search, best: Settings, shape: Shape, sums: Plan, typical: Room | None
) -> str:
    result, without = search.result(best), search.result(best | {name: other})
    config = search.config(best)
    assert result is not None and config is not None
    if typical is None:
        return "no request fits into memory"
    value = best[name]
    if name == "kv_layout" and value == "contiguous":
        return f"reservations are never preempted, and leave {typical.contiguous_waste:.0%} of themselves empty"
    if name == "kv_layout":
        reserved = f"reservations of {sums.max_model_len:,} tokens {typical.contiguous_at_once:,}"
        return f"{int(typical.paged_typically):,} such sequences fit into memory in pages, as {reserved}"
    if name == "max_num_seqs":
        return f"{result.most_running:,} ran at once at most, {result.running:,.1f} on average"
    if name == "max_num_batched_tokens":
        prompts = f"prompts have {typical.prompt_tokens:,.0f} tokens on average"
        return f"{prompts}; larger steps hold answers up, smaller ones prompts"
    if name == "block_size":
        empty = value / 2 / (typical.mean_tokens + value / 2)
        held = f"of {typical.mean_tokens:,.0f} tokens a page of {value} leaves {empty:.1%} empty"
        long = "; attention over long contexts reads larger pages faster"
        return held + (long if value >= 64 and typical.mean_tokens >= LONG else "")
    if name == "kv_cache_dtype":
        wide, narrow = (
            replace(config, kv_cache_dtype=dtype).kv_format(shape.model).token_bytes for dtype in ("auto", value)
        )
        if wide <= narrow:
            return "fewer bits would not gain enough to risk quality"
        cost = "at a cost in quality" if value == "int4" else "at little cost in quality"
        return f"{narrow:,} bytes a token instead of {wide:,}, {cost} (docs/kv-dtypes.md)"
    if name == "enable_prefix_caching":
        return f"{result.hit_rate:.0%} of the prompts' tokens are found" if value else "nothing is found in it"
    found = f"{result.hit_rate:.0%} of the prompts' tokens are found"
    if value:
        return found + (f", without it {without.hit_rate:.0%}" if without is not None else "")
    return f"{found} without it: what leaves the pool is not asked for again, or computed as soon"


def _paging(
    search: _Search, best: Settings, result: Result, sums: Plan, typical: Room | None, goal: str
) -> tuple[float | None, bool, list[str]]:
    """What pages gain over reservations, whether that counts, and why."""
    paged, reserved = (search.result(best | {"kv_layout": layout}) for layout in ("paged", "contiguous"))
    length, num_reservations, most = f"{sums.max_model_len:,} tokens", sums.num_reservations, result.most_running
    if reserved is None or paged is None:
        why = f"Paging pays: reservations of {length} cannot be had here; --max-model-len compares with shorter ones."
        return None, True, [why]
    seconds = GOALS[goal]
    gain = seconds(reserved) / seconds(paged)
    single = most <= 1 and not best["swap_space"]
    if gain > 1 + NOTHING and single:
        return (
            gain,
            False,
            [
                "Paging as such buys nothing here: one request runs at a time, and one sequence fits either way.",
                f"What gains is reuse: without it the goal would be {gain:.2f} times as many seconds.",
                "That takes pages here; a contiguous slot that keeps its last prompt would do as well.",
            ],
        )
    if gain > 1 + NOTHING:
        said = [f"Paging pays: with reservations of {length} the goal would be {gain:.2f} times as many seconds."]
        if result.hit_rate > 0.05:
            said.append(f"Reservations cannot share: {result.hit_rate:.0%} of the prompts' tokens were found in pages.")
        if most > num_reservations:
            said.append(f"Memory holds {num_reservations:,} reservations, and {most:,} requests ran at once.")
        return gain, True, said
    said = ["Paging buys nothing here: reservations are as fast, within what can be told."]
    if single:
        said.append("One request runs at a time, and one sequence fits either way.")
    elif reserved.most_running < num_reservations or num_reservations >= search.start["max_num_seqs"]:
        said.append(f"Memory is plenty: it holds {num_reservations:,} reservations of {length}; {most:,} ran at once.")
    if typical is not None and typical.contiguous_waste < 0.3:
        filled = f"{1 - typical.contiguous_waste:.0%}"
        said.append(f"Lengths are uniform: sequences fill {filled} of what they would reserve, on average.")
    if goal == "tail" and 1 < most <= FEW:
        said.append("A strict tail at low concurrency gains nothing from more sequences at once.")
    if len(said) == 1:
        said.append("More sequences run at once, but their steps take as much longer.")
    if best["kv_layout"] == "paged":
        said.append(
            "Pages cost nothing that could be measured, and keep the prefix cache, forks and tiers: stay with them."
        )
    return gain, False, said


def command(model: str, config: EngineConfig) -> list[str]:
    """What serves a model with this configuration: options that are not the defaults."""
    words = ["octavo", "serve", model]
    for field in fields(EngineConfig):
        value, flag = getattr(config, field.name), "--" + field.name.replace("_", "-")
        if value == field.default or (field.name == "enable_prefix_caching" and config.kv_layout == "contiguous"):
            continue
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            words += [word for one in value for word in (flag, str(one))]
        else:
            words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return words


# ── what has no keys and values to page ──────────────────────────────────────────────────────────────────────────

ENCODERS = {
    *(
        "albert",
        "bert",
        "bge",
        "clip",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "ernie",
        "longformer",
        "mpnet",
    ),
    *("camembert", "modernbert", "nomic_bert", "roberta", "siglip", "vit", "wav2vec2", "xlm-roberta"),
}
DIFFUSERS = {"dream", "llada", "sedd"}
ENCODER_HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def nothing_to_page(raw: Mapping[str, Any]) -> str | None:
    """Why the model of this config.json, or model_index.json, keeps no keys and values; None if it does."""
    kind, pipeline = str(raw.get("model_type", "")).lower(), str(raw.get("_class_name", ""))
    heads = raw.get("architectures")
    names: Iterable[str] = map(str, heads) if isinstance(heads, list) else ()
    if pipeline or kind in DIFFUSERS or "diffusion" in kind:
        return (
            f"{pipeline or kind} is a diffusion model: each pass computes everything anew, and nothing is kept from "
            "token to token. There is no KV cache to page; batches are limited by arithmetic."
        )
    if raw.get("is_encoder_decoder"):
        return (
            f"{kind or 'this model'} has an encoder and a decoder: only the decoder's keys and values grow, and the "
            "encoder's have a known length. Paging gains little, and Octavo serves decoders only."
        )
    if kind in ENCODERS or any(name.endswith(ENCODER_HEADS) for name in names):
        return (
            f"{kind or 'this model'} is an encoder: it reads its input in one pass and keeps no keys and values. "
            "There is no KV cache to page; batch inputs of like lengths instead."
        )
    return None
