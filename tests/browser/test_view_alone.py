"""The memory view before a feed that tests make up: many pages, a server that goes away, names meant to do harm."""

from __future__ import annotations

import hashlib
import re
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect
from tests.browser.conftest import View
from tests.browser.fake import FakePool, application, running

UI = Path(__file__).resolve().parents[2] / "src/octavo/server/ui"
UPLOT = {  # of version 1.6.32, as it was released
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    "uPlot.esm.js": "5dd9b3281aa64b461b42d9945f6adb2649d346502b12281a9ae0d46599a80eba",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
FRAMES = """(count) => new Promise((done) => {
  const times = [];
  const frame = (now) => {
    times.push(now);
    if (times.length > count) done(times.slice(1).map((time, i) => time - times[i]));
    else requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
})"""
LIT = """() => {
  const [{tier}] = octavo.map.views;
  return [...tier.states.keys()].filter((i) => octavo.map.only(tier.states[i], tier.holders[i]));
}"""
CONTRAST = """() => {
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const light = (name) => {
    const parts = [1, 3, 5].map((at) => parseInt(css(name).slice(at, at + 2), 16) / 255);
    const [r, g, b] = parts.map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  for (const text of ["--ink", "--muted", "--danger", "--accent"]) {
    for (const ground of ["--paper", "--panel", "--sunk"]) {
      const [low, high] = [light(text), light(ground)].sort((a, b) => a - b);
      found.push([text, ground, (high + 0.05) / (low + 0.05)]);
    }
  }
  return found;
}"""


def still() -> dict[str, list[list[int]]]:
    return {}


@pytest.fixture(scope="module")
def busy() -> Any:
    """A pool of 2,048 pages and host memory, with names meant to do harm."""
    pool = FakePool({"device": 2048, "host": 4096}, seed=1)
    for holder, name in zip(pool.holders, HOSTILE, strict=False):
        holder["name"] = name
    request = {"phase": "decoding", "prompt_tokens": 100, "cached_tokens": 40, "computed_tokens": 100}
    request |= {"generated_tokens": 3, "max_tokens": 9, "pages": 7, "age_s": 1.5, "preemptions": 1, "tenant": ""}
    pool.requests = [{"id": f"{i} {name}", "session": name, **request} for i, name in enumerate(HOSTILE)]
    with running(application(pool, lambda: pool.churn(2, 8))) as url:
        yield url


@pytest.fixture
def fed() -> Iterator[Callable[..., str]]:
    """Serve a pool that a test made up, until its pages are closed. The URL."""
    with ExitStack() as stack:
        yield lambda pool, step=still: stack.enter_context(running(application(pool, step)))


HOSTILE = (
    "<img src=x onerror=\"window.hacked='img'\">",
    "</td></table><script>window.hacked='script'</script>",
    "javascript:window.hacked='url'",
    "'\"><svg onload=window.hacked=1>",
    "\u202eevil\u2066\u200f",
    "x" * 10_000,
    "e" + "\u0301" * 3000,
    "..",
    "\0\x1b[31m\n\ttabs",
    "مرحبا بالعالم",
)


def test_a_hundred_thousand_pages_keep_thirty_frames_a_second(fed: Callable[..., str], view: View) -> None:
    """Ten updates a second, of some 4,000 pages each, made up: no engine is needed to draw."""
    pool = FakePool({"device": 100_000}, seed=2)
    url = fed(pool, lambda: pool.churn(200, 40))
    page = view(url, reduced_motion="no-preference")
    for _ in range(3):
        before = page.evaluate("() => octavo.pool.seq")
        intervals = page.evaluate(FRAMES, 60)
        updates = page.evaluate("() => octavo.pool.seq") - before
        if statistics.median(intervals) <= 1000 / 30:
            break
    assert statistics.median(intervals) <= 1000 / 30, intervals
    assert updates >= sum(intervals) / 1000 * 5  # they came while the frames were counted


def test_a_lost_connection_comes_back_by_itself(view: View) -> None:
    first, second = FakePool({"device": 300}, seed=3), FakePool({"device": 300, "host": 200}, seed=4)
    with running(application(first, still)) as url:
        page = view(url, refused=True)
        expect(page.locator("#legend thead th")).to_have_count(2)
    link = page.locator("#link")
    expect(link).to_have_class("lost")
    expect(link).to_contain_text("trying again")
    expect(link.get_by_role("button", name="Try now")).to_be_visible()
    with running(application(second, still), int(url.rsplit(":", 1)[1])):
        expect(link).to_have_class("live", timeout=20_000)
        expect(page.locator("#legend thead th")).to_have_count(3)
        states = page.evaluate("() => octavo.pool.tiers.map((tier) => [...tier.states])")
        assert states == [[state for state, _ in cells] for cells in second.tiers.values()]


def test_names_are_texts_and_are_cut(busy: str, view: View) -> None:
    page = view(busy, refused=True)
    expect(page.locator("#requests tbody tr")).to_have_count(len(HOSTILE))
    for by in ("Holder", "Tenant"):
        page.locator("#colour label").filter(has_text=by).click()
    page.locator(".cells").first.hover()
    shown = page.evaluate("() => [...document.querySelectorAll('bdi')].map((of) => of.textContent)")
    assert max(map(len, shown)) <= 160
    assert any(text.startswith("xxxx") and text.endswith("…") for text in shown)
    assert HOSTILE[0] in shown and "\ufffdevil\ufffd\ufffd" in shown
    seen = page.locator("body").inner_text() + "".join(shown)
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200e\u200f\x00-\x08\x0b\x1b]", seen)
    assert page.evaluate("() => window.hacked") is None
    assert page.locator("main img, main svg, main script, main a").count() == 0
    assert (
        page.locator("#requests tbody tr").evaluate_all("(rows) => Math.max(...rows.map((row) => row.offsetHeight))")
        < 90
    )


