"""Octavo and OpenVINO GenAI in turn on the same workloads, and the ratios of their output tokens a second.

    make peers                                           all workloads, three alternations
    python bench/peers/compare.py --workloads single --requests 2 --peer-python .venv-peers/bin/python

Each run is a process of its own, so neither engine's threads or memory are there while the other is measured; who is
first changes from round to round. A ratio is of the two runs of one round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from octavo.bench.machine import machine
from octavo.bench.workloads import WORKLOADS
from octavo.models.catalog import resolve

HERE = Path(__file__).parent
TARGETS = {"mixed": 3.0, "uniform": 3.0, "prefix": 6.0, "single": 4.0}


def octavo(model: str, options: list[str]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "octavo", "bench", "throughput", model, *options, "--json", file.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        figures: dict[str, Any] = json.loads(Path(file.name).read_text())
        return figures


def openvino(python: str, model: str, options: list[str]) -> dict[str, Any]:
    command = [python, str(HERE / "openvino_genai_throughput.py"), model, *options]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{ran.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return figures


def check_same_work(runs: Iterable[dict[str, Any]]) -> None:
    """Raises SystemExit unless all runs were of as many requests and tokens."""
    done = {tuple(run[name] for name in ("num_requests", "prompt_tokens", "output_tokens")) for run in runs}
    if len(done) > 1:
        raise SystemExit(f"the engines did not do the same work: (requests, prompt, output tokens) were {sorted(done)}")


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def line(*cells: object) -> None:
    print(f"{cells[0]:<10}{cells[1]:>12}{cells[2]:>12}   {cells[3]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(TARGETS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, help="fewer than the workload has, for a quick look")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peer-python", default=".venv-peers/bin/python", help="a Python that has openvino-genai")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    model = str(resolve(args.model))
    report: dict[str, Any] = {"machine": machine(), "rounds": args.rounds, "workloads": {}}
    line("workload", "octavo", "openvino", "ratio: median (least … most), output tokens a second")
    for workload in args.workloads:
        options = ["--workload", workload, "--seed", str(args.seed)]
        options += ["--requests", str(args.requests)] if args.requests else []
        sides: dict[str, Callable[[], dict[str, Any]]] = {
            "octavo": lambda options=options: octavo(model, options),
            "openvino_genai": lambda options=options: openvino(args.peer_python, model, options),
        }
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for number in range(args.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                runs[side].append(sides[side]())
                rate = runs[side][-1]["output_tokens_per_s"]
                print(f"{workload}, round {number + 1}, {side}: {rate:.1f} tokens/s", file=sys.stderr)
        check_same_work(run for side in runs.values() for run in side)
        ours, theirs = ([run["output_tokens_per_s"] for run in runs[side]] for side in sides)
        ratio = spread([a / b for a, b in zip(ours, theirs, strict=True)])
        report["workloads"][workload] = {"ratio": ratio, **runs}
        wanted = f"; target {TARGETS[workload]:.0f}×" if workload in TARGETS else ""
        told = f"{ratio['median']:.2f}× ({ratio['least']:.2f} … {ratio['most']:.2f}){wanted}"
        line(workload, f"{statistics.median(ours):.1f}", f"{statistics.median(theirs):.1f}", told)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
