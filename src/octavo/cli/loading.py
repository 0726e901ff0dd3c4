"""bench serve: any server measured."""

from __future__ import annotations

import json
import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo import __version__
from octavo.cli.options import Html, Json, Png, TraceKind, WorkloadName
from octavo.cli.terminal import aside, counting, numbers, show_grid
from octavo.errors import InvalidRequest


class Endpoints(StrEnum):
    """What a server is asked at, for --help."""

    completions = "/v1/completions"
    chat = "/v1/chat/completions"


class PromptKind(StrEnum):
    """How prompts are told, for --help."""

    tokens = "tokens"
    text = "text"


def bench_serve(
    url: Annotated[list[str], typer.Option(help="A server; may be given again, to compare it with the first.")],
    name: Annotated[list[str] | None, typer.Option(help="What to call it; may be given again, in their order.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="As the servers name it, or each in their order; the default is the first they list."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="What the servers ask for.")
    ] = None,
    endpoint: Annotated[Endpoints, typer.Option(help="Where to ask.")] = Endpoints.completions,
    prompts: Annotated[
        PromptKind | None,
        typer.Option(help="Token ids, or words, which any server takes.", show_default="tokens, in chats text"),
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=200, help="Token ids are below this; the default is the server's, or 32,000.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for whole answers, where the server knows how.")] = True,
    workload: Annotated[
        WorkloadName, typer.Option(help="What to ask for.", rich_help_panel="Load")
    ] = WorkloadName.mixed,
    trace: Annotated[
        Path | None, typer.Option(help="Take times and lengths from this trace.", rich_help_panel="Load")
    ] = None,
    kind: Annotated[
        TraceKind | None,
        typer.Option(help="The trace's format; the default tells by its start.", rich_help_panel="Load"),
    ] = None,
    turns: Annotated[
        int, typer.Option(min=0, help="Hold conversations of so many turns instead.", rich_help_panel="Load")
    ] = 0,
    think_time: Annotated[
        float, typer.Option(min=0, help="Seconds between two turns, on average.", rich_help_panel="Load")
    ] = 0.0,
    scale: Annotated[
        float, typer.Option(min=1, help="Divide the conversations' lengths by this.", rich_help_panel="Load")
    ] = 96.0,
    num_requests: Annotated[
        int | None,
        typer.Option(
            "--num-requests",
            "--num-prompts",
            min=1,
            help="How many in a run; the default is all of a trace, or usually 64.",
            rich_help_panel="Load",
        ),
    ] = None,
    request_rate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE,…",
            help="Requests a second, at random times; several with commas; inf is all at once.",
            show_default="inf, or the trace's times",
            rich_help_panel="Load",
        ),
    ] = None,
    concurrency: Annotated[
        str,
        typer.Option(
            "--concurrency",
            "--max-concurrency",
            metavar="COUNT,…",
            help="Requests under way at most; several with commas.",
            rich_help_panel="Load",
        ),
    ] = "",
    rounds: Annotated[
        int, typer.Option(min=1, help="How often, the servers taking turns.", rich_help_panel="Load")
    ] = 1,
    num_warmups: Annotated[
        int, typer.Option(min=0, help="Requests before, that do not count.", rich_help_panel="Load")
    ] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Decides lengths, tokens and times.", rich_help_panel="Load")] = 1,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds that a request may take.", rich_help_panel="Load")
    ] = 600.0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MS",
            help="Count requests that meet this, of ttft, tpot, itl, e2el; may be given again.",
            rich_help_panel="Figures",
        ),
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="What a server costs, in any currency.", rich_help_panel="Figures")
    ] = None,
    output_weight: Annotated[
        float,
        typer.Option(min=0, help="Prompt tokens that one of an answer costs as much as.", rich_help_panel="Figures"),
    ] = 4.0,
    json_file: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """Load any server with OpenAI's API, streaming, and print rates, latencies, failures, goodput and cost.

    With several servers each run is done by all of them in turn, who is first changing from round to round; no two runs
    have prompts in common. Tokens are those that the server counts (usage), else its events. Names are those of vLLM's
    bench serve. Ctrl-C ends early and keeps what was measured. Where no request is answered the status is 1.
    docs/benchmarking.md tells more.
    """
    from octavo.bench import charts, loads
    from octavo.bench import serve as serving
    from octavo.bench.figures import Price, goals
    from octavo.bench.machine import machine
    from octavo.bench.report import check_png, write
    from octavo.bench.workloads import WORKLOADS

    asked = {key: _plain_option(value) for key, value in locals().items() if key in BENCH_SERVE}
    check_png(png)
    if trace is not None and turns:
        raise InvalidRequest("turns", "and --trace exclude each other")
    if trace is not None:
        load = loads.of_trace(trace, kind and kind.value, num_requests)
    elif turns:
        load = loads.of_conversations(turns, num_requests or 64, scale, think_time)
    else:
        load = loads.of_workload(WORKLOADS[workload.value], num_requests)
    as_text = (prompts or (PromptKind.text if turns or endpoint is Endpoints.chat else PromptKind.tokens)) == "text"
    if not as_text and (turns or endpoint is Endpoints.chat):
        raise InvalidRequest("prompts", "must be text in chats and conversations")
    plan = serving.Plan(
        load,
        _rates(request_rate, load.paced),
        _bounds(concurrency),
        rounds=rounds,
        seed=seed,
        timeout_s=timeout,
        num_warmups=num_warmups,
        ignore_eos=ignore_eos,
        goals=goals(goodput or []),
        price=None if price_per_hour is None else Price(price_per_hour, output_weight),
    )
    known = model or []
    for option, given in (("name", name or []), ("model", known)):
        if len(given) > len(url):
            raise InvalidRequest(option, f"is given {len(given)} times, for {len(url)} servers")
    names: list[str | None] = [*(name or []), *[None] * len(url)]
    models: list[str | None] = [*known, *[known[0] if len(known) == 1 else None] * len(url)]
    targets = [
        serving.Target.find(one, called, served, api_key, endpoint.value, as_text, vocab_size, timeout)
        for one, called, served in zip(url, names, models, strict=False)
    ]
    on = machine()
    with counting() as bar:
        task = bar.add_task("")
        servers, whole = serving.measure(
            targets, plan, lambda about, done, total: bar.update(task, description=about, completed=done, total=total)
        )
    document = {
        "octavo": __version__,
        "machine": on,
        "load": {"name": load.name, "about": load.about},
        "asked": asked,
        "whole": whole,
        "servers": servers,
        "summary": serving.summarise(servers),
    }
    if json_file is not None:
        json_file.write_text(json.dumps(document, indent=1) + "\n")
    if document["summary"]:
        for grid in charts.served(document):
            show_grid(grid)
        write(charts.of_serving(document), html, png)
    for line in charts.failures(document):
        aside.print(line, style="red")
    for line in serving.warnings(servers):
        aside.print(line, style="yellow")
    if not whole:
        aside.print("interrupted: these are the figures so far", style="red")
        raise typer.Exit(130)
    if not any(run["completed"] for server in servers for run in server["runs"]):
        raise typer.Exit(1)


