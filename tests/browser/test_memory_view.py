"""The memory view in a browser, before a server that runs a model: what it shows is so, what is pressed is done."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect
from tests.browser.conftest import PAGES, View
from tests.server.serving import Served, until

CHECK_DELTAS = """() => {
  const {pool} = octavo, told = pool.delta;
  window.wrong = [];
  window.deltas = 0;
  pool.delta = function (data) {
    told.call(this, data);
    window.deltas++;
    for (const tier of this.tiers) {
      const told = data.stats.tiers[tier.name], {states, total, free, referenced, cached} = told;
      const same = pool.about.states.every((state, i) => tier.counts[i] === states[state]);
      const audited = tier.counts[0] === free && free + referenced + cached === total;
      if (!same || !audited || tier.size !== total) window.wrong.push([data.seq, tier.name, [...tier.counts], told]);
    }
  };
}"""
CELLS = """() => octavo.pool.tiers.map((tier) => [tier.name, tier.size, [...tier.states], [...tier.holders]])"""
DRAWN = """() => octavo.map.views.map(({tier, canvas, cols}) => {
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const pixels = new Uint32Array(data.buffer);
  return [...tier.states].filter((state, i) => pixels[i] !== octavo.map.palette.states[state]).length;
})"""


def tokens(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, 250), k=length)


def say(server: Served, session_id: str | None, prompt: list[int] | str, key: str | None = None, **more: Any) -> Any:
    """A completion; asserts that there is one."""
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **more}
    if session_id is not None:
        body["session_id"] = session_id
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    reply = server.http.post("/v1/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


def snapshot(server: Served, key: str | None = None) -> Any:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    reply = server.http.get("/v1/cache/map", headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


def look(server: Served, session_id: str) -> Any:
    return server.http.get(f"/v1/sessions/{quote(session_id, safe='')}").json()


def row(page: Page, name: str) -> Any:
    return page.locator("#holders tbody tr").filter(has=page.get_by_text(name, exact=True))


def cells_of(page: Page) -> list[tuple[str, int, list[tuple[int, int]]]]:
    """The tiers as the page has them: name, pages, state and holder of each."""
    told = page.evaluate(CELLS)
    return [(name, size, [*zip(states, holders, strict=True)]) for name, size, states, holders in told]


def runs_of(told: Any) -> list[tuple[str, int, list[tuple[int, int]]]]:
    """The same as a snapshot has them."""
    return [
        (tier["name"], tier["num_pages"], [(run[2], run[3]) for run in tier["runs"] for _ in range(run[1])])
        for tier in told["tiers"]
    ]


def test_the_map_is_what_the_server_says(served: Served, view: View) -> None:
    page = view(served.url)
    page.evaluate(CHECK_DELTAS)
    same = tokens(64, 0)
    with ThreadPoolExecutor(8) as pool:
        for i in range(60):
            pool.submit(say, served, f"chat {i % 10}", same + tokens(32 + 8 * (i % 24), i), max_tokens=24)
            pool.submit(say, served, None, tokens(40, 100 + i))
    say(served, None, tokens(40, 99))  # some of it is of no session and the latest
    served.settle()
    told: dict[str, Any] = {}
    moved: list[Any] = []

    def settled() -> bool:
        told.update(snapshot(served))
        quiet = all(tier["referenced"] == 0 for tier in told["stats"]["tiers"].values())
        before, moved[:] = moved[:], [told["stats"]["totals"]]
        page.wait_for_timeout(300)  # pages are copied ahead of need for a moment
        return (
            quiet
            and before == moved
            and page.evaluate("() => octavo.pool.seq") == told["seq"]
            and cells_of(page) == runs_of(told)
        )

    until(settled, 30)
    assert page.evaluate("() => wrong") == []
    assert page.evaluate("() => deltas") >= 5

    counted = told["stats"]["tiers"]["device"]["states"]
    assert counted["idle"] and counted["cached"] and counted["shared"]
    for name, _, cells in cells_of(page):
        assert served.metric("kv_tier_pages", tier=name, state="free") == sum(state == 0 for state, _ in cells)
    expect(page.locator("#legend tbody tr")).to_have_count(7)
    for i, state in enumerate(["moving", "active", "shared", "pinned", "idle", "cached", "free"]):
        counts = page.locator("#legend tbody tr").nth(i)
        expect(counts.locator("th")).to_have_text(state)
        for j, tier in enumerate(("device", "host")):
            expect(counts.locator("td").nth(j)).to_have_text(f"{told['stats']['tiers'][tier]['states'][state]:,}")
    assert page.evaluate(DRAWN) == [0, 0]

    by_bytes = page.locator("#holders tbody tr .held b").all_text_contents()
    sizes = [float(text.split()[0].replace(",", "")) * (1024 if "MiB" in text else 1) for text in by_bytes]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) >= 10


def test_pin_demote_and_release_are_done_and_seen(served: Served, view: View) -> None:
    name = "to be touched / ½ #?%"
    say(served, name, tokens(100, 7))
    page = view(served.url)
    held = row(page, name)
    held.get_by_role("button", name="Pin").click()
    expect(held).to_contain_text("pinned for 10 min")
    assert 590 < look(served, name)["pinned_s"] <= 600
    expect(page.locator("#legend tr").filter(has_text="pinned").locator("td").first).to_have_text("6")
    held.get_by_role("button", name="Unpin").click()
    expect(held).not_to_contain_text("pinned")
    assert look(served, name)["pinned_s"] == 0

    held.get_by_role("button", name="Demote").click()
    expect(page.locator("#holders-said")).to_contain_text("leaves the device")
    until(lambda: look(served, name)["pages"] == {"device": 0, "host": 6, "disk": 0})

    held.get_by_role("button", name="Release").click()
    page.get_by_role("button", name="Keep it").click()
    assert look(served, name)["pages"]["host"] == 6
    held.get_by_role("button", name="Release").click()
    page.locator("#sure-yes").click()
    expect(page.locator("#holders-said")).to_contain_text("is released")
    expect(held).to_have_count(0)
    assert served.http.get(f"/v1/sessions/{quote(name, safe='')}").status_code == 404


def test_the_largest_idle_session_is_named_with_its_remedy(served: Served, view: View) -> None:
    name = "<img src=x onerror='window.hacked=1'>\u202egnp.exe"
    say(served, name, tokens(440, 8))
    page = view(served.url)
    advice = page.locator("#advice-text")
    expect(advice).to_contain_text("holds", timeout=15_000)  # nobody is idle before five seconds are over
    expect(advice.locator("strong")).to_have_text("<img src=x onerror='window.hacked=1'>\ufffdgnp.exe")
    pages = look(served, name)["pages"]["device"]
    assert pages >= 27
    expect(advice).to_contain_text(f"holds {round(100 * pages / PAGES)} % of the pool")
    expect(advice).to_contain_text("demote it to host memory, or release it")
    page.locator("#advice-actions").get_by_role("button", name="Demote").click()
    until(lambda: look(served, name)["pages"]["device"] == 0)
    assert page.evaluate("() => window.hacked") is None
    assert page.locator("main img").count() == 0


def test_a_key_sees_its_own_and_the_administrator_everything(keyed: Served, view: View) -> None:
    say(keyed, "of alpha", tokens(90, 1), "alpha")
    say(keyed, "of beta", tokens(90, 2), "beta")
    page = view(keyed.url, live=False, refused=True)
    dialog = page.get_by_role("dialog", name="API key")
    expect(dialog).to_be_visible()
    assert "of alpha" not in page.content()
    for key, wrong in (("guessed", True), ("alpha", False)):
        page.get_by_role("textbox", name="Key").fill(key)
        page.keyboard.press("Enter")
        if wrong:
            expect(page.get_by_role("alert")).to_have_text("The server does not know this key.")
    expect(row(page, "of alpha")).to_be_visible()
    page.reload()
    expect(row(page, "of alpha")).to_be_visible()  # the tab kept the key
    assert "of beta" not in page.content()
    assert [of["name"] for of in page.evaluate("() => [...octavo.pool.holders.values()]")] == ["of alpha"]
    expect(page.locator("#legend tr").filter(has_text="idle").locator("td").first).to_have_text("10")
    page.locator("label").filter(has_text="Holder").click()
    expect(page.locator("#legend tr").filter(has_text="others").locator("td").first).to_have_text("5")

    page.get_by_role("button", name="Forget the key").click()
    page.get_by_role("textbox", name="Key").fill("boss")
    page.keyboard.press("Enter")
    expect(row(page, "of alpha")).to_be_visible()
    expect(row(page, "of beta")).to_be_visible()
    row(page, "of beta").get_by_role("button", name="Pin").click()
    expect(row(page, "of beta")).to_contain_text("pinned for")
    assert page.evaluate("() => [localStorage.length, document.cookie]") == [0, ""]


def test_a_request_shows_its_way_and_explains_itself(served: Served, view: View) -> None:
    page = view(served.url, refused=True)
    seen = Event()

    def talk() -> str:
        found = ""
        while not seen.is_set():
            found = say(served, "slow", tokens(40, 9), max_tokens=460)["id"]
        return str(found)

    with ThreadPoolExecutor(1) as pool:
        talking = pool.submit(talk)
        shown = page.locator("#requests tbody tr").first
        expect(shown).to_contain_text("of 460")
        expect(shown).to_contain_text("slow")
        seen.set()
        first = talking.result()
    expect(page.locator("#requests-more")).to_have_text("Nothing runs and nothing waits.")
    dialog = page.get_by_role("dialog", name="Why this request took its time")
    again = say(served, "slow", tokens(40, 9))["id"]
    for request_id, found in ((first, None), (again, 39), ("cmpl-of-nobody", -1)):
        page.get_by_label("Id of a request to explain").fill(request_id)
        page.keyboard.press("Enter")
        told = served.http.get(f"/v1/requests/{request_id}/explain").json()
        if found == -1:
            expect(dialog.get_by_role("alert")).to_have_text(told["error"]["message"])
        else:
            cached = told["cached"]["tokens"]
            assert found is None or cached == found
            expect(dialog.locator(".lead")).to_have_text(told["text"])
            expect(dialog).to_contain_text(f"computed {40 - cached}")
        dialog.get_by_role("button", name="Close").click()


def test_a_page_and_the_tree_say_what_they_hold(served: Served, view: View) -> None:
    for name, rest in (("one", "not all those who wander are lost"), ("two", "the old that is strong does not wither")):
        say(served, name, f"All that is gold does not glitter, {rest}")
    page = view(served.url)
    own = next(of["id"] for of in snapshot(served)["holders"] if of["name"] == "two")
    at = page.evaluate("(id) => octavo.map.views[0].tier.holders.indexOf(id)", own)
    told = served.http.get(f"/v1/cache/pages/device/{at}").json()
    box = page.locator(".cells").first
    size, cols = page.evaluate("() => [octavo.map.views[0].size, octavo.map.views[0].cols]")
    box.hover(position={"x": at % cols * size + size / 2, "y": at // cols * size + size / 2})
    tip = page.locator("#tip")
    expect(tip).to_contain_text(f"device page {at}")
    expect(tip).to_contain_text("two")
    expect(tip).to_contain_text(f"{told['positions'][0]} to {told['positions'][1] - 1} of the path")
    assert told["positions"][0] >= 32 and told["text"]
    expect(tip.locator("q")).not_to_be_empty()

    page.locator("#tree summary").click()
    tree = served.http.get("/v1/cache/tree").json()
    expect(page.locator("#tree-sum")).to_contain_text("sharing saves")
    rows = page.locator("#tree-table tbody tr")
    expect(rows).to_have_count(len(tree["nodes"]))
    gold = page.locator("#tree-table tbody tr").filter(has_text="All that is gold").first
    expect(gold.locator("td").nth(0)).to_have_text("32")
    expect(gold.locator("td").nth(2)).to_have_text("2")


@pytest.mark.parametrize("name", ["alpha", ""])
def test_the_page_holds_no_data(keyed: Served, name: str) -> None:
    reply = keyed.http.get(f"/ui/{name and 'nothing-of-the-kind'}")
    assert reply.status_code == (404 if name else 200)
    assert "of alpha" not in reply.text