@pytest.mark.parametrize(("width", "height"), [(360, 740), (800, 1000), (1440, 900), (3840, 2160)])
def test_it_fits_every_screen(busy: str, view: View, width: int, height: int) -> None:
    page = view(busy, viewport={"width": width, "height": height})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    cells = page.locator(".cells").first.bounding_box()
    assert cells and cells["width"] > (0.8 * width if width < 700 else 0.25 * width)
    assert page.evaluate("() => parseFloat(getComputedStyle(document.documentElement).fontSize)") == (
        22 if width > 3600 else 14
    )


def controls(page: Page) -> list[dict[str, Any]]:
    """What the browser tells a screen reader of the controls."""
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "searchbox", "radio", "link", "application", "table", "dialog", "group", "image"}
    found = [node for node in nodes if not node["ignored"] and node["role"]["value"] in roles | {"DisclosureTriangle"}]
    return [{"role": node["role"]["value"], "name": node.get("name", {}).get("value", "")} for node in found]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_screen_reader_finds_names_and_every_text_contrast(busy: str, view: View, scheme: str) -> None:
    page = view(busy, color_scheme=scheme)
    found = controls(page)
    assert [of for of in found if not of["name"].strip()] == []
    assert Axe().run(page).response["violations"] == []
    roles = [of["role"] for of in found]
    assert roles.count("application") == 2 and roles.count("table") == 3 and roles.count("radio") >= 11
    assert [pair for pair in page.evaluate(CONTRAST) if pair[2] < 4.5] == []
    assert page.evaluate("() => [...document.querySelectorAll('table')].every((of) => of.caption?.textContent)")
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == (
        "rgb(13, 16, 20)" if scheme == "dark" else "rgb(244, 243, 239)"
    )
    other = "Light" if scheme == "dark" else "Dark"
    page.locator("#theme label").filter(has_text=other).click()
    page.reload()
    assert page.evaluate("() => getComputedStyle(document.documentElement).colorScheme") == other.lower()


def test_the_keyboard_goes_from_page_to_page(fed: Callable[..., str], view: View) -> None:
    pool = FakePool({"device": 200}, fill=False)
    for cell in pool.tiers["device"][10:14]:
        cell[:] = [4, 2]
    url = fed(pool, still)
    page = view(url, refused=True)  # of the pages a fake knows nothing
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement.matches('.cells')"):
            break
    box = page.locator(".cells")
    expect(box).to_be_focused()
    for _ in range(11):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_contain_text("device page 11")
    expect(page.locator("#tip")).to_contain_text("conversation 2")
    expect(page.locator("#cell-said")).to_contain_text("device page 11: idle, holder conversation 2")
    page.keyboard.press("Enter")
    name = page.locator("#holders tbody tr").filter(has_text="conversation 2").locator("button.name").first
    expect(name).to_have_attribute("aria-pressed", "true")
    lit = page.evaluate(LIT)
    assert lit == [10, 11, 12, 13]
    page.keyboard.press("Escape")
    assert page.evaluate("() => octavo.map.only") is None
    page.keyboard.press("End")
    expect(page.locator("#tip")).to_contain_text("device page 199")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#tip")).to_contain_text("device page 199")


def test_rows_stay_under_the_pointer(fed: Callable[..., str], view: View) -> None:
    pool = FakePool({"device": 100}, num_sessions=3, fill=False)
    for i, cell in enumerate(pool.tiers["device"][:60]):
        cell[:] = [4, 1 if i < 30 else 2 if i < 50 else 3]
    moves: list[list[list[int]]] = []
    url = fed(pool, lambda: {"device": moves.pop() if moves else []})
    page = view(url)
    names = page.locator("#holders tbody tr .name")
    expect(names).to_have_text(["conversation 1", "conversation 2", "conversation 3"])
    page.locator("#holders tbody tr").nth(1).hover()
    moves.append([[0, 30, 4, 3]])
    expect(page.locator("#holders tbody tr").nth(2).locator("td").nth(1)).to_have_text("40 %")
    expect(names).to_have_text(["conversation 1", "conversation 2", "conversation 3"])
    page.mouse.move(2, 2)
    expect(names).to_have_text(["conversation 3", "conversation 2", "conversation 1"])
    page.get_by_role("button", name="Holder", exact=True).click()
    page.mouse.move(2, 2)
    expect(names).to_have_text(["conversation 1", "conversation 2", "conversation 3"])


def test_no_file_makes_markup_of_texts_and_the_library_is_as_released() -> None:
    for name, digest in UPLOT.items():
        assert hashlib.sha256((UI / "uplot" / name).read_bytes()).hexdigest() == digest
    own = "".join(file.read_text(encoding="utf-8") for file in UI.iterdir() if file.suffix in (".js", ".html"))
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|style=\"| on\w+=\"", own
    )
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", own)
