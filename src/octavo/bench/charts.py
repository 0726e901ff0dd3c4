"""What the figures of `bench serve`, `bench compare` and `simulate` show: their tables and plots, from their JSON.

Owns what stands beside what and in which unit; octavo.bench.report draws it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from octavo.bench.report import Grid, Plot, Report, Series
from octavo.config import EngineConfig
from octavo.planner.advisor import command

MIB = 1 << 20
Figures = Mapping[str, Any]


def of_serving(document: Figures) -> Report:
    """Of `octavo bench serve`."""
    load = document["load"]
    about = [
        ("load", f"{load['name']}: {load['about']}"),
        ("servers", "; ".join(f"{one['name']}: {one['model']} at {one['url']}" for one in document["servers"])),
        ("rounds", f"{document['asked']['rounds']}: medians (least … most)"),
        ("goodput", ", ".join(document["asked"]["goodput"] or ["–"])),
        ("price an hour", str(document["asked"]["price_per_hour"] or "–")),
        *_machine(document),
    ]
    failed = Grid("Failures", ["server"], [[line] for line in failures(document)])
    tables = [*served(document), *([failed] if failed.rows else [])]
    return Report("Servers under load", about, [*tables, *_served(document)])


def served(document: Figures) -> list[Grid]:
    """The tables of `octavo bench serve`, also for a terminal: rates, and latencies."""
    lines = document["summary"]
    first = document["servers"][0]["name"]
    rates, latencies = [], []
    for line in lines:
        names = _names(line)
        of, ratios = line["figures"], line["ratios"]
        cells = [_range(of.get("request_throughput"), 2), _range(of.get("output_throughput"), 1)]
        cells += [_range(of.get("total_token_throughput"), 1), _range(ratios.get("output_throughput"), 2)]
        cells += [_number(of.get(name), digits) for name, digits in (("completed", 0), ("failed", 0))]
        cells += [_number(of.get("request_goodput"), 2)]
        rates.append([*names, *cells, *(_number(of.get(f"cost_per_million_{kind}tokens"), 3) for kind in COSTS)])
        latencies.append([*names, *(_number(of.get(f"{part}_{name}_ms"), 1) for name in TIMES for part in PARTS)])
    names = ["server", "requests/s asked", "at once"]
    head = ["requests/s", "output tokens/s", "all tokens/s", f"× {first}", "completed", "failed", "goodput/s"]
    head += ["cost/M tokens", "input", "output"]
    times = [f"{name.upper()} {part}" for name in TIMES for part in PARTS]
    return [_dense("Rates", [*names, *head], rates), _dense("Latencies, ms", [*names, *times], latencies)]


COSTS = ("", "input_", "output_")
TIMES = ("ttft", "tpot", "itl", "e2el")
PARTS = ("mean", "median", "p90", "p99")


def failures(document: Figures) -> Iterator[str]:
    """A line for each kind of failure of each server."""
    for server in document["servers"]:
        found: dict[str, tuple[int, str]] = {}
        for run in server["runs"]:
            for kind, of in run["failures"].items():
                found[kind] = (found.get(kind, (0, ""))[0] + of["count"], of["example"])
        for kind, (count, example) in found.items():
            yield f"{server['name']}: {count:,} × {kind} ({example})"


def _served(document: Figures) -> Iterator[Plot]:
    for name, about in (("ttft", "time to first token"), ("tpot", "time per output token")):
        lines = [
            _curve(server, [line for line in document["summary"] if line["server"] == server["name"]], name)
            for server in document["servers"]
        ]
        yield Plot(f"Throughput against {about}", "output tokens/s", f"median {name.upper()}, ms", lines)
    curves = [_distribution(server) for server in document["servers"] if server["runs"]]
    yield Plot("Time to first token, under the last load", "TTFT, ms", "% of requests that took no longer", curves)
    for server in document["servers"]:
        if server["runs"]:
            yield from _over_time(server["name"], server["runs"][-1]["timeline"])


def _curve(server: Figures, lines: Sequence[Figures], name: str) -> Series:
    lines = [line for line in lines if f"median_{name}_ms" in line["figures"]]
    x, y = ([line["figures"][of]["median"] for line in lines] for of in ("output_throughput", f"median_{name}_ms"))
    return Series(server["name"], x, y, [", ".join(_load(line)) for line in lines])


def _distribution(server: Figures) -> Series:
    times = sorted(one["ttft_ms"] for one in server["runs"][-1]["requests"] if not one["failure"])
    return Series(server["name"], times, [100 * (at + 1) / len(times) for at in range(len(times))])


def _over_time(name: str, of: Mapping[str, Sequence[float]]) -> Iterator[Plot]:
    """Of what a server's /metrics said: memory by state, waste, sequences."""
    at = of.get("at", [])
    if len(at) < 2:
        return
    empty = of.get("empty_bytes")
    if "running_bytes" in of:
        held = of["running_bytes"]
        parts = {"held": held}
        if empty is not None:
            parts = {"held, with tokens": [a - b for a, b in zip(held, empty, strict=True)], "held, empty": empty}
        parts |= {"cached": of["cached_bytes"], "free": of["free_bytes"]}
        areas = [Series(state, at, [value / MIB for value in values]) for state, values in parts.items()]
        yield Plot(f"{name}: memory of keys and values", "seconds", "MiB", areas, "areas")
        if empty is not None:
            share = [100 * a / b if b else 0.0 for a, b in zip(empty, held, strict=True)]
            yield Plot(f"{name}: waste", "seconds", "% of held memory without tokens", [Series("waste", at, share)])
    elif "usage" in of:
        share = [100 * value for value in of["usage"]]
        yield Plot(f"{name}: memory of keys and values", "seconds", "% of pages held", [Series("held", at, share)])
    lines = [Series(state, at, of[state]) for state in ("running", "waiting") if state in of]
    yield Plot(f"{name}: sequences", "seconds", "sequences", lines)


