"""plan, simulate and advise: what a deployment takes, before it is there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn

from octavo.cli.options import SHAPE_HELP, UNGATED, Html, Json, Png, TraceKind, parse_bytes, takes, writable
from octavo.cli.terminal import aside, counting, fetch, screen, show
from octavo.config import EngineConfig
from octavo.errors import ConfigError, InvalidRequest, ModelError

if TYPE_CHECKING:
    from octavo.planner.known import Shape
    from octavo.planner.memory import Demand
    from octavo.simulator.cost import Cost
    from octavo.simulator.simulate import Simulation
    from octavo.simulator.traces import Arrival

PLANNED = (
    *("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("kv_cache_memory_bytes", "swap_space", "kv_cache_dtype_skip_layers"),
)


@takes(without=tuple(field.name for field in fields(EngineConfig) if field.name not in PLANNED))
def plan(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=f"{SHAPE_HELP} (--list).")] = None,
    lengths: Annotated[
        str, typer.Option(metavar="TOKENS,…", help="Tokens that a sequence holds; several with commas.")
    ] = "",
    prompt_tokens: Annotated[int | None, typer.Option(help="Tokens of a prompt; with --output-tokens.")] = None,
    output_tokens: Annotated[int | None, typer.Option(help="Tokens of its answer.")] = None,
    shared_tokens: Annotated[int, typer.Option(help="Tokens with which all prompts begin.")] = 0,
    gpu: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Plan for this; may be given again.")] = None,
    memory: Annotated[
        int | None, typer.Option(parser=parse_bytes, metavar="SIZE", help="Plan for a device with so much memory.")
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Devices that share the model.")] = 1,
    gpu_memory_utilization: Annotated[
        float, typer.Option(min=0.01, max=1, help="How much of a GPU's memory may be used.")
    ] = 0.9,
    weight_dtype: Annotated[
        str | None, typer.Option(help="What weights are stored as; the default is what the file has, else bf16.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="What keys and values are stored as; also fp16.")] = "auto",
    page_sizes: Annotated[
        bool, typer.Option("--page-sizes", help="Instead, compare pages of 4 to 256 tokens in each format.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="With --page-sizes: load the model and time its steps too.")
    ] = False,
    show_list: Annotated[bool, typer.Option("--list", help="Show the well-known models and GPUs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    *,
    engine: EngineConfig,
) -> None:
    """Tell what a model's keys and values take, and how many sequences fit, paged and contiguous.

    Without --gpu and --memory the plan is for this engine on this machine: the pool that it would allocate. GPUs are
    planned for engines that run there with pages of the same kind. docs/sizing.md tells the sums.

    --page-sizes counts all bytes that go with a token, and the slots that sequences leave empty: those of --lengths or
    --prompt-tokens, or of three usual mixes of lengths.
    """
    from octavo.allowance import available_memory
    from octavo.gpus import GB, GPUS
    from octavo.planner import memory as sums
    from octavo.planner.known import MODELS
    from octavo.planner.report import document, lines

    if show_list:
        for name, known in MODELS.items():
            screen.print(f"{name:<16} {known.num_parameters / 1e9:>7.2f} billion parameters  ({known.source})")
        for name, one in GPUS.items():
            screen.print(f"{name:<16} {one.memory_bytes // GB:>4} GB")
        return
    if model is None:
        raise InvalidRequest("model", "name one: octavo plan MODEL, or see octavo plan --list")
    if measure and not page_sizes:
        raise ConfigError("measure", "goes with --page-sizes")
    if (why := _nothing_to_page(Path(model).expanduser())) is not None:
        raise ModelError(model, why)
    shape = _shape(model)
    engine = replace(engine, kv_cache_dtype="bf16" if kv_cache_dtype == "fp16" else kv_cache_dtype)
    wanted = sums.each_of(lengths, prompt_tokens, output_tokens, shared_tokens)
    if page_sizes:
        _page_sizes(model, shape, engine, wanted, measure, as_json)
        return
    devices: list[sums.Device | int] = []
    devices += [sums.gpu(name, tensor_parallel_size, gpu_memory_utilization) for name in gpu or ()]
    if memory is not None:
        devices.append(sums.Device("given", memory, tensor_parallel_size))
    _in_one_process(tensor_parallel_size, not devices)
    told = kv_cache_dtype if kv_cache_dtype == "fp16" else ""
    plans = [
        sums.plan(shape, engine, wanted, where, weight_dtype=weight_dtype, kv_dtype=told)
        for where in devices or [available_memory()]
    ]
    if as_json:
        screen.print(json.dumps(document(model, shape, plans), indent=1))
        return
    for line in lines(model, shape, plans):
        show(line)


def _in_one_process(count: int, here: bool) -> None:
    """Raises ConfigError for several devices where the model is to run here."""
    if here and count > 1:
        raise ConfigError("tensor_parallel_size", "needs --gpu or --memory: this engine computes in one process")


def _page_sizes(model: str, shape: Shape, engine: EngineConfig, wanted: list[Demand], measure: bool, js: bool) -> None:
    """Print what page sizes cost."""
    from octavo.planner.page_size import DTYPES, SIZES, page_costs, report, usual_lengths

    costs = page_costs(shape.model, engine, {"given": wanted} if wanted else usual_lengths())
    measured: dict[str, dict[int, Any]] = {}
    if measure:
        from octavo.bench.page_size import measure as steps

        path = fetch(model)
        with aside.status("Loading") as status:
            measured = steps(path, engine, SIZES, DTYPES, progress=status.update)
    if js:
        figures = {"model": model, "pages": [asdict(cost) for cost in costs], "measured": measured}
        screen.print(json.dumps(figures, indent=1))
        return
    for line in report(costs, measured):
        show(line)


def _shape(model: str) -> Shape:
    """What is known of a model without loading it."""
    from octavo.models import catalog
    from octavo.planner.known import MODELS, Shape
    from octavo.planner.shapes import read_shape

    path = Path(model).expanduser()
    if model in catalog.MODELS or path.suffix == ".gguf":
        from octavo.models.weights import open_checkpoint  # takes a moment

        checkpoint = open_checkpoint(fetch(model))
        return Shape(model, checkpoint.config, weight_bytes=checkpoint.stored_bytes)
    if path.exists():
        return read_shape(path)
    if model.lower() in MODELS:
        return MODELS[model.lower()]
    close = get_close_matches(model.lower(), MODELS, n=1)
    hint = f": did you mean {close[0]}?" if close else "; octavo plan --list shows those"
    raise ModelError(model, f"is no file or folder and no well-known model{hint}")


@takes(without=("backend", "num_threads", "restore", UNGATED))
def simulate(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A trace file, or a workload of octavo bench.")],
    kind: Annotated[TraceKind | None, typer.Option(help="The trace's format; the default tells by its start.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="How many; the default is all.")] = None,
    rate: Annotated[
        float | None, typer.Option(min=0, help="Requests a second, at random times; the default is the trace's times.")
    ] = None,
    chars_per_token: Annotated[float, typer.Option(min=0.1, help="Where a trace has texts only.")] = 4.0,
    calibration: Annotated[Path | None, typer.Option(help="What steps take: a file of octavo bench calibrate.")] = None,
    model: Annotated[str | None, typer.Option(help="Instead, a well-known model; a wrong name lists them.")] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="On this GPU, by its data sheet; a wrong name lists them.", show_default="h100"),
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs that each layer is split over.")] = 1,
    json_file: Json = None,
    chrome_trace: Annotated[
        Path | None, typer.Option(help="Write steps and requests for chrome://tracing to this file.", callback=writable)
    ] = None,
    html: Html = None,
    png: Png = None,
    *,
    engine: EngineConfig,
) -> None:
    """Serve a trace on a clock that jumps: the scheduler and the page cache are the real ones, steps are only priced.

    What a step takes is measured (--calibration) or follows from a GPU's data sheet (--model, --gpu). Ctrl-C ends early
    and prints the figures so far. docs/simulator.md tells how near that comes.
    """
    from octavo.bench import charts
    from octavo.bench.report import check_png, write
    from octavo.simulator import simulate as simulator

    check_png(png)
    engine = replace(engine, max_num_seqs=_at_once(trace) or engine.max_num_seqs)
    cost, engine = _cost(calibration, model, gpu, tensor_parallel_size, engine)
    core = simulator.engine(engine, cost)
    arrivals = islice(arrivals_of_trace(trace, kind, requests, rate, chars_per_token, engine.seed), requests)
    whole = True
    with simulator.chrome_trace(chrome_trace) as chrome, _counting(requests) as shown:
        simulation = simulator.Simulation(core, arrivals, chrome)
        try:
            simulation.run(shown)
        except KeyboardInterrupt:
            whole = False
    on = str(calibration) if model is None else f"{tensor_parallel_size} × {gpu or DEFAULT_GPU}"
    asked = {"model": getattr(cost, "model", model), "on": on, "rate": rate}
    figures = {"trace": trace, "whole": whole, **asked, "engine": asdict(engine), **simulation.report()}
    if json_file is not None:
        json_file.write_text(json.dumps(figures) + "\n")
    lines = list(_simulated(figures))
    for name, value in lines:
        screen.print(f"{name:<12} {value}")
    write(charts.of_simulation(figures, lines), html, png)
    if not whole:
        aside.print("interrupted: these are the figures so far", style="red")
        raise typer.Exit(130)


DEFAULT_GPU = "h100"


def _cost(
    calibration: Path | None, model: str | None, gpu: str | None, count: int, config: EngineConfig
) -> tuple[Cost, EngineConfig]:
    """What steps take, and the configuration with the pages of its layout."""
    from octavo.gpus import GPUS
    from octavo.planner.known import MODELS
    from octavo.simulator.cost import Measured, Sheet

    if (calibration is None) == (model is None):
        raise ConfigError("model", "name either a well-known model, or a --calibration file")
    if calibration is not None:
        _alone(gpu, count)
        if config.kv_layout == "contiguous":
            if config.max_model_len is None:
                raise ConfigError("max_model_len", "is what a reservation holds: kv_layout contiguous needs it here")
            config = config.for_model(config.max_model_len)
        kept = tuple(sorted(set(config.kv_cache_dtype_skip_layers)))
        return Measured.open(calibration).at(config.kv_cache_dtype, config.block_size, kept), config
    dense = {name: shape.model for name, shape in MODELS.items() if shape.experts == 1}
    model, gpu = _known("model", str(model), dense), _known("gpu", gpu or DEFAULT_GPU, GPUS)
    context = dense[model].context_length
    config = replace(config.for_model(context), max_model_len=config.longest(context))
    pages = config.kv_format(dense[model])
    return Sheet(dense[model], GPUS[gpu], count, pages.dtype, pages.block_size, bf16_layers=pages.bf16_layers), config


def _alone(gpu: str | None, count: int) -> None:
    """Raises ConfigError for GPUs beside a calibration."""
    if gpu is not None or count > 1:
        raise ConfigError("calibration", "is of its own machine: gpu and tensor_parallel_size go without it")


def _known(option: str, name: str, table: Mapping[str, Any]) -> str:
    """The name as a table has it, in small letters. Raises ConfigError."""
    if name.lower() not in table:
        raise ConfigError(option, f"{name!r} is not known: there are {', '.join(table)}")
    return name.lower()


def arrivals_of_trace(
    trace: str, kind: TraceKind | None, requests: int | None, rate: float | None, chars_per_token: float, seed: int
) -> Iterator[Arrival]:
    from octavo.bench.workloads import WORKLOADS
    from octavo.simulator.traces import arrivals_of, paced, read

    if trace in WORKLOADS and not Path(trace).exists():
        _, work = WORKLOADS[trace].draw(requests, 49_152, seed)
        arrivals = arrivals_of(work)
    elif not Path(trace).exists():
        raise InvalidRequest("trace", f"{trace} is no file, and no workload: those are {', '.join(WORKLOADS)}")
    else:
        arrivals = read(Path(trace), kind and kind.value, chars_per_token=chars_per_token)
    return arrivals if rate is None else paced(arrivals, rate, seed)


def _at_once(trace: str) -> int | None:
    """How many of a workload's requests may run together, where it says so."""
    from octavo.bench.workloads import WORKLOADS

    return WORKLOADS[trace].at_once if trace in WORKLOADS and not Path(trace).exists() else None


