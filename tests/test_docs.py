"""What the documentation shows is what happens: its commands are run, and their output compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    """(document, text) of every fenced block in this language."""
    found = [(path, match) for path in DOCUMENTS for match in BLOCK.finditer(path.read_text())]
    return [(path.relative_to(REPOSITORY).as_posix(), match[2]) for path, match in found if match[1] == language]


def shell_lines() -> list[tuple[str, str, str]]:
    """(document, command, output) of every `$` line in a console block."""
    lines = []
    for name, text in blocks("console"):
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            lines.append((name, command, output))
    return lines


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= {"COLUMNS": "80", "TERM": "dumb", "PYTHONWARNINGS": "error"}
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )


def matches(shown: str, printed: str) -> bool:
    """Whether they are equal, … standing for anything."""
    return re.fullmatch(".*".join(map(re.escape, shown.rstrip().split("…"))), printed.rstrip(), re.DOTALL) is not None


def test_there_is_something_to_run() -> None:
    assert {name for name, _, _ in shell_lines()} >= {"README.md", "docs/cli.md"}
    assert blocks("python")
    assert blocks("bash")


@pytest.mark.parametrize(("name", "command", "shown"), shell_lines())
def test_a_command_prints_what_is_shown(name: str, command: str, shown: str, model_path: Path) -> None:
    printed = run(["bash", "-c", command]).stdout
    assert matches(shown, printed), f"{name} shows\n{shown}\nand `{command}` prints\n{printed}"


@pytest.mark.parametrize(("name", "code"), blocks("python"))
def test_a_python_example_runs(name: str, code: str, model_path: Path) -> None:
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, f"{name}: {done.stdout}"
    assert done.stdout.strip()


@pytest.mark.parametrize(
    "target", [target for _, text in blocks("bash") for target in re.findall(r"^make (\w+)", text, re.M)]
)
def test_a_make_target_exists(target: str) -> None:
    done = run(["make", "--dry-run", target])
    assert done.returncode == 0, done.stdout
    assert "Nothing to be done" not in done.stdout


def test_every_command_has_its_help_in_the_docs() -> None:
    expected = {"octavo --help"}
    for group in ("", "bench "):
        shown = run(["octavo", *group.split(), "--help"]).stdout.split("Commands:")[1]
        expected |= {f"octavo {group}{name} --help" for name in re.findall(r"^  ([\w-]+) ", shown, re.MULTILINE)}
    assert expected == {command for name, command, _ in shell_lines() if name == "docs/cli.md"}


def test_every_link_leads_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