BENCH_SERVE = (
    *("endpoint", "prompts", "ignore_eos", "workload", "trace", "turns", "think_time", "scale", "num_requests"),
    *("request_rate", "concurrency", "rounds", "num_warmups", "seed", "timeout", "goodput", "price_per_hour"),
    "output_weight",
)
"""What of its options a benchmark's figures hang on."""


def _plain_option(value: Any) -> Any:
    return value.value if isinstance(value, StrEnum) else str(value) if isinstance(value, Path) else value


def _bounds(text: str) -> list[int | None]:
    """Requests at once; None for no bound."""
    bounds = numbers("concurrency", text)
    if any(bound < 1 for bound in bounds):
        raise InvalidRequest("concurrency", f"must be numbers above 0, with commas between them, got {text!r}")
    return list(bounds) or [None]


def _rates(text: str | None, paced: bool) -> list[float | None]:
    """Requests a second; 0 for all at once, None for the times that a load has."""
    if text is None:
        return [None if paced else 0.0]
    try:
        rates = [float(number) for number in text.split(",")]
    except ValueError:
        rates = [-1.0]
    if not all(rate > 0 for rate in rates):
        raise InvalidRequest("request_rate", f"must be numbers above 0 or inf, with commas between them, got {text!r}")
    return [0.0 if math.isinf(rate) else rate for rate in rates]
