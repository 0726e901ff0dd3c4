"""Kill an engine again and again, restart it on the same directory, and compare every answer it gives; print JSON.

    python bench/crash.py --kills 50

An engine whose pool and host tier are too small for its requests keeps moving pages to disk and back. It is killed
(SIGKILL) in turn while it *starts*, while it *serves*, and by itself in the middle of *writing* to the page file. After
every restart it answers some requests before the next kill may come. All answers, tokens and log-probabilities, must be
those of an engine without tiers: `wrong` counts the others. Before every third restart some records are damaged, half
of them in the header, half in the page. `found` are pages found at a restart, `served` pages that came up from disk,
`refused_at_start` records that seemed whole and were not found again (one whose ancestor is lost is useless, too), and
`refused_when_read` pages that turned out to be damaged. The status is 1 if an answer was wrong or an engine died
otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from octavo import LLM, SamplingParams
from octavo.bench.machine import machine
from octavo.engine import page_file
from octavo.engine.page_file import BLOCK
from octavo.engine.sizing import GIB
from octavo.kv_format import KVFormat
from octavo.models.catalog import resolve
from octavo.models.weights import open_checkpoint
from octavo.types import Tier

SEED = 1
BEGINNINGS, REQUESTS = 4, 24
POOL, HOST, DISK = 48, 8, 96
"""Pages of each tier; the requests have 180."""
CHECKED = 4
"""Requests that are answered after every restart."""
DAMAGED = 8
"""Records that are damaged at a time."""
LAST_WRITE = 60
LONGEST_S = 0.8
PATIENCE_S = 60.0
WAYS = ("serving", "writing", "starting", "writing", "serving")


def a_prompt(number: int) -> list[int]:
    """A shared beginning and an end of its own."""
    begin, end = random.Random(f"{SEED} {number % BEGINNINGS}"), random.Random(f"{SEED} end {number}")
    return [begin.randrange(10, 40_000) for _ in range(begin.randrange(60, 200))] + [
        end.randrange(10, 40_000) for _ in range(end.randrange(20, 180))
    ]


def its_params(number: int) -> SamplingParams:
    temperature = 0.0 if number % 2 else 0.9
    return SamplingParams(temperature=temperature, seed=number, max_tokens=6, ignore_eos=True, logprobs=2)


# ── the engine that is killed ────────────────────────────────────────────────────────────────────────────────────────


def serve(model: str, options: dict[str, Any], seed: int | None, last_write: int) -> None:
    """Answer every request once, or requests by chance for ever: a line of JSON for each.

    With `last_write`, write that many times more after CHECKED answers, the last time in part, and be gone.
    """
    llm, chance = LLM(model, **options), random.Random(seed)
    tiers = llm._core.cache.tiers
    say(found=tiers.pools[Tier.DISK].num_cached)
    num_answers = 0
    while num_answers < REQUESTS if seed is None else True:
        numbers = [num_answers] if seed is None else chance.sample(range(REQUESTS), chance.randrange(1, 4))
        outputs = llm.generate([*map(a_prompt, numbers)], [*map(its_params, numbers)])
        for number, output in zip(numbers, outputs, strict=True):
            [choice] = output.outputs
            assert choice.logprobs is not None
            scores = [[[token, entry.logprob] for token, entry in at.items()] for at in choice.logprobs]
            served, refused = tiers.stats.moved[Tier.DISK, Tier.DEVICE], tiers.stats.moves_failed
            say(number=number, answer=[choice.token_ids, scores], served=served, refused=refused)
        if last_write and num_answers < CHECKED <= num_answers + len(numbers):
            die_writing(last_write, chance)
        num_answers += len(numbers)
    llm.close()


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def die_writing(last_write: int, chance: random.Random) -> None:
    """Have the page file's writes end this process after so many."""
    write, num_writes = page_file._write, 0

    def write_until_then(fd: int, data: memoryview | bytes, offset: int) -> None:
        nonlocal num_writes
        num_writes += 1
        if num_writes == last_write:
            os.pwrite(fd, memoryview(data)[: chance.randrange(len(data))], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        write(fd, data, offset)

    page_file._write = write_until_then


# ── who kills it ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Life:
    """One engine, from its start to its end."""

    way: str
    damaged_headers: int = 0
    damaged_pages: int = 0
    found: int | None = None
    served: int = 0
    refused_at_start: int = 0
    refused_when_read: int = 0
    answers: int = 0
    wrong: int = 0
    start_s: float = 0.0
    fault: str = ""


@dataclass(slots=True)
class Killer:
    """Engines on one directory, one after the other."""

    model: str
    directory: Path
    chance: random.Random
    page_bytes: int
    right: dict[int, Any] = field(default_factory=dict)
    lives: list[Life] = field(default_factory=list)

    def answers_without_tiers(self) -> None:
        for facts in self._run({"enable_prefix_caching": False}, None, Life("untouched"), 0):
            if "number" in facts:
                self.right[facts["number"]] = facts["answer"]

    def live(self, way: str) -> Life:
        """Start an engine, check its answers, and kill it; an `untouched` one answers every request once and closes."""
        life = Life(way)
        self.lives.append(life)
        whole = self._whole_records()
        if len(self.lives) % 3 == 0:
            self._damage(life, whole)
        options = {
            "kv_offload_dir": str(self.directory),
            "kv_offload_space": (BLOCK + (DISK + 0.5) * self.record_bytes) / GIB,
            "swap_space": (HOST + 0.5) * self.page_bytes / GIB,
            "preemption_mode": "swap",
        }
        seed = None if way == "untouched" else self.chance.randrange(2**32)
        last_write = self.chance.randint(1, LAST_WRITE) if way == "writing" else 0
        for facts in self._run(options, seed, life, last_write):
            if "found" in facts:
                life.found = facts["found"]
                life.refused_at_start = len(whole) - life.found
                if life.found > len(whole) - life.damaged_headers:
                    life.fault = (
                        f"{life.found} pages were found of {len(whole)}, {life.damaged_headers} of them damaged"
                    )
            else:
                life.answers += 1
                life.wrong += facts["answer"] != self.right[facts["number"]]
                life.served, life.refused_when_read = facts["served"], facts["refused"]
        return life

    def _run(self, options: dict[str, Any], seed: int | None, life: Life, last_write: int) -> Iterator[dict[str, Any]]:
        """What an engine says until it is dead; it is killed when that is due."""
        options |= {"kv_cache_memory_bytes": POOL * self.page_bytes, "max_model_len": 512}
        wanted = json.dumps({"model": self.model, "options": options, "seed": seed, "last_write": last_write})
        num_answers, begun = 0, time.monotonic()
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                [sys.executable, __file__, "--serve", wanted], stdout=subprocess.PIPE, stderr=log, text=True
            )
            timers = [threading.Timer(PATIENCE_S, process.kill)]
            if life.way == "starting":
                start_s = max(other.start_s for other in self.lives)
                timers.append(threading.Timer(self.chance.uniform(0.0, start_s), process.kill))
            for timer in timers:
                timer.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    if not line.endswith("\n"):
                        break
                    facts = json.loads(line)
                    if "found" in facts:
                        life.start_s = time.monotonic() - begun
                    num_answers += "number" in facts
                    yield facts
                    if life.way == "serving" and num_answers == CHECKED and len(timers) == 1:
                        timers.append(threading.Timer(self.chance.uniform(0.0, LONGEST_S), process.kill))
                        timers[-1].start()
            finally:
                for timer in timers:
                    timer.cancel()
                if life.way != "untouched":
                    process.kill()
                process.wait()
                process.stdout.close()
            log.seek(0)
            if process.returncode != (0 if life.way == "untouched" else -signal.SIGKILL):
                life.fault = f"it left with {process.returncode}: {log.read()[-2000:]}"
            elif time.monotonic() - begun > PATIENCE_S or (
                life.way in ("serving", "writing") and num_answers < CHECKED
            ):
                life.fault = f"it was stuck, or killed by others: {log.read()[-2000:]}"

    # ── the file ──

    @property
    def record_bytes(self) -> int:
        return BLOCK + -(-self.page_bytes // BLOCK) * BLOCK

    @property
    def path(self) -> Path:
        return self.directory / page_file.NAME

    def _whole_records(self) -> list[int]:
        """Those with a header that does not say that its page is being written."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            count = max(0, self.path.stat().st_size - BLOCK) // self.record_bytes
            headers = [os.pread(file.fileno(), 16, BLOCK + record * self.record_bytes) for record in range(count)]
        return [record for record, header in enumerate(headers) if header[8:] == b"octavoPG" and any(header[:8])]

    def _damage(self, life: Life, records: list[int]) -> None:
        """Flip a byte in some records, in headers and pages by turns."""
        with self.path.open("r+b", buffering=0) as file:
            for turn, record in enumerate(self.chance.sample(records, min(DAMAGED, len(records)))):
                place = self.chance.randrange(BLOCK) if turn % 2 else self.chance.randrange(BLOCK, self.record_bytes)
                offset = BLOCK + record * self.record_bytes + place
                [byte] = os.pread(file.fileno(), 1, offset)
                os.pwrite(file.fileno(), bytes([byte ^ self.chance.randrange(1, 256)]), offset)
                life.damaged_headers += turn % 2
                life.damaged_pages += not turn % 2


def run(model: str | Path, kills: int, seed: int = SEED, *, progress: bool = False) -> list[Life]:
    """Kill so many engines, and let a last one answer every request."""
    path = resolve(str(model))
    shape = open_checkpoint(path).config
    page_bytes = KVFormat("bf16", shape.num_layers, shape.num_kv_heads, shape.head_dim, 16).page_bytes
    with (
        tempfile.TemporaryDirectory() as directory,
        Progress(console=Console(stderr=True), transient=True, disable=not progress) as bar,
    ):
        killer = Killer(str(path), Path(directory), random.Random(seed), page_bytes)
        killer.answers_without_tiers()
        for number in bar.track(range(kills)):
            killer.live(WAYS[number % len(WAYS)])
        killer.live("untouched")
    return killer.lives


def summary(lives: list[Life]) -> dict[str, Any]:
    found = [life.found for life in lives[1:] if life.found is not None]
    names = ("answers", "wrong", "served", "damaged_headers", "damaged_pages", "refused_at_start", "refused_when_read")
    return {
        "kills": Counter(life.way for life in lives if life.way != "untouched"),
        "found": {"least": min(found), "median": statistics.median(found), "most": max(found)},
        **{name: sum(getattr(life, name) for life in lives) for name in names},
        "start_s": statistics.median(life.start_s for life in lives if life.start_s),
        "faults": [life.fault for life in lives if life.fault],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(**json.loads(args.serve))
        return
    on, lives = machine(), run(args.model, args.kills, args.seed, progress=True)
    told = summary(lives)
    each = [asdict(life) for life in lives]
    print(json.dumps({"machine": on, "model": args.model, "seed": args.seed, **told, "lives": each}, indent=1))
    sys.exit(bool(told["wrong"] or told["faults"]))


if __name__ == "__main__":
    main()
