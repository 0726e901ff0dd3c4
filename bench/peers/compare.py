"""Octavo and OpenVINO GenAI in turn on the same workloads, and the ratios of their output tokens a second, as JSON.

    make peers                                           all workloads, three alternations
    python bench/peers/compare.py --workloads single --rounds 1 --peer-python .venv-peers/bin/python

Each run is a process of its own, so neither engine's threads or memory are there while the other is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from octavo.bench.machine import machine
from octavo.bench.workloads import WORKLOADS
from octavo.models.catalog import resolve

HERE = Path(__file__).parent


def octavo(model: str, workload: str, requests: list[str]) -> float:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "octavo", "bench", "throughput", model, "--workload", workload]
        subprocess.run([*command, "--json", file.name, *requests], check=True, stdout=subprocess.DEVNULL)
        return float(json.loads(Path(file.name).read_text())["output_tokens_per_s"])


def peer(python: str, model: str, workload: str, requests: list[str]) -> float:
    command = [python, str(HERE / "openvino_genai_throughput.py"), model, "--workload", workload, *requests]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(ran.stdout.splitlines()[-1])["output_tokens_per_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["mixed", "uniform", "prefix", "single"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, help="fewer than the workload has, for a quick look")
    parser.add_argument("--peer-python", default=".venv-peers/bin/python", help="a Python that has openvino-genai")
    args = parser.parse_args()
    model = str(resolve(args.model))
    requests = ["--requests", str(args.requests)] if args.requests else []
    report: dict[str, Any] = {"machine": machine(), "rounds": args.rounds, "requests": args.requests, "workloads": {}}
    for workload in args.workloads:
        ours, theirs = [], []
        for number in range(args.rounds):
            ours.append(octavo(model, workload, requests))
            theirs.append(peer(args.peer_python, model, workload, requests))
            ratio = ours[-1] / theirs[-1]
            print(f"{workload} {number + 1}: {ours[-1]:.1f} against {theirs[-1]:.1f}, {ratio:.2f}×", file=sys.stderr)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        report["workloads"][workload] = {
            "octavo": ours,
            "openvino_genai": theirs,
            "ratio": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
        }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
