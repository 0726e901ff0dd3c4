"""A browser, pages in it that are watched, and servers of a tiny model to look at."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright
from tests.models import tiny
from tests.server.serving import Served, serving

PAGES = 64
PAGE_BYTES = 16 * 2 * 2 * 2 * 16 * 2
"""Of the tiny model: tokens, layers, K and V, heads, values, bytes."""
POOL = ("--kv-cache-memory-bytes", str(PAGES * PAGE_BYTES), "--max-num-seqs", "8", "--swap-space", "0.01")
KEYS = ("--api-key", "alpha", "--api-key", "beta", "--admin-api-key", "boss")

View = Callable[..., Page]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Debian's browser. Nothing is skipped for the want of it.

    Not for the session: while it is there its driver runs the thread's event loop, and no other test may.
    """
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path, "these tests drive a browser: apt-get install -y --no-install-recommends chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def view(chromium: Browser) -> Iterator[View]:
    """Open the memory view of a server. Whatever it did: no error was thrown, and nothing asked of another host."""
    contexts, faults, asked = [], [], []

    def opened(url: str, *, live: bool = True, refused: bool = False, **options: object) -> Page:
        """`refused`: the server is meant to say no, which the browser's console repeats."""
        options = {"viewport": {"width": 1440, "height": 900}, "reduced_motion": "reduce", **options}
        context = chromium.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(10_000)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(f"{error}\n{error.stack}"))

        def heard(message: ConsoleMessage) -> None:
            if message.type == "error" and not (refused and "Failed to load resource" in message.text):
                faults.append(message.text)

        page.on("console", heard)
        page.on("request", lambda request: asked.append((urlsplit(request.url).netloc, urlsplit(url).netloc)))
        page.goto(f"{url}/ui/")
        if live:
            page.locator("#link.live").wait_for()
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not faults
    assert asked and all(host == own for host, own in asked)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, 512 tokens of context."""
    shape = tiny.config("llama")
    return tiny.write_folder(tmp_path_factory.mktemp("model") / "tiny", shape, tiny.tensors(shape))


@pytest.fixture(scope="session")
def served(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """For everybody, with host memory below its pool of 64 pages; it shows texts."""
    with serving(tmp_path_factory.mktemp("open") / "log", tiny_path, *POOL, "--ui-show-text") as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="session")
def keyed(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """For two keys and an administrator's."""
    with serving(tmp_path_factory.mktemp("keyed") / "log", tiny_path, *POOL, *KEYS) as server:
        yield server