ALONE_S = 86_400.0
"""Between requests of which one is over before the next comes."""
ADVISED = (
    *("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"),
    *("swap_space", "kv_cache_dtype", "preemption_mode"),
)


class GoalName(StrEnum):
    """The names in octavo.planner.advisor, for --help."""

    throughput = "throughput"
    latency = "latency"
    tail = "tail"


@takes(without=tuple(field.name for field in fields(EngineConfig) if field.name not in ADVISED))
def advise(
    trace: Annotated[
        str | None, typer.Argument(metavar="TRACE", help="A trace file, or a workload of octavo bench.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help=f"{SHAPE_HELP}.")] = None,
    lengths: Annotated[
        str,
        typer.Option(metavar="IN+OUT,…", help="Instead of a trace: lengths of prompts and answers, equally frequent."),
    ] = "",
    shared_tokens: Annotated[int, typer.Option(min=0, help="With --lengths: tokens with which all prompts begin.")] = 0,
    requests: Annotated[int, typer.Option(min=1, help="How many of the trace's requests.")] = 200,
    rate: Annotated[
        float | None, typer.Option(min=0, help="Requests a second, at random times; the default is the trace's times.")
    ] = None,
    kind: Annotated[TraceKind | None, typer.Option(help="The trace's format; the default tells by its start.")] = None,
    chars_per_token: Annotated[float, typer.Option(min=0.1, help="Where a trace has texts only.")] = 4.0,
    goal: Annotated[
        GoalName | None,
        typer.Option(
            help="Tokens a second, the mean time of requests, or its 99th percentile; the default is throughput "
            "where all requests come at once, else latency."
        ),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="On this GPU, by its data sheet; a wrong name lists them.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs that each layer is split over.")] = 1,
    memory: Annotated[
        int | None, typer.Option(parser=parse_bytes, metavar="SIZE", help="On a device with so much memory.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="What steps take here: a file of octavo bench calibrate.")
    ] = None,
    host_memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_bytes,
            metavar="SIZE",
            help="Most that a host tier may take; the default is four times the pool.",
        ),
    ] = None,
    allow_kv_quality_loss: Annotated[
        bool, typer.Option("--allow-kv-quality-loss", help="Consider int4 keys and values too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the advice as JSON.")] = False,
    *,
    engine: EngineConfig,
) -> None:
    """Recommend how to serve a workload, with the reason and the predicted gain of each choice.

    Candidates are tried in the simulator; options of the engine are where the search begins, and win a tie. It says so
    where paging buys nothing. Without --gpu, --memory and --calibration the advice is for this machine, its steps
    roughly as docs/performance.md has them. docs/advice.md tells more.
    """
    from octavo.allowance import available_cores, available_memory
    from octavo.bench import trials
    from octavo.gpus import GPUS
    from octavo.planner.memory import Device
    from octavo.planner.report import advice_document, advice_lines
    from octavo.simulator.cost import MEMORY_SHARE, Measured, processor

    if model is None:
        raise InvalidRequest("model", "name one: octavo advise TRACE --model MODEL")
    if (why := _nothing_to_page(Path(model).expanduser())) is not None:
        screen.print(json.dumps({"model": model, "pays": False, "paging": [why]}, indent=1) if as_json else why)
        return
    shape = _shape(model)
    if (trace is None) == (not lengths):
        raise InvalidRequest("lengths", "give either a TRACE or --lengths")
    if trace is not None:
        name, arrivals = (
            trace,
            list(islice(arrivals_of_trace(trace, kind, requests, rate, chars_per_token, engine.seed), requests)),
        )
        if rate is None and _at_once(trace) == 1:
            arrivals = [one._replace(at=number * ALONE_S) for number, one in enumerate(arrivals)]
    else:
        name, arrivals = lengths, trials.of_lengths(lengths, shared_tokens, requests, rate, engine.seed)
    gpu = gpu and _known("gpu", gpu, GPUS)
    _in_one_process(tensor_parallel_size, gpu is None and memory is None)
    where: Device | int = available_memory()
    if gpu is not None:
        where = Device(gpu, memory or GPUS[gpu].memory_bytes, tensor_parallel_size, 1.0 if memory else MEMORY_SHARE)
    elif memory is not None:
        where = Device("given", memory, tensor_parallel_size)
    if calibration is not None:
        _alone(gpu, tensor_parallel_size)
        cost_of = trials.timed(shape, Measured.open(calibration))
    else:
        cores = processor(available_cores(), memory or available_memory())
        cost_of = trials.sheet(shape, cores if gpu is None else GPUS[gpu], tensor_parallel_size)
    with counting() as bar:
        task = bar.add_task("Trials")
        found = trials.advice(
            name,
            shape,
            engine,
            arrivals,
            where,
            cost_of,
            goal=goal.value if goal is not None else "",
            quality_loss=allow_kv_quality_loss,
            host_bytes=host_memory,
            tell=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        screen.print(json.dumps(advice_document(model, found), indent=1))
        return
    for line in advice_lines(model, found):
        screen.print(line)


def _nothing_to_page(path: Path) -> str | None:
    """Why a model's config.json, or a pipeline's model_index.json, has no use for pages."""
    from octavo.planner.advisor import nothing_to_page
    from octavo.planner.shapes import read_object

    files = [path / "model_index.json", path / "config.json"] if path.is_dir() else [path]
    for file in files:
        if file.suffix == ".json" and file.is_file():
            return nothing_to_page(read_object(file))
    return None


@contextmanager
def _counting(total: int | None) -> Iterator[Callable[[Simulation], None] | None]:
    """A progress bar for a simulation."""
    if not aside.is_terminal:
        yield None
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), console=aside, transient=True) as bar:
        task = bar.add_task("", total=total)

        def show(simulation: Simulation) -> None:
            count = simulation.figures.num_finished
            bar.update(task, completed=count, description=f"{count:,} requests, {simulation.now:,.0f} s")

        yield show


