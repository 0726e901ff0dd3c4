"""What a format of keys and values costs in quality: perplexity, agreement with bf16, and facts found in long contexts.

Owns the texts' windows and the facts; the engine is used as anyone would use it, through `LLM`, one format at a time.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from octavo.config import EngineConfig
from octavo.engine.llm import LLM, assemble
from octavo.kv_costs import BOUNDS
from octavo.models.weights import open_checkpoint
from octavo.types import SamplingParams

BASE = "bf16"
DTYPES = (BASE, "fp32", "int8", "fp8_e4m3", "fp8_e5m2", "int4")
WINDOW = 1024
OWN_TEXTS, OWN_TOKENS = 8, 512
"""Without texts, the model's own: samples of so many tokens."""
LENGTHS = (512, 1024, 2048, 4096, 8192)
PLACES = (
    *("Paris", "Cairo", "Lima", "Oslo", "Delhi", "Quito", "Seoul", "Accra", "Berlin", "Madrid", "Rome", "Athens"),
    *("Dublin", "Vienna", "Prague", "Warsaw", "Lisbon", "Moscow", "Tokyo", "Beijing", "Jakarta", "Nairobi", "Havana"),
    "Boston",
)
QUESTION = "The number of {place} is"


class Scores(NamedTuple):
    """Of each scored token: its log-probability, and the likeliest one; of each fact: whether it was found."""

    logprobs: list[float]
    likeliest: list[int]
    found: dict[int, list[bool]]


def measure(
    path: Path,
    config: EngineConfig,
    texts: Sequence[str],
    dtypes: Sequence[str] = DTYPES,
    lengths: Sequence[int] = LENGTHS,
    advance: Callable[[str], None] = lambda about: None,
) -> dict[str, Any]:
    """Figures by dtype, bf16 first; `advance` is told what each of `num_steps` steps was.

    perplexity_percent is how much higher perplexity is than in bf16, with twice its standard error; top1_percent how
    often the likeliest token is the same, drift the mean absolute difference of a token's log-probability, both
    teacher-forced. found counts the facts that were told, by length of the context. The verdict holds the rise against
    the format's bound, and says so where that lies within the error; facts_lost and facts_won are those that only bf16
    found, and those that only the format did.
    """
    start = time.perf_counter()
    windows: list[list[int]] = []
    results: dict[str, Any] = {}
    base: Scores | None = None
    configs = {dtype: replace(config, kv_cache_dtype=dtype) for dtype in (BASE, *dtypes)}  # checks them all
    for dtype, of_dtype in configs.items():
        engine = assemble(open_checkpoint(path), of_dtype)
        with LLM.from_engine(engine) as llm:
            windows = windows or _windows(llm, texts)
            lengths = [length for length in lengths if length <= engine.max_model_len]
            scores = Scores([], [], {})
            for window in windows:
                _score(llm, window, scores)
                advance(f"{dtype}: perplexity")
            for length in lengths:
                scores.found[length] = list(_find(llm, windows, length, config.seed))
                advance(f"{dtype}: facts in {length} tokens")
            base = base or scores
            results[dtype] = _figures(dtype, engine.format.page_bytes / config.block_size, scores, base)
    seconds = time.perf_counter() - start
    return {"num_tokens": sum(map(len, windows)), "own_text": not texts, "seconds": seconds, "dtypes": results}


