"""What deploy/ offers to operators, tried: Prometheus scrapes a real server, and every query finds something."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.conftest import REPOSITORY
from tests.server.serving import PAGE_BYTES, serving, until

DEPLOY = REPOSITORY / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
STORY = "The lighthouse keeper wrote down every ship that passed, its flag, its cargo and the weather of the day. " * 3


def tool(name: str) -> str:
    path = shutil.which(name)
    assert path, f"there is no {name} here: apt-get install prometheus"
    return path


def promtool(*arguments: str) -> None:
    done = subprocess.run([tool("promtool"), *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """A running one."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=10)
        self.close = self._http.close
        self.load: Callable[[], object] = lambda: None  # gives the server that it scrapes something to do

    def query(self, expression: str) -> list[float]:
        """Its values now; those that are no number count as none."""
        reply = self._http.get("/api/v1/query", params={"query": expression})
        assert reply.status_code == 200, (expression, reply.text)
        values = [float(series["value"][1]) for series in reply.json()["data"]["result"]]
        return [value for value in values if value == value]

    def rules(self) -> list[dict[str, Any]]:
        groups = self._http.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    @property
    def ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def prometheus(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Scrapes a server whose pool is so small that sessions move to the host and requests give way."""
    folder = tmp_path_factory.mktemp("prometheus")
    options = ("--kv-cache-memory-bytes", str(12 * PAGE_BYTES), "--swap-space", "0.05", "--max-num-seqs", "4")
    with serving(folder / "log", model_path, *options) as server:
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "200ms", "evaluation_interval": "500ms"}
        config["rule_files"] = [str(RULES)]
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [":".join(map(str, server.address))]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [tool("prometheus"), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder}/db"]
        with (folder / "out").open("wb") as out:
            process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=out, stderr=out)
        try:
            watching = Prometheus(f"http://127.0.0.1:{port}")
            until(lambda: watching.ready, 30)
            until(lambda: watching.query("octavo:kv_pages") != [], 30)
            for turn in range(8):
                server.complete(f"{turn % 4} {STORY}", max_tokens=4, session_id=str(turn % 4))
            watching.load = lambda: server.complete(f"0 {STORY}", max_tokens=4, session_id="0")
            yield watching
        finally:
            watching.close()
            process.terminate()
            process.wait(20)


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "octavo.json").read_text())
    return found


def board_queries() -> list[str]:
    """As Grafana would send them."""
    queries = [target["expr"] for panel in board()["panels"] for target in panel.get("targets", ())]
    for name, value in {"$instance": ".*", "$model_name": ".*", "$__rate_interval": "1m"}.items():
        queries = [query.replace(name, value) for query in queries]
    assert not [query for query in queries if "$" in query]
    return queries


def test_every_query_of_the_board_finds_something(prometheus: Prometheus) -> None:
    missing = set(board_queries())
    assert len(missing) > 30

    def found() -> bool:
        missing.difference_update([query for query in missing if prometheus.query(query)])
        if missing:
            prometheus.load()  # what happened in the last minute may be nothing otherwise
        return not missing

    try:
        until(found, 60)
    except AssertionError:
        pytest.fail(f"these find nothing: {missing}")


def test_every_rule_can_be_evaluated_and_names_what_there_is(prometheus: Prometheus) -> None:
    written = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    names = {name for rule in written for name in re.findall(r"octavo[\w:]+", rule["expr"])}
    names |= {rule["record"] for rule in written if "record" in rule} | {"up"}
    assert len(names) > 20
    until(lambda: all(rule["health"] == "ok" for rule in prometheus.rules()), 30)
    until(lambda: all(prometheus.query(f"max_over_time({name}[1m])") for name in names), 30)
    assert len(prometheus.rules()) == len(written)


def test_what_was_watched_is_what_happened(prometheus: Prometheus) -> None:
    until(lambda: prometheus.query("sum(octavo:request_success_total) >= 8") != [], 30)
    [moved] = prometheus.query('octavo:kv_pages_moved_total{from="device",to="host"}')
    [back] = prometheus.query('octavo:kv_pages_moved_total{from="host",to="device"}')
    assert moved > 0 and back > 0
    assert prometheus.query("sum(octavo:kv_pages)") == [12]
    until(lambda: prometheus.query("octavo_pool:held:ratio") == [0], 10)


def test_each_alert_comes_when_it_should_and_not_otherwise() -> None:
    promtool("check", "rules", str(RULES))
    promtool("check", "config", str(DEPLOY / "prometheus" / "prometheus.yml"))
    promtool("test", "rules", str(DEPLOY / "prometheus" / "rules.test.yml"))
    alerts = re.findall(r"alert: (\w+)", RULES.read_text())
    tested = re.findall(r'alertname="(\w+)"', (DEPLOY / "prometheus" / "rules.test.yml").read_text())
    assert len(alerts) == 7 and sorted(tested) == sorted(alerts)


def test_panels_have_names_and_lie_beside_each_other() -> None:
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert panel["title"] and place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells


def test_the_unit_is_one_that_systemd_takes() -> None:
    unit = (DEPLOY / "octavo.service").read_text()
    command = next(line for line in unit.splitlines() if line.startswith("ExecStart="))
    assert command == "ExecStart=/opt/octavo/bin/octavo serve ${OCTAVO_MODEL} --config /etc/octavo/server.yaml"
    if analyze := shutil.which("systemd-analyze"):
        done = subprocess.run([analyze, "verify", str(DEPLOY / "octavo.service")], capture_output=True, text=True)
        complaints = [line for line in done.stderr.splitlines() if "octavo.service" in line]
        assert all("is not executable" in line for line in complaints), complaints