def of_layouts(document: Figures) -> Report:
    """Of `octavo bench compare`."""
    results = document["results"]
    works = [result["workload"] for result in results]
    about = [
        ("model", document["model"]),
        _options(document),
        *_machine(document),
    ]
    plots = [
        Plot(title, "", unit, [Series(name, [], values) for name, values in _by_variant(results, name)], "bars", works)
        for title, unit, name in (
            ("Output", "tokens/s", "output_tokens_per_s"),
            ("Sequences at once", "mean while requests wait", "running"),
            ("Memory with tokens", "% of the pool", "kv_use"),
            ("Waste", "% of the pool held without tokens", "waste"),
        )
    ]
    return Report("Paged and contiguous memory of the same size", about, [*map(compared, results), *plots])


def compared(result: Figures) -> Grid:
    """A workload's table of `octavo bench compare`, also for a terminal."""
    rows = [
        [
            *(line["name"], f"{line['output_tokens_per_s']:.1f}"),
            f"{line['speed']:.2f} ({line['least_speed']:.2f} … {line['most_speed']:.2f})",
            *(f"{line[name]:.1f}" for name in ("running", "planned_running")),
            *(f"{line[name]:.0%}" for name in ("kv_use", "planned_kv_use")),
        ]
        for line in result["summary"]
    ]
    head = ["", "tokens/s", "× (least … most)", "at once", "planned", "KV use", "planned"]
    return Grid(f"{result['workload']}: {result['about']}", head, rows)


def _by_variant(results: Sequence[Figures], name: str) -> Iterator[tuple[str, list[float]]]:
    for lines in zip(*(result["summary"] for result in results), strict=True):
        if name == "waste":
            yield lines[0]["name"], [100 * (line["kv_held"] - line["kv_use"]) for line in lines]
        else:
            yield lines[0]["name"], [line[name] * (100 if name == "kv_use" else 1) for line in lines]


def of_simulation(document: Figures, lines: Sequence[tuple[str, str]]) -> Report:
    """Of `octavo simulate`; `lines` are what it prints."""
    of = document["timeline"]
    at, pages, size = of["at"], document["num_pages"], document["engine"]["block_size"]
    held, cached = of["pages_held"], of["pages_cached"]
    empty = [slots / size for slots in of["slots_empty"]]
    states = {
        "held, with tokens": [a - b for a, b in zip(held, empty, strict=True)],
        "held, empty": empty,
        "cached": cached,
        "free": [pages - a - b for a, b in zip(held, cached, strict=True)],
    }
    waste = [100 * a / b if b else 0.0 for a, b in zip(empty, held, strict=True)]
    plots = [
        Plot("Memory by state", "seconds", "pages", [Series(n, at, y) for n, y in states.items()], "areas"),
        Plot("Waste", "seconds", "% of held memory without tokens", [Series("waste", at, waste)]),
        Plot("Sequences", "seconds", "sequences", [Series(n, at, of[n]) for n in ("running", "waiting")]),
    ]
    below = {"host": of["host_pages"], "disk": of["disk_pages"]}
    if any(map(any, below.values())):
        plots.append(Plot("Tiers below", "seconds", "pages", [Series(n, at, y) for n, y in below.items()]))
    return Report(f"Simulation of {document['trace']}", [*lines, _options(document)], plots)


def _options(document: Figures) -> tuple[str, str]:
    """Of the engine, those that are not the defaults."""
    return "options", " ".join(command("", EngineConfig(**document["engine"]))[3:]) or "the defaults"


def _machine(document: Figures) -> Iterator[tuple[str, str]]:
    of = document["machine"]
    yield "machine", f"{of['processor']}, {of['cores']} cores, load {of['load_before']} before"


def _load(line: Figures) -> list[str]:
    rate, bound = line["request_rate"], line["max_concurrency"]
    return [f"{rate:g} a second" if rate else "all at once"] + ([f"{bound} at a time"] if bound else [])


def _names(line: Figures) -> list[str]:
    rate, bound = line["request_rate"], line["max_concurrency"]
    return [line["server"], "trace" if rate is None else f"{rate:g}" if rate else "inf", str(bound or "–")]


def _dense(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Grid:
    """Without the columns that have nothing to say."""
    kept = [at for at in range(len(head)) if at < 3 or any(row[at] for row in rows)]
    return Grid(title, [head[at] for at in kept], [[row[at] for at in kept] for row in rows])


def _number(of: Figures | None, digits: int) -> str:
    return "" if of is None else f"{of['median']:,.{digits}f}"


def _range(of: Figures | None, digits: int) -> str:
    if of is None or of["least"] == of["most"]:
        return _number(of, digits)
    return f"{of['median']:,.{digits}f} ({of['least']:,.{digits}f} … {of['most']:,.{digits}f})"