def _simulated(of: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Lines about a simulation."""

    def spread(name: str, factor: float, unit: str) -> str:
        times = of[name]
        if times is None:
            return "–"
        return ", ".join(f"{key} {factor * times[key]:,.1f} {unit}" for key in ("p50", "p90", "p99"))

    yield "simulated", f"{of['model']} on {of['on']}" + (f", {of['rate']:g} requests a second" if of["rate"] else "")
    refused = f"; {of['refused']:,} were refused as too long" if of["refused"] else ""
    yield "requests", f"{of['finished']:,} of {of['requests']:,}, {of['requests_per_s']:.2f} a second{refused}"
    yield "time", f"{of['seconds']:,.1f} s in {of['wall_s']:.1f} s: {of['times_real_time']:,.0f} times real time"
    yield "output", f"{of['output_tokens_per_s']:,.1f} tokens/s ({of['output_tokens']:,} tokens)"
    yield "total", f"{of['total_tokens_per_s']:,.1f} tokens/s, prompts included"
    yield "queue", spread("queue_s", 1e3, "ms")
    yield "first token", spread("first_token_s", 1e3, "ms")
    yield "inter-token", spread("inter_token_s", 1e3, "ms")
    yield "request", spread("request_s", 1, "s")
    yield "steps", f"{of['num_steps']:,}, {1e3 * of['seconds'] / max(of['num_steps'], 1):.1f} ms apart on average"
    yield "cache", f"{100 * of['hit_rate']:.1f} % of the prompts' tokens were found in it"
    peak = of["peak_pages"] / of["num_pages"]
    use = f"{100 * of['kv_use']:.1f} % held on average, {100 * peak:.1f} % at most"
    yield "pages", f"{of['num_pages']:,}; {use}; {100 * of['kv_waste']:.1f} % of held memory empty"
    yield "preemptions", f"{of['num_preemptions']:,}; {of['resumed_tokens']:,} tokens found again"
    if of["moves"]:
        yield "moves", ", ".join(f"{name} {count:,}" for name, count in of["moves"].items())
