"""The memory view's files over HTTP: their types, what the browser is told to forbid, and a server without them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models import tiny
from tests.server.serving import Served, error_of, serving


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/ui/", "text/html; charset=utf-8"),
        ("/ui/index.html", "text/html; charset=utf-8"),
        ("/ui/main.js", "text/javascript; charset=utf-8"),
        ("/ui/style.css", "text/css; charset=utf-8"),
        ("/ui/icon.svg", "image/svg+xml"),
        ("/ui/uplot/uPlot.esm.js", "text/javascript; charset=utf-8"),
    ],
)
def test_files_have_types_and_the_browser_is_held_to_this_host(served: Served, path: str, kind: str) -> None:
    reply = served.http.get(path)
    assert (reply.status_code, reply.headers["content-type"]) == (200, kind)
    assert reply.headers["content-security-policy"].startswith("default-src 'self';")
    assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["cache-control"] == "no-cache"
    tag = reply.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = served.http.get(path, headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert served.http.get(path, headers={"if-none-match": '"other"'}).status_code == 200
    assert served.http.head(path).status_code == 200
    assert served.post(path).status_code == 405


def test_the_page_moves_to_its_folder_whatever_the_host(served: Served) -> None:
    reply = served.http.get("/ui", headers={"host": "evil.example"})
    assert (reply.status_code, reply.headers["location"]) == (308, "ui/")
    assert served.http.get("/ui", follow_redirects=True).url.path == "/ui/"


@pytest.mark.parametrize(
    "path",
    [
        "/ui/x.js",
        "/ui//",
        "/ui/..%2fassets.py",
        "/ui/%2e%2e/assets.py",
        "/ui/uplot/LICENSE",
        "/ui/uplot",
        "/ui/main.js/",
    ],
)
def test_there_is_nothing_else(served: Served, path: str) -> None:
    reply = served.http.get(path)
    assert reply.status_code == 404
    assert error_of(reply)["code"] == "not_found"


def test_the_ready_line_names_the_page(served: Served) -> None:
    [ready] = [line for line in served.lines() if line["message"] == "ready"]
    assert ready["memory_view"] == f"{served.url}/ui/"


def test_a_server_may_have_no_page(tmp_path: Path) -> None:
    shape = tiny.config("llama")
    model = tiny.write_folder(tmp_path / "tiny", shape, tiny.tensors(shape))
    with serving(tmp_path / "log", model, "--kv-cache-memory-bytes", "1MiB", "--no-ui") as server:
        for path in ("/ui", "/ui/", "/ui/main.js"):
            assert server.http.get(path).status_code == 404
        assert server.http.get("/v1/cache/map").status_code == 200
        assert "memory_view" not in server.log.read_text()
