"""bench: this engine measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.options import UNGATED, Html, Json, Model, Png, WorkloadName, takes, writable
from octavo.cli.terminal import aside, counting, fetch, numbers, screen, show_grid, text_of
from octavo.config import EngineConfig
from octavo.errors import InvalidRequest


@takes(max_num_seqs=32, seed=1, without=(UNGATED,))
def throughput(
    model: Model,
    workload: Annotated[WorkloadName, typer.Option(help="What to serve.")] = WorkloadName.mixed,
    requests: Annotated[int | None, typer.Option(min=1, help="How many; the default is the workload's own.")] = None,
    json_file: Json = None,
    *,
    engine: EngineConfig,
) -> None:
    """Serve a workload of random tokens offline, print how fast that went and how near it came to the machine's limits.

    --seed decides the tokens, and the lengths where they are random; the peers' scripts have the same default.

    The limits are measured before and after the run: the rate at which all threads read memory, and that at which they
    multiply with the engine's instruction set, operands at hand. The bound of a step is the larger of two times: that
    of reading the weights once and each sequence's keys and values, and that of the products of the weights and of
    attention.
    docs/performance.md tells more.
    """
    from octavo.bench.machine import machine
    from octavo.bench.throughput import measure
    from octavo.bench.workloads import WORKLOADS

    work = WORKLOADS[workload.value]
    if work.at_once is not None:
        engine = replace(engine, max_num_seqs=work.at_once)
    figures: dict[str, Any] = {"machine": machine(), "model": model, "engine": asdict(engine)}
    path = fetch(model)
    with aside.status(f"Serving {workload.value}"):
        figures |= measure(path, engine, work, requests)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    first, gap = figures["time_to_first_token_s"], figures["inter_token_s"]
    for name, value in (
        ("workload", f"{workload.value}: {work.about}; {figures['num_requests']} requests"),
        ("output", f"{figures['output_tokens_per_s']:.1f} tokens/s ({figures['output_tokens']:,} tokens)"),
        ("total", f"{figures['total_tokens_per_s']:.1f} tokens/s, prompts included"),
        ("first token", f"median {first['median']:.3f} s, p99 {first['p99']:.3f} s after the start"),
        ("inter-token", f"median {1e3 * gap['median']:.1f} ms, p99 {1e3 * gap['p99']:.1f} ms" if gap else "–"),
        ("steps", f"{figures['num_steps']:,}, {1e3 * figures['step_s']:.1f} ms each on average"),
        ("cache", f"{figures['cached_tokens']:,} of {figures['prompt_tokens']:,} prompt tokens were found in it"),
        *_standing(figures["probe"], figures["standing"]),
    ):
        screen.print(f"{name:<12} {value}")


COMPARED = ("mixed", "uniform", "prefix")
CACHED_ONLY = (
    *("enable_prefix_caching", "swap_space", "kv_offload_dir", "kv_offload_space", "restore", "preemption_mode"),
    *("session_ttl", "max_pinned_fraction", "kv_quota"),
)


@takes(seed=1, max_model_len=2048, without=("kv_layout", "block_size", UNGATED, *CACHED_ONLY))
def compare(
    model: Model,
    workload: Annotated[
        list[WorkloadName] | None, typer.Option(help="What to serve; may be given again.", show_default="all three")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="How many; the default is the workload's own.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds, in which the engines take turns.")] = 3,
    block_size: Annotated[
        list[int] | None, typer.Option(help="Page size to compare; may be given again.", show_default="16")
    ] = None,
    without_prefix_caching: Annotated[
        bool, typer.Option("--without-prefix-caching", help="Compare the first page size without it too.")
    ] = False,
    dtypes: Annotated[
        str, typer.Option(metavar="DTYPE,…", help="Compare the first page size with keys and values in these too.")
    ] = "",
    json_file: Json = None,
    html: Html = None,
    png: Png = None,
    *,
    engine: EngineConfig,
) -> None:
    """Serve the same work from paged and from contiguous KV memory of the same size, side by side.

    Without --kv-cache-memory-bytes the memory holds 8 sequences of --max-model-len tokens. The engines differ in
    nothing but their pages. Sequences at once and the share of the memory that holds tokens are means over the steps
    at which requests wait (all steps, if those are the fewer); beside them stands what octavo plan expects.
    docs/sizing.md tells more.
    """
    from octavo.bench import charts
    from octavo.bench.compare import compare_layouts, gains, summary
    from octavo.bench.machine import machine
    from octavo.bench.report import check_png, write
    from octavo.bench.workloads import WORKLOADS

    check_png(png)
    works = [WORKLOADS[name] for name in (workload or COMPARED)]
    figures: dict[str, Any] = {"machine": machine(), "model": model, "engine": asdict(engine)}
    path = fetch(model)
    with aside.status("") as status:
        figures["results"], whole = compare_layouts(
            path,
            engine,
            works,
            num_requests=requests,
            repeats=repeats,
            block_sizes=block_size or [16],
            without_cache=without_prefix_caching,
            dtypes=list(filter(None, dtypes.split(","))),
            progress=status.update,
        )
    for result in figures["results"]:
        result["summary"] = summary(result)
        show_grid(charts.compared(result), *gains(result))
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    if figures["results"]:
        write(charts.of_layouts(figures), html, png)
    raise typer.Exit(0 if whole else 130)


@takes(seed=1, max_num_seqs=32, kv_cache_memory_bytes=1 << 30, without=("kv_layout", UNGATED, *CACHED_ONLY))
def prefix_cache(
    model: Model,
    workload: Annotated[
        list[WorkloadName] | None, typer.Option(help="What to serve; may be given again.", show_default="all three")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many in a round.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds, in which both engines take turns.")] = 9,
    json_file: Json = None,
    *,
    engine: EngineConfig,
) -> None:
    """Serve the same work with and without the prefix cache, and tell whether it pays.

    Requests of "mixed" and "uniform" have nothing in common, so that the cache finds nothing and only costs; those of
    "prefix" share 512 tokens, others in each round. What the cache adds to the books of pages, too little to be seen
    in whole rounds, is timed apart, a token. docs/sizing.md tells more.
    """
    from octavo.bench.machine import machine
    from octavo.bench.prefix_cache import measure, report
    from octavo.bench.workloads import WORKLOADS

    path, works = fetch(model), [WORKLOADS[name] for name in (workload or COMPARED)]
    with aside.status("Loading") as status:
        found = measure(path, engine, works, requests, repeats, status.update)
    if json_file is not None:
        figures = {"machine": machine(), "model": model, "engine": asdict(engine), "results": found}
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    for result in found:
        for line in report(result):
            screen.print(line)


class DayName(StrEnum):
    """The names in octavo.bench.day, for --help."""

    none = "none"
    prefix = "prefix"
    tiers = "tiers"


@takes(max_num_seqs=32, seed=1, without=("enable_prefix_caching",))
def day(
    model: Model,
    hours: Annotated[int, typer.Option(min=1, help="Hours of the day.")] = 8,
    minutes: Annotated[float, typer.Option(min=0.01, help="Real minutes that the day takes in a configuration.")] = 3.5,
    sessions: Annotated[
        int | None,
        typer.Option(
            min=2, help="Conversations in the end; the default follows from the turns that one has in traces."
        ),
    ] = None,
    scale: Annotated[float, typer.Option(min=1, help="Divide the traces' lengths by this.")] = 96.0,
    utilisation: Annotated[
        float, typer.Option(min=0.01, max=1, help="Arrivals, as a share of the turns that are served without reuse.")
    ] = 0.5,
    only: Annotated[
        list[DayName] | None,
        typer.Option(metavar="CONFIGURATION", help="Play none, prefix or tiers; may be given again."),
    ] = None,
    plot: Annotated[Path, typer.Option(metavar="FILE", help="Draw the day into this PNG.", callback=writable)] = Path(
        "day.png"
    ),
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write the figures to this file after each configuration.",
            callback=writable,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the day in the --json file: its load, and what is still to be run."),
    ] = False,
    *,
    engine: EngineConfig,
) -> None:
    """Play a working day in which conversations come, talk, go idle and return, and print what first tokens wait for.

    The day is played in three configurations, on the same turns at the same times: without reuse (none), with prefix
    caching (prefix), and with host memory below the pool and named sessions (tiers). Each hour asks for the same work;
    only the conversations that lie idle grow. Gaps, turns and lengths are those of published traces.
    docs/performance.md tells more.

    --kv-cache-memory-bytes is by default a tenth of what all conversations hold in the end, --swap-space half as much
    again as they hold. --seed decides the turns. Ctrl-C ends the day; configurations that are complete are kept.
    """
    from octavo.bench import day as days
    from octavo.bench.machine import machine

    if resume and json_file is None:
        raise InvalidRequest("resume", "needs --json")
    if not days.can_plot():
        aside.print("There will be no plot: that needs matplotlib (pip install matplotlib)", style="yellow")
    wish = days.Wish(hours, minutes, sessions, scale, utilisation)
    asked = json.loads(json.dumps({"model": model, **wish._asdict(), "engine": asdict(engine)}))
    figures: dict[str, Any] = {"machine": machine(), "asked": asked, "plan": None, "configurations": {}}
    if resume and json_file is not None and json_file.exists():
        figures = json.loads(text_of(json_file))
        if figures["asked"] != asked:
            raise InvalidRequest("resume", f"{json_file} is of another day: give the same options")
    path, found, whole = fetch(model), figures["configurations"], True
    with counting() as bar:
        task = bar.add_task("")

        def tell(name: str, done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total)

        try:
            figures["plan"] = figures["plan"] or days.plan(path, engine, wish, tell)._asdict()
            plan = days.Plan(**figures["plan"] | {"wish": wish})
            for name in [one.value for one in only or DayName]:
                if name not in found:
                    found[name] = days.run(path, engine, plan, name, tell)
                    if json_file is not None:
                        json_file.write_text(json.dumps(figures, indent=1) + "\n")
        except KeyboardInterrupt:
            whole = False
    for line in days.report(found):
        screen.print(line)
    if found and days.can_plot():
        days.draw(found, plot)
    raise typer.Exit(0 if whole else 130)


@takes(seed=1, without=("kv_cache_dtype", UNGATED))
def quality(
    model: Model,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Score this text; may be given again. The default is what the model says by itself."),
    ] = None,
    dtypes: Annotated[str, typer.Option(help="Formats to compare with bf16.")] = "fp32,int8,fp8_e4m3,fp8_e5m2,int4",
    lengths: Annotated[str, typer.Option(help="Contexts in which facts are looked for.")] = "512,1024,2048,4096,8192",
    json_file: Json = None,
    *,
    engine: EngineConfig,
) -> None:
    """Compare the formats of keys and values with bf16: perplexity, agreement, facts found in long contexts.

    Perplexity and agreement are of the same tokens, put to the model in windows of 1,024; fp32 shows how much a change
    far below the others' makes. 24 facts are told all over a context of other text and asked for at its end; those
    that are answered without a wrong token count as found. With --backend reference nothing but keys and values is
    rounded; the native kernels round the inputs of products too, and any change moves some of those roundings.
    """
    from octavo.bench.machine import machine
    from octavo.bench.quality import measure, num_steps

    texts = [text_of(path) for path in text or []]
    names, sizes = dtypes.split(","), numbers("lengths", lengths)
    path = fetch(model)
    with counting() as bar:
        task = bar.add_task("Loading", total=num_steps(path, texts, names, sizes))
        found = measure(path, engine, texts, names, sizes, lambda about: bar.update(task, description=about, advance=1))
    figures = {"machine": machine(), "model": model, "engine": asdict(engine), **found}
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    own = " of the model's own" if figures["own_text"] else ""
    screen.print(f"{figures['num_tokens']:,} tokens{own}, in {figures['seconds'] / 60:.1f} minutes")
    screen.print(f"{'':<10} {'bytes':>7} {'perplexity':>22} {'top-1':>7} {'drift':>7}  facts found")
    for name, of in figures["dtypes"].items():
        rise = f"{of['perplexity']:.3f} {of['perplexity_percent']:+.2f} ± {of['perplexity_error_percent']:.2f} %"
        facts = ", ".join(f"{count} in {length:,}" for length, count in of["found"].items())
        same = f"{of['top1_percent']:>5.1f} % {of['drift']:>7.4f}"
        screen.print(f"{name:<10} {of['token_bytes']:>7,.0f} {rise:>22} {same}  {facts}")
        if "verdict" in of:
            screen.print(f"{'':<10} {of['verdict']} ({of['bound_percent']} %)")


@takes(max_num_seqs=32, without=(UNGATED,))
def calibrate(
    model: Model,
    json_file: Annotated[
        Path, typer.Option("--json", help="Write what was found to this file.", callback=writable)
    ] = Path("calibration.json"),
    repeats: Annotated[int, typer.Option(min=1, help="How often each size is timed.")] = 2,
    *,
    engine: EngineConfig,
) -> None:
    """Time the engine's steps over a small grid of prompts and answers, and write what `octavo simulate` needs.

    Do it with the machine to itself, and with the --max-num-seqs and --max-num-batched-tokens that are to be simulated:
    beyond what was timed the figures are extrapolated.
    """
    from octavo.bench.calibrate import calibrate as measure
    from octavo.bench.machine import machine

    about = {"machine": machine(), "engine": asdict(engine)}
    path = fetch(model)
    with aside.status("Timing steps"):
        fit = measure(path, model, engine, repeats)
    fit.cost.save(json_file, **about, num_steps=fit.num_steps, num_disturbed=fit.num_disturbed, error=fit.error)
    screen.print(f"{fit.num_steps} steps, half of them within {100 * fit.error:.1f} % of the fit; {json_file}")


def _standing(probe: dict[str, Any], standing: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Lines about where a run stands against the machine."""
    reads = ", ".join(f"{rate / 1e9:.0f} ({size >> 20} MiB)" for size, rate in probe["reads"].items())
    rates = ", ".join(f"{rate / 1e9:,.0f} ({name})" for name, rate in probe["operations"].items())
    yield "limits", f"{probe['variant']}, threads: {probe['num_threads']}; GB/s read, by what is read: {reads}"
    yield "", f"Gop/s multiplied: {rates}"
    for kind in ("prompts", "decode"):
        if kind in standing:
            of = standing[kind]
            size = f"{of['num_steps']:,} steps of {of['num_tokens']:.0f} tokens, {1e3 * of['step_s']:.1f} ms each"
            yield kind, f"{100 * of['share']:.0f} % of the bound; {size}"
            reading = f"reading {of['read_bytes'] / 1e6:.0f} MB takes {1e3 * of['read_s']:.1f} ms at least"
            operations = sum(of["operations"].values()) / 1e9
            yield "", f"{reading}, multiplying {operations:.1f} Gop {1e3 * of['multiply_s']:.1f} ms"
    yield (
        "control",
        f"{1e3 * standing['all']['control_s']:.2f} ms a step are spent outside of the model and the sampler",
    )
