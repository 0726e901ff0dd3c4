"""The memory view in the afternoon of a working day: docs/memory-view.png, docs/memory-view-dark.png, docs/top.txt.

    apt-get install -y --no-install-recommends chromium
    python bench/memory_view.py smollm2-135m

A server with a small pool and some host memory is sent the turns that `octavo bench day` draws, each in the session of
its conversation. Before the first hour somebody pins a long report, and does not come back to it. The pictures are
taken in the last hour, of the page as a browser draws it; the text is what `octavo top --once` prints beside it.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from playwright.sync_api import sync_playwright

from octavo.bench.conversations import Day, draw_day

VOCAB = 48_000
REPORT = "annual report"
REPORT_TOKENS = 1800


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--hours", type=int, default=8)
    parser.add_argument("--hour-s", type=float, default=26.0)
    parser.add_argument("--per-hour", type=int, default=34)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parents[1] / "docs")
    args = parser.parse_args()
    day = draw_day(
        hours=args.hours,
        per_hour=args.per_hour,
        hour_s=args.hour_s,
        sessions=None,
        scale=8.0,
        longest=512,
        vocab=VOCAB,
        seed=args.seed,
    )
    memory = ("--kv-cache-memory-bytes", "192MiB", "--swap-space", "0.3", "--preemption-mode", "swap")
    with tempfile.TemporaryFile("w+") as log:
        command = (sys.executable, "-m", "octavo", "serve", args.model, "--port", "0", "--max-num-seqs", "8", *memory)
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            url = None
            while url is None:
                assert server.poll() is None
                time.sleep(0.1)
                log.seek(0)
                url = re.search(r'"message":"ready","url":"([^"]+)"', log.read())
            playing = threading.Thread(target=play, args=(url[1], day, args.seed), daemon=True)
            playing.start()
            time.sleep((args.hours - 0.4) * args.hour_s)
            draw(url[1], args.folder)
            top = (sys.executable, "-m", "octavo", "top", "--url", url[1], "--once")
            (args.folder / "top.txt").write_bytes(subprocess.check_output(top))
            playing.join()
        finally:
            server.terminate()
            server.wait()


def play(url: str, day: Day, seed: int) -> None:
    """Say each turn at its time; one conversation's turns wait for each other."""
    said: dict[int, list[int]] = {}
    locks: dict[int, threading.Lock] = {}
    with httpx.Client(base_url=url, timeout=600) as http:

        def say(prompt: list[int], session: str, max_tokens: int) -> list[int]:
            body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
            body |= {"session_id": session, "return_token_ids": True}
            reply = http.post("/v1/completions", json=body).raise_for_status().json()
            return list(reply["choices"][0]["token_ids"])

        def take(at: float, session: int, message: list[int], max_tokens: int) -> None:
            time.sleep(max(start + at - time.monotonic(), 0))
            with locks.setdefault(session, threading.Lock()):
                own = said.setdefault(session, [])
                own += message
                own += say(own, f"conversation {session}", max_tokens)

        say(random.Random(seed).choices(range(100, VOCAB), k=REPORT_TOKENS), REPORT, 1)
        http.post(f"/v1/sessions/{REPORT}/pin", json={"ttl_s": 36_000}).raise_for_status()
        start = time.monotonic()
        with ThreadPoolExecutor(64) as pool:
            told = [pool.submit(take, of.at, of.session, of.message, of.max_tokens) for of in day.turns if of.hour]
            for future in told:
                future.result()


def draw(url: str, folder: Path) -> None:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "this draws with a browser: apt-get install -y --no-install-recommends chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        pages = {}
        for name, scheme in (("memory-view.png", "light"), ("memory-view-dark.png", "dark")):
            pages[name] = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme=scheme)
            pages[name].goto(f"{url}/ui/")
            pages[name].locator("#link.live").wait_for()
        for name, page in pages.items():
            page.wait_for_timeout(1000)
            page.screenshot(path=folder / name, full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