def num_steps(path: Path, texts: Sequence[str], dtypes: Sequence[str], lengths: Sequence[int]) -> int:
    """About how many steps `measure` will tell of."""
    tokenizer = open_checkpoint(path).tokenizer()
    windows = sum(-(-len(tokenizer.encode(text, add_special=False)) // WINDOW) for text in texts) or OWN_TEXTS
    return (windows + len(lengths)) * len({BASE, *dtypes})


def _windows(llm: LLM, texts: Sequence[str]) -> list[list[int]]:
    """Tokens in windows, of the texts or, without any, of what the model says by itself."""
    if texts:
        tokens = [llm.tokenizer.encode(text, add_special=False) for text in texts]
        size = min(WINDOW, llm.max_model_len - 1)
        windows = [of[start : start + size] for of in tokens for start in range(0, len(of), size)]
        return [window for window in windows if len(window) > 1]
    length = min(OWN_TOKENS, llm.max_model_len - 8)
    params = SamplingParams(n=OWN_TEXTS, temperature=1.0, max_tokens=length, ignore_eos=True, seed=llm.config.seed)
    return [choice.token_ids for choice in llm.generate("The", params)[0].outputs]


def _score(llm: LLM, window: list[int], scores: Scores) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    found = llm.generate([window], params)[0].prompt_logprobs
    assert found is not None
    for token, logprobs in zip(window[1:], found[1:], strict=True):
        assert logprobs is not None
        scores.logprobs.append(logprobs[token].logprob)
        scores.likeliest.append(min(logprobs, key=lambda each: logprobs[each].rank))


def _find(llm: LLM, windows: list[list[int]], length: int, seed: int) -> Iterator[bool]:
    """Tell a fact about each place, spread over a context of other text, and ask for each at its end."""
    draw, encode = random.Random(f"{seed} {length}"), llm.tokenizer.encode
    answers = {place: f" {draw.randrange(1000, 10_000)}" for place in PLACES}
    facts = [encode(f"\n{QUESTION.format(place=place)}{answers[place]}.\n", add_special=False) for place in PLACES]
    questions = [encode(f"\n{QUESTION.format(place=place)}", add_special=False) for place in PLACES]
    other = [token for window in windows for token in window]
    room = length - sum(map(len, facts)) - max(map(len, questions)) - 8
    stretch = max(room // len(facts), 1)
    context: list[int] = []
    for number, fact in enumerate(facts):
        context += [other[(number * stretch + i) % len(other)] for i in range(stretch)] + fact
    wanted = [encode(answers[place], add_special=False) for place in PLACES]
    params = [SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True) for answer in wanted]
    llm.generate([context], SamplingParams(temperature=0, max_tokens=1))  # the questions find it in the cache
    outputs = llm.generate([context + question for question in questions], params)
    for output, answer in zip(outputs, wanted, strict=True):
        yield output.outputs[0].token_ids == answer


def _figures(dtype: str, token_bytes: float, scores: Scores, base: Scores) -> dict[str, Any]:
    count = len(scores.logprobs)
    losses = [a - b for a, b in zip(base.logprobs, scores.logprobs, strict=True)]
    loss, error = statistics.fmean(losses), 2 * statistics.pstdev(losses) / math.sqrt(count)
    figures: dict[str, Any] = {
        "token_bytes": token_bytes,
        "perplexity": math.exp(-statistics.fmean(scores.logprobs)),
        "perplexity_percent": 100 * math.expm1(loss),
        "perplexity_error_percent": 100 * error,
        "top1_percent": 100 * sum(a == b for a, b in zip(scores.likeliest, base.likeliest, strict=True)) / count,
        "drift": statistics.fmean(map(abs, losses)),
        "found": {length: f"{sum(found)}/{len(found)}" for length, found in scores.found.items()},
    }
    pairs = [pair for length in base.found for pair in zip(base.found[length], scores.found[length], strict=True)]
    figures |= {"facts_lost": pairs.count((True, False)), "facts_won": pairs.count((False, True))}
    if dtype in BOUNDS:
        rise, bound = figures["perplexity_percent"], BOUNDS[dtype]
        figures |= {"bound_percent": bound, "verdict": "above the bound" if rise > bound else "within the bound"}
        if abs(rise - bound) < 100 * error:
            figures["verdict"] = "too near to tell from the bound"
        figures["verdict"] += f", {figures['facts_lost']} facts lost and {figures['facts_won']} won"
    return figures
