"""What may be imported where: neither `import octavo` nor the control plane needs numpy or the native module."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import octavo

SOURCE = Path(octavo.__file__).parent
CONTROL_PLANE = ["types", "config", "errors", "kv_format", "cache", "scheduler", "planner", "simulator"]
CONTROL_PLANE += ["engine/core.py", "engine/executor.py", "engine/sizing.py"]
FORBIDDEN = ("numpy", "torch", "ray", "fastapi", "starlette", "uvicorn", "tokenizers", "jinja2", "octavo._native")


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(("octavo", *(part for part in parts if part != "__init__")))


def control_plane() -> list[str]:
    names = []
    for entry in CONTROL_PLANE:
        path = SOURCE / entry if entry.endswith(".py") or (SOURCE / entry).is_dir() else SOURCE / f"{entry}.py"
        names += [module_name(file) for file in sorted(path.glob("*.py"))] if path.is_dir() else [module_name(path)]
    return names


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(*names: str) -> set[str]:
    imports = "; ".join(f"import {name}" for name in names)
    return set(json.loads(run_python(f"import sys, json; {imports}; print(json.dumps(list(sys.modules)))")))


def test_the_control_plane_is_found() -> None:
    names = control_plane()
    assert {"octavo.types", "octavo.cache.manager", "octavo.scheduler.scheduler", "octavo.engine.core"} <= set(names)


@pytest.mark.parametrize("name", [*control_plane(), "octavo"])
def test_importing_it_loads_nothing_heavy(name: str) -> None:
    assert not loaded_by(name) & set(FORBIDDEN)


def test_the_control_plane_works_where_nothing_heavy_is_installed() -> None:
    code = f"""
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in {FORBIDDEN!r}:
            raise ModuleNotFoundError(f"{{name}} is not installed here", name=name)

sys.meta_path.insert(0, Absent())
from array import array
from octavo.cache.invariants import check
from octavo.cache.manager import CacheManager

cache = CacheManager(num_pages=4, block_size=4)
tokens = array("i", range(10))
table = cache.admit(tokens).table
cache.commit(table, tokens, 10)
cache.release(table)
again = cache.admit(tokens)
check(cache)
print(again.num_computed)
"""
    assert run_python(code).strip() == "8"  # the two whole pages


def test_the_public_names_are_there_and_come_when_asked_for() -> None:
    assert run_python("import octavo; print(sorted(octavo.__all__) == sorted(dir(octavo)))").strip() == "True"
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        octavo.nonsense  # noqa: B018


def test_one_file_knows_the_native_module() -> None:
    importers = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
            elif isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            else:
                continue
            if "octavo._native" in names:
                importers.add(file.relative_to(SOURCE).as_posix())
    assert importers == {"ops/cpu.py"}
