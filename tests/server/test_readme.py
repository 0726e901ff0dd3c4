"""What the README shows of the server works against one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import REPOSITORY
from tests.server.serving import PAGE_BYTES, Served, serving

BLOCKS = re.findall(r"^```text\n(.*?)^```$", (REPOSITORY / "README.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def named(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("readme") / "log"
    options = ("--kv-cache-memory-bytes", str(30 * PAGE_BYTES))
    with serving(log, model_path, "--served-model-name", "smollm2-135m", *options) as server:
        yield server


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def block(word: str, served: Served) -> str:
    [text] = [text for text in BLOCKS if text.startswith(word)]
    assert "http://127.0.0.1:8000" in text
    return str(text.replace("http://127.0.0.1:8000", served.url))


def test_curl(named: Served) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    out = run(["bash", "-c", block("curl", named)])
    assert out.startswith('data: {"id":"chatcmpl-')
    assert out.endswith("data: [DONE]\n\n")


def test_the_client(named: Served) -> None:
    assert run([sys.executable, "-c", block("from openai", named)]).strip()


def test_chat(named: Served) -> None:
    [command] = re.findall(r"`octavo (chat --url http://127.0.0.1:8000)`", (REPOSITORY / "README.md").read_text())
    arguments = command.replace("http://127.0.0.1:8000", named.url).split()
    done = subprocess.run(
        [sys.executable, "-m", "octavo", *arguments, "--max-tokens", "4"],
        input="Hi!\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
