"""The scripts that set engines beside each other, on a server of our own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.load import Server
from tests.conftest import REPOSITORY


@pytest.mark.parametrize("workload", ["prefix", "single"])
def test_any_server_does_the_workloads(model_path: Path, workload: str) -> None:
    with Server(str(model_path), "--kv-cache-memory-bytes=256MiB", "--max-model-len=2048") as server:
        command = [sys.executable, "-m", "bench.peers.openai_throughput", server.url, "--workload", workload]
        told = subprocess.run([*command, "--requests", "2"], cwd=REPOSITORY, check=True, capture_output=True, text=True)
        counted = server.metrics()
    figures = json.loads(told.stdout)
    assert (figures["workload"], figures["num_requests"]) == (workload, 2)
    assert figures["output_tokens_per_s"] * figures["seconds"] == pytest.approx(figures["output_tokens"])
    assert 0 < figures["request_to_first_token_s"] < figures["seconds"]
    warm_up = 2 * 4
    assert counted["generation_tokens_total"] == figures["output_tokens"] + warm_up
