"""Flags and the file that may hold them; keys, and who finds whose prompts; the other ways to listen."""

from __future__ import annotations

import json
import resource
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.serving import PAGE_BYTES, Served, error_of, serving, until

from octavo import cli
from octavo.cli import serving as commands
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.server import listen
from octavo.server.settings import ServerConfig

COMPLETIONS = "/v1/completions"
POOL = ("--kv-cache-memory-bytes", str(60 * PAGE_BYTES))

# ── flags ──


class Started(Exception):
    """Raised in place of serving, with what would have been served."""


@pytest.fixture
def what_would_start(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(path: Path, model: str, server: ServerConfig, engine: EngineConfig) -> int:
        raise Started(model, server, engine)

    def start(*arguments: str) -> tuple[str, ServerConfig, EngineConfig]:
        monkeypatch.setattr(commands, "fetch", Path)
        monkeypatch.setattr(listen, "run", run)
        monkeypatch.setattr(sys, "argv", ["octavo", "serve", *arguments])
        with pytest.raises(Started) as caught:
            cli.main()
        model, server, engine = caught.value.args
        return model, server, engine

    return start


FLAGS = """--host 0.0.0.0 --port 8123 --uds /tmp/x.sock --allowed-origins https://a.example --allowed-origins ["b","c"]
--served-model-name one --served-model-name two --max-logprobs 7 --api-key k1 --api-key k2 --share-prefixes
--max-body-bytes 2MiB --max-prompts-per-request 3 --max-queued-requests 4 --header-timeout 1.5 --body-timeout 2.5
--timeout-keep-alive 3.5 --drain-timeout 4.5 --step-timeout 5.5 --max-connections 5
--disable-log-requests --log-prompts --metrics-namespace vllm --no-ui --ui-show-text
--ssl-cert-reqs 1 --admin-api-key k0
--block-size 32 --max-num-seqs 3 --max-num-batched-tokens 77 --scheduling-policy priority
--kv-cache-memory-bytes 1GiB --no-enable-prefix-caching --max-model-len 99 --seed 12 --num-threads 1
--kv-cache-dtype fp32 --backend reference
--kv-cache-dtype-skip-layers 1 --kv-cache-dtype-skip-layers 5 --kv-layout contiguous --allow-kv-quality-loss
--kv-offload-space 2 --no-restore --preemption-mode swap --session-ttl 60 --max-pinned-fraction 0.5 --kv-quota 0.75"""
SERVER = ServerConfig(
    host="0.0.0.0",
    port=8123,
    uds="/tmp/x.sock",
    allowed_origins=("https://a.example", "b", "c"),
    served_model_name=("one", "two"),
    max_logprobs=7,
    api_key=("k1", "k2"),
    share_prefixes=True,
    max_body_bytes=2 << 20,
    max_prompts_per_request=3,
    max_queued_requests=4,
    header_timeout=1.5,
    body_timeout=2.5,
    timeout_keep_alive=3.5,
    drain_timeout=4.5,
    step_timeout=5.5,
    max_connections=5,
    disable_log_requests=True,
    log_prompts=True,
    metrics_namespace="vllm",
    no_ui=True,
    ui_show_text=True,
    ssl_cert_reqs=1,
    admin_api_key="k0",
)
ENGINE = EngineConfig(
    *(32, 3, 77, "priority", 1 << 30, False, 99, 12, 1, "fp32", "reference"),
    kv_offload_space=2,
    restore=False,
    preemption_mode="swap",
    session_ttl=60,
    max_pinned_fraction=0.5,
    kv_quota=0.75,
    kv_cache_dtype_skip_layers=(1, 5),
    kv_layout="contiguous",
    allow_kv_quality_loss=True,
)


def test_every_flag_reaches_its_field(what_would_start: Any) -> None:
    assert what_would_start("m", *FLAGS.split()) == ("m", SERVER, ENGINE)
    unset = {"ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "chat_template"}  # must exist; tried with a server
    unset |= {"swap_space", "kv_offload_dir"}  # not without the prefix cache
    for config, given in ((ServerConfig(), SERVER), (EngineConfig(), ENGINE)):
        same = {field.name for field in fields(config) if getattr(config, field.name) == getattr(given, field.name)}
        assert same <= unset
    tiers = what_would_start("m", "--swap-space", "0.5", "--kv-offload-dir", "/tmp/x")[2]
    assert (tiers.swap_space, tiers.kv_offload_dir) == (0.5, "/tmp/x")


def test_a_file_holds_the_same(what_would_start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text(
        "model: m\nhost: 0.0.0.0\nport: 8123\nuds: /tmp/x.sock\nallowed-origins: [https://a.example, b, c]\n"
        "served_model_name: [one, two]\nmax-logprobs: 7\napi-key: [k1, k2]\nshare-prefixes: true\n"
        "max-body-bytes: 2MiB\nmax-prompts-per-request: 3\nmax-queued-requests: 4\nheader-timeout: 1.5\n"
        "body-timeout: 2.5\ntimeout-keep-alive: 3.5\ndrain-timeout: 4.5\nstep-timeout: 5.5\n"
        "max-connections: 5\ndisable-log-requests: true\n"
        "log-prompts: true\nmetrics-namespace: vllm\nno-ui: true\nui-show-text: true\n"
        "ssl-cert-reqs: 1\nadmin-api-key: k0\n"
        "block-size: 32\nmax-num-seqs: 3\n"
        "max-num-batched-tokens: 77\nscheduling-policy: priority\nkv-cache-memory-bytes: 1GiB\n"
        "enable-prefix-caching: false\nmax-model-len: 99\nseed: 12\nnum-threads: 1\nkv-cache-dtype: fp32\n"
        "backend: reference\nkv-offload-space: 2\nrestore: false\npreemption-mode: swap\nsession-ttl: 60\n"
        "max-pinned-fraction: 0.5\nkv-quota: 0.75\nkv-cache-dtype-skip-layers: [1, 5]\nkv-layout: contiguous\n"
        "allow-kv-quality-loss: true\n"
    )
    assert what_would_start("--config", str(file)) == ("m", SERVER, ENGINE)
    model, server, engine = what_would_start("other", "--port", "1", "--config", str(file), "--api-key", "k3")
    assert (model, server.port, server.api_key, engine) == ("other", 1, ("k3",), ENGINE)
    monkeypatch.setenv("OCTAVO_API_KEY", "k4")
    monkeypatch.setenv("OCTAVO_ADMIN_API_KEY", "k5")
    keys = what_would_start("--config", str(file))[1]
    assert (keys.api_key, keys.admin_api_key) == (("k1", "k2", "k4"), "k0")
    assert what_would_start("m")[1].admin_api_key == "k5"


def octavo(*arguments: str) -> tuple[int, str]:
    """(exit status, standard error)"""
    command = [sys.executable, "-W", "error", "-m", "octavo", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-model-length: 5", "did you mean max-model-len?"),
        ("- a\n- b", "must map"),
        ("port: {a: 1}", "table"),
        ("a: [", "cannot be read"),
        ("port: many", "--port"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text(text)
    code, said = octavo("serve", "m", "--config", str(file))
    assert code == 2
    assert words in said
    assert "Traceback" not in said


def test_an_unknown_flag_is_answered_with_the_nearest() -> None:
    code, said = octavo("serve", "m", "--max-model-length", "5")
    assert code == 2
    assert "--max-model-len" in said.replace("--max-model-length", "")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"port": 70000}, "port"),
        ({"drain_timeout": float("nan")}, "drain_timeout"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"chat_template": "/none"}, "chat_template"),
        ({"ssl_keyfile": "/none"}, "ssl_keyfile"),
        ({"ssl_keyfile": __file__}, "ssl_certfile"),
        ({"ssl_certfile": __file__}, "ssl_certfile"),
        ({"api_key": ("",)}, "api_key"),
        ({"admin_api_key": " "}, "admin_api_key"),
        ({"admin_api_key": "k", "api_key": ("j", "k")}, "admin_api_key"),
        ({"allowed_origins": ("[1]",)}, "allowed_origins"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**options)
    assert caught.value.option == name


# ── keys ──


@pytest.fixture(scope="module")
def keyed(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("keyed")
    config = folder / "octavo.yaml"
    config.write_text(
        f"api-key: alpha\nallowed-origins: https://app.example\nkv-cache-memory-bytes: {60 * PAGE_BYTES}\n"
    )
    options = ("--config", str(config), "--log-prompts", "--metrics-namespace", "vllm")
    with serving(folder / "log", model_path, *options, environment={"OCTAVO_API_KEY": "beta"}) as server:
        yield server


def ask(served: Served, key: str | None, prompt: Any = "hello", **more: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **more}
    return served.http.post(COMPLETIONS, json=body, headers=headers)


def test_without_a_key_nothing_is_said(keyed: Served) -> None:
    for key in (None, "x", "alph", "alphaa", "ALPHA", "alpha beta"):
        reply = ask(keyed, key)
        assert reply.status_code == 401
        assert error_of(reply)["code"] == "invalid_api_key"
        assert reply.headers["www-authenticate"] == "Bearer"
    for method, path in (("GET", "/v1/models"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("POST", COMPLETIONS)):
        assert keyed.http.request(method, path, json={}).status_code == 401
    for value in (b"Basic alpha", b"Bearer", b"\xff"):
        assert keyed.http.post(COMPLETIONS, json={}, headers={b"authorization": value}).status_code == 401
    for key in ("alpha", "beta"):
        assert ask(keyed, key).status_code == 200
    for path in ("/health", "/version", "/metrics", "/openapi.json"):
        assert keyed.http.get(path).status_code == 200
    log = keyed.log.read_text()
    assert "alpha" not in log
    assert "beta" not in log


def test_one_key_never_finds_what_anothers_left(keyed: Served) -> None:
    prompt = list(range(500, 548))

    def cached(key: str, **more: Any) -> int:
        reply = ask(keyed, key, prompt, **more)
        assert reply.status_code == 200
        count = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert isinstance(count, int)
        return count

    assert cached("alpha") == 0
    assert cached("alpha") > 0
    assert cached("beta") == 0
    assert cached("beta") > 0
    assert cached("alpha", cache_salt="s") == 0
    assert cached("beta", cache_salt="s") == 0
    assert cached("alpha", cache_salt="s") > 0


def test_unless_they_share(model_path: Path, tmp_path: Path) -> None:
    options = ("--api-key", "alpha", "--api-key", "beta", "--share-prefixes", "--disable-log-requests")
    with serving(tmp_path / "log", model_path, *POOL, *options) as server:
        counts = [
            ask(server, key, list(range(48))).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            for key in ("alpha", "beta")
        ]
        assert counts[0] == 0 < counts[1]
        assert all(line["logger"] != "octavo.requests" for line in server.lines())


def test_what_was_asked_for_is_logged_and_named(keyed: Served) -> None:
    reply = ask(keyed, "alpha", "elephants never")
    line = keyed.line(reply.json()["id"])
    assert line["prompts"] == ["elephants never"]
    assert line["texts"] == [reply.json()["choices"][0]["text"]]
    assert reply.headers["x-request-id"] == line["id"]
    page = keyed.http.get("/metrics").text
    assert "vllm:num_requests_running{" in page
    assert "octavo:" not in page


def test_pages_of_allowed_origins_may_call(keyed: Served) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for origin, allowed in (("https://app.example", True), ("https://evil.example", False)):
        reply = keyed.http.options(COMPLETIONS, headers={"origin": origin, **asked})
        assert (reply.headers.get("access-control-allow-origin") == origin) == allowed
        reply = keyed.http.get("/health", headers={"origin": origin})
        assert ("access-control-allow-origin" in reply.headers) == allowed


# ── other ways to listen ──


def test_a_unix_socket_and_https(model_path: Path, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -days 2 -subj /CN=localhost"
    subprocess.run([*command.split(), "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    with serving(
        tmp_path / "log", model_path, *POOL, "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)
    ) as s:
        assert s.url.startswith("https://127.0.0.1:")
        with httpx.Client(base_url=s.url, verify=ssl.create_default_context(cafile=str(certificate))) as http:
            assert http.get("/health").json() == {"status": "ok"}
    path = tmp_path / "octavo.sock"
    with serving(tmp_path / "log2", model_path, *POOL, "--uds", str(path)) as s:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x", timeout=60) as http:
            body = {"prompt": "a", "max_tokens": 2, "stream": True}
            assert http.post(COMPLETIONS, json=body).text.endswith("data: [DONE]\n\n")
        assert path.stat().st_mode & 0o002 == 0
        assert s.stop() == 0
        until(lambda: not path.exists())
    assert all(json.loads(line) for line in (tmp_path / "log2").read_text().splitlines())


INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "raised", "connections"),
    [
        ((1024, 20_000), (4160, 20_000), 4096),
        ((1024, INFINITE), (4160, INFINITE), 4096),
        ((1024, 2000), (2000, 2000), 1936),
        ((8192, 20_000), None, 4096),
        ((INFINITE, INFINITE), None, 4096),
        ((50, 50), None, 1),
    ],
)
def test_the_limit_on_open_files_is_raised_to_fit(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], raised: tuple[int, int] | None, connections: int
) -> None:
    now: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: now.append(both))
    assert listen._connections(4096) == connections
    assert now == ([raised] if raised else [])
