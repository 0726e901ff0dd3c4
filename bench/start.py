"""How long a cold process takes to its first token, and how much memory it has taken at its peak; print JSON.

    python bench/start.py --repeats 5

The model's file is in the page cache. *python* is a process that imports octavo, loads the model and draws a token,
from before it is started; *command* is `octavo generate`, up to the first bytes of its answer. The target is 1.5 s.

Peak memory is VmHWM of a process that serves the mixed workload with a pool too small for it, so that every page has
been written. The target is what the model takes in its file, the pool, and 150 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from octavo.bench.machine import machine
from octavo.models.catalog import resolve
from octavo.models.weights import open_checkpoint

PROMPT = "The capital of France is"
TARGETS = {"first_token_s": 1.5, "peak_bytes_beyond": 150_000_000}

FIRST_TOKEN = """
import sys, time
from octavo import LLM, SamplingParams
imported = time.monotonic()
llm = LLM(sys.argv[1])
loaded = time.monotonic()
next(llm.stream(sys.argv[2], SamplingParams(temperature=0, max_tokens=2)))
print(imported, loaded, time.monotonic(), flush=True)
"""

PEAK = """
import json, re, sys
from pathlib import Path
from octavo import LLM, SamplingParams
from octavo.bench.workloads import WORKLOADS
llm = LLM(sys.argv[1], kv_cache_memory_bytes=int(sys.argv[2]), max_num_seqs=32)
def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
loaded = peak()
_, work = WORKLOADS["mixed"].draw(int(sys.argv[3]), llm.model.vocab_size, 1)
params = [SamplingParams(temperature=0, max_tokens=one.max_tokens, ignore_eos=True) for one in work]
llm.generate([one.prompt for one in work], params)
stats = llm.stats()
print(json.dumps({"loaded": loaded, "peak": peak(), "pool": stats["num_pages"] * stats["page_bytes"],
                  "untouched": stats["pages_free"] * stats["page_bytes"]}))
"""


def first_token(path: Path) -> dict[str, float]:
    """Seconds until each stage is reached."""
    start = time.monotonic()
    command = [sys.executable, "-c", FIRST_TOKEN, str(path), PROMPT]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    times = [float(at) - start for at in told.split()]
    return dict(zip(("imported", "loaded", "first_token"), times, strict=True))


def first_bytes(path: Path) -> float:
    """Seconds until the command has written something of its answer."""
    start = time.monotonic()
    command = [sys.executable, "-m", "octavo", "generate", str(path), PROMPT, "--max-tokens", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 1)
        seconds = time.monotonic() - start
        process.stdout.read()
    return seconds


def peak(path: Path, pool_bytes: int, requests: int) -> dict[str, Any]:
    command = [sys.executable, "-c", PEAK, str(path), str(pool_bytes), str(requests)]
    told = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    stored = open_checkpoint(path).stored_bytes
    return {**told, "stored": stored, "beyond": told["peak"] - stored - told["pool"] + told["untouched"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pool", type=int, default=128 << 20, help="bytes")
    parser.add_argument("--requests", type=int, default=64)
    args = parser.parse_args()
    on, path = machine(), resolve(args.model)
    path.read_bytes() if path.is_file() else [file.read_bytes() for file in path.iterdir()]
    first_token(path)  # compiles the modules
    stages = [first_token(path) for _ in range(args.repeats)]
    figures: dict[str, Any] = {
        "python": {stage: [round(run[stage], 3) for run in stages] for stage in stages[0]},
        "command": [round(first_bytes(path), 3) for _ in range(args.repeats)],
        "memory": peak(path, args.pool, args.requests),
    }
    told = statistics.median(figures["python"]["first_token"]), statistics.median(figures["command"])
    beyond = figures["memory"]["beyond"]
    print(f"first token: {told[0]:.2f} s, of the command {told[1]:.2f} s; at most 1.5 s", file=sys.stderr)
    print(f"peak memory beyond model and pool: {beyond / 1e6:.0f} MB; at most 150 MB", file=sys.stderr)
    print(json.dumps({"machine": on, "model": args.model, "targets": TARGETS, **figures}, indent=1))


if __name__ == "__main__":
    main()
