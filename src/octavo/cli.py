"""The command line: turns options into an engine and prints what it says.

Every engine and sampling option is a field of EngineConfig or SamplingParams, with its default and its check; this file
adds only what a terminal needs. It never schedules, samples or touches a page.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from typer.core import TyperCommand

from octavo import __version__, kv_costs
from octavo.config import EngineConfig
from octavo.errors import ConfigError, InvalidRequest, ModelError, OctavoError
from octavo.server.settings import ServerConfig
from octavo.types import SamplingParams

if TYPE_CHECKING:
    from octavo.bench.report import Grid
    from octavo.client import Delta, RemoteChat
    from octavo.engine.llm import LLM, StreamEvent
    from octavo.planner.known import Shape
    from octavo.planner.memory import Demand
    from octavo.simulator.cost import Cost
    from octavo.simulator.simulate import Simulation
    from octavo.simulator.traces import Arrival

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # whole option names at any width
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve language models from a paged KV cache.",
)
screen = Console(highlight=False, markup=False, soft_wrap=True)
aside = Console(highlight=False, markup=False, soft_wrap=True, stderr=True)

PIPE_WIDTH = 200
"""Of a wide table that goes into a file or a pipe."""

SAMPLING_HELP = {
    "n": "answers to each prompt, from one stored prompt",
    "temperature": "0 takes the likeliest token, 1 samples as the model predicts",
    "top_p": "sample from the likeliest tokens that make up this probability",
    "top_k": "sample from this many of the likeliest tokens; 0 for all",
    "min_p": "drop tokens less likely than this share of the likeliest one",
    "seed": "the same prompt and seed give the same text, whatever runs beside it",
    "presence_penalty": "lower the score of tokens that are in the answer",
    "frequency_penalty": "lower it for each time they are",
    "repetition_penalty": "divide the score of tokens that are in the prompt or the answer",
    "stop": "end before this text; may be given again",
    "stop_token_ids": "end after this token; may be given again",
    "include_stop_str_in_output": "keep the text that ended the answer",
    "min_tokens": "shortest answer",
    "max_tokens": "longest answer, as far as the context has room",
    "ignore_eos": "go on after the model's end-of-text token",
    "logprobs": "log-probabilities of each token and of this many others, for --json",
    "prompt_logprobs": "the same for the prompt's tokens",
    "logit_bias": "add to a token's score; may be given again",
    "use_beam_search": "search with beams instead of sampling",
    "beam_width": "beams that are kept",
    "length_penalty": "above 0 favours long beams",
}

# ── options from dataclasses ──────────────────────────────────────────────────────────────────────────────────────


def takes(*, without: tuple[str, ...] = (), **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of the configurations (see CONFIGS) among its parameters.

    The command receives the dataclasses, built and checked. A field that both have (`seed`) is one option for both.
    `defaults` replaces the fields' own; those in `without` get no option.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        configs = {p.name: p.annotation for p in own if p.annotation in CONFIGS}
        parameters = {p.name: p for p in own if p.name not in configs}
        taken = {
            name: [field.name for field in fields(config) if field.name not in (*without, *NO_OPTIONS)]
            for name, config in configs.items()
        }
        for name, config in configs.items():
            for option in taken[name]:
                parameters.setdefault(option, _option(config, option, defaults))

        def run(**values: Any) -> None:
            for name, config in configs.items():
                values[name] = config(**{option: _from_option(option, values[option]) for option in taken[name]})
            command(**{p.name: values[p.name] for p in own})

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {name: p.annotation for name, p in parameters.items()}
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters.values()]
        )
        return run

    return decorate


def _option(config: type, name: str, defaults: dict[str, Any]) -> inspect.Parameter:
    """A dataclass's field as a parameter that Typer understands."""
    hint = get_type_hints(config)[name]
    default = defaults.get(name, next(field.default for field in fields(config) if field.name == name))
    flags = ["--" + name.replace("_", "-")]
    settings: dict[str, Any] = {}
    if name == "n":
        flags = ["-n", "--n"]
    elif name.endswith("_bytes"):
        settings = {"parser": parse_bytes, "metavar": "SIZE"}
        default = default if default is None else f"{default >> 20}MiB"
    elif name in LISTS:
        hint, default, settings = LISTS[name], [], {"show_default": False}
    elif hint is bool and default:
        flags = []  # Typer then makes a pair, --enable-… and --no-enable-…
    about = SAMPLING_HELP[name] if config is SamplingParams else _help_of(config)[name]
    settings |= {"help": f"{about[:1].upper()}{about[1:]}.", "rich_help_panel": PANELS.get(name, CONFIGS[config])}
    if name in METAVARS:
        settings["metavar"] = METAVARS[name]
    annotation = Annotated[hint, typer.Option(*flags, **settings)]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


CONFIGS: dict[type, str] = {EngineConfig: "Engine", SamplingParams: "Sampling", ServerConfig: "Server"}
"""What options are made of, and the headings under which they stand."""
NO_OPTIONS = ("guide",)
UNGATED = "allow_kv_quality_loss"
"""No option of what only measures: it takes every format."""
LISTS: dict[str, Any] = {
    "stop": list[str],
    "stop_token_ids": list[int],
    "kv_cache_dtype_skip_layers": list[int],
    "logit_bias": list[str],
    **dict.fromkeys(("allowed_origins", "served_model_name", "api_key"), list[str]),
}
METAVARS = {
    "stop": "TEXT",
    "stop_token_ids": "TOKEN",
    "kv_cache_dtype_skip_layers": "LAYER",
    "logit_bias": "TOKEN=BIAS",
    "allowed_origins": "ORIGIN",
    "served_model_name": "NAME",
    **dict.fromkeys(("api_key", "admin_api_key"), "KEY"),
    **dict.fromkeys(("swap_space", "kv_offload_space"), "GIB"),
    **dict.fromkeys(("max_pinned_fraction", "kv_quota"), "FRACTION"),
    "session_ttl": "SECONDS",
    "kv_offload_dir": "DIRECTORY",
    "preemption_mode": "MODE",
}
PANELS = {
    **dict.fromkeys(("host", "port", "uds", "allowed_origins"), "Network"),
    **dict.fromkeys(("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"), "HTTPS"),
    **dict.fromkeys(("served_model_name", "chat_template", "max_logprobs"), "API"),
    **dict.fromkeys(("api_key", "admin_api_key", "share_prefixes"), "Keys"),
    **dict.fromkeys(("max_body_bytes", "max_prompts_per_request", "max_queued_requests", "max_connections"), "Limits"),
    **dict.fromkeys(
        ("header_timeout", "body_timeout", "timeout_keep_alive", "drain_timeout", "step_timeout"), "Limits"
    ),
    **dict.fromkeys(("swap_space", "kv_offload_dir", "kv_offload_space", "restore", "preemption_mode"), "Memory tiers"),
    **dict.fromkeys(("session_ttl", "max_pinned_fraction", "kv_quota"), "Memory tiers"),
    **dict.fromkeys(("disable_log_requests", "log_prompts", "metrics_namespace"), "Watching"),
    **dict.fromkeys(("no_ui", "ui_show_text"), "Watching"),
}


def _help_of(config: type) -> dict[str, str]:
    """The lines `name: text.` of a configuration's docstring."""
    lines = re.findall(r"^(\w+): (.+)\.$", inspect.getdoc(config) or "", re.MULTILINE)
    return {name: text.replace("; None ", "; the default ") for name, text in lines}


class Command(TyperCommand):
    """Lists its options under their headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                default = "Arguments" if param.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(param, "rich_help_panel", None) or default, []).append(record)
        if "Options" in sections:
            sections["Options"] = sections.pop("Options")  # what has no heading comes last
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _from_option(name: str, value: Any) -> Any:
    if name != "logit_bias":
        return value
    bias = {}
    for pair in value:
        try:
            token, _, number = pair.partition("=")
            bias[int(token)] = float(number)
        except ValueError:
            raise InvalidRequest(name, f"must look like 42=-1.5, got {pair!r}") from None
    return bias or None


def parse_bytes(text: str) -> int:
    """A size as people write it: 1048576, 512MB, 1.5 GiB; G alone means GiB."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)(i?b)?\s*", str(text), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size: write bytes, or for example 512MiB or 2GB")
    number, prefix, unit = match.groups()
    base = 1000 if (unit or "").lower() == "b" else 1024
    return int(float(number) * base ** " kmgt".index(prefix.lower() or " "))


# ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────

MODEL_HELP = "A catalogue name, a hub name, or the path of a .gguf file or a folder."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
HTML_HELP = "Write tables and plots to this file, one page that asks no server for anything."
PNG_HELP = "Write the plots to this file; that needs matplotlib (pip install matplotlib)."
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help=HTML_HELP)]
Png = Annotated[Path | None, typer.Option("--png", metavar="FILE", help=PNG_HELP)]


def _version(wanted: bool) -> None:
    if wanted:
        screen.print(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def _octavo(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command(cls=Command)
@takes(temperature=0.0, max_tokens=128, seed=0)
def generate(
    model: Model,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Texts to continue.")] = None,
    file: Annotated[Path | None, typer.Option(help="Take a prompt from each line of this file; - is stdin.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt to the model as a user's message.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list with one object for each prompt.")] = False,
    *,
    sampling: SamplingParams,
    engine: EngineConfig,
) -> None:
    """Continue a prompt, or many at once.

    Without PROMPT and --file, standard input is the prompt. A single answer is shown as it comes.
    """
    texts = _prompts(prompts or [], file)
    conversations = [[{"role": "user", "content": text}] for text in texts]
    with _load(model, engine) as llm:
        if len(texts) == sampling.n == 1 and not as_json:
            _, whole = _show(llm, llm.stream_chat(conversations, sampling) if chat else llm.stream(texts, sampling))
            raise typer.Exit(0 if whole else 130)
        progress = aside.is_terminal
        if chat:
            outputs = llm.chat(conversations, sampling, progress=progress)
        else:
            outputs = llm.generate(texts, sampling, progress=progress)
    if as_json:
        documents = [json.dumps(_plain(asdict(output)), ensure_ascii=False) for output in outputs]
        sys.stdout.write("[\n" + ",\n".join(documents) + "\n]\n")
        return
    for text, output in zip(texts, outputs, strict=True):
        screen.print(text, style="bold")
        for choice in output.outputs:
            screen.print(f"[{choice.index}] {choice.text}" if sampling.n > 1 else choice.text)
        screen.print()


ONE_ANSWER = ("n", "logprobs", "prompt_logprobs", "use_beam_search", "beam_width", "length_penalty")
CHAT_HELP = "/reset begins anew, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


@app.command(cls=Command)
@takes(temperature=0.7, top_p=0.9, max_tokens=512, seed=0, without=ONE_ANSWER)
def chat(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    url: Annotated[str | None, typer.Option(metavar="URL", help="Talk to this OpenAI-compatible server.")] = None,
    *,
    sampling: SamplingParams,
    engine: EngineConfig,
) -> None:
    """Talk with a model.

    Each turn computes only what is new: the conversation so far is found in the cache. Ctrl-C stops an answer, Ctrl-D
    leaves. Lines of a pipe are taken as turns.

    With --url no model is loaded; MODEL is then a name that the server knows, or its first one, and OPENAI_API_KEY in
    the environment its key.
    """
    start = [{"role": "system", "content": system}] if system is not None else []
    messages = list(start)
    remote = None if url is None else _remote(url, model, engine)
    with remote or _load(model, engine) as llm:
        if sys.stdin.isatty():
            aside.print(CHAT_HELP, style="dim")
        for line in _lines():
            if line == "/quit":
                break
            if line == "/reset":
                messages = list(start)
                if remote is not None:
                    remote.begin()
            elif line.startswith("/"):
                aside.print(CHAT_HELP, style="dim")
            else:
                turn = {"role": "user", "content": line}
                try:
                    answer, _ = _show(llm, llm.stream_chat([*messages, turn], sampling))
                except InvalidRequest as error:
                    aside.print(f"{error} (/reset begins anew)", style="red")
                else:
                    messages += [turn, {"role": "assistant", "content": answer}]


class TopSort(StrEnum):
    """The orders of octavo.top.memory, for --help."""

    bytes = "bytes"
    idle = "idle"
    name = "name"


@app.command(cls=Command)
def top(
    url: Annotated[str, typer.Option(metavar="URL", help="The server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar=["OCTAVO_ADMIN_API_KEY", "OCTAVO_API_KEY"],
            help="A key; an admin's shows every tenant.",
        ),
    ] = None,
    interval: Annotated[float, typer.Option(metavar="S", min=0.1, max=5, help="Seconds between updates.")] = 1.0,
    sort: Annotated[TopSort, typer.Option(help="Which holders come first.")] = TopSort.bytes,
    wanted: Annotated[
        str, typer.Option("--filter", metavar="TEXT", help="Only holders with this in name, kind or tenant.")
    ] = "",
    once: Annotated[bool, typer.Option("--once", help="Print what there is now, and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: as JSON.")] = False,
) -> None:
    """Watch who holds the memory of a running server.

    b, i and n sort by bytes, idle time and name, / filters, p pins a session and u undoes that, d demotes it, r
    releases it, e explains a request, Tab changes the table, q leaves.
    """
    from octavo.top.feed import Feed, hopeless

    if as_json and not once:
        raise ConfigError("--json", "goes with --once: a script wants one answer")
    feed = Feed(url, api_key)
    if not once:
        if not sys.stdout.isatty():
            raise ConfigError("--once", "is missing: the output is no terminal")
        from octavo.top.app import Top  # takes a moment

        watching = Top(feed, interval=interval, sort=sort.value, wanted=wanted)
        watching.run()
        raise typer.Exit(watching.return_code or 0)
    from octavo.top.memory import Memory
    from octavo.top.report import lines

    memory = Memory()
    try:
        memory.take("snapshot", feed.snapshot())
    except OctavoError as error:
        raise OctavoError(hopeless(error) or str(error)) from error
    if as_json:
        screen.print(json.dumps(memory.document(sort.value, wanted), ensure_ascii=False))
    else:
        width = None if screen.is_terminal else PIPE_WIDTH
        wide = Console(highlight=False, markup=False, soft_wrap=True, width=width)
        for line in lines(memory, sort.value, wanted):
            wide.print(line)


def _from_file(context: typer.Context, path: Path | None) -> Path | None:
    """Take defaults from a YAML file: the names of options, with hyphens or underscores, and their values."""
    if path is None:
        return None
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError("config", f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError("config", f"{path} must map the names of options to values")
    known = {str(parameter.name): parameter for parameter in context.command.params}
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).removeprefix("--").replace("-", "_")
        if name not in known or name in ("config", "help"):
            close = get_close_matches(name, known, n=1)
            hint = f": did you mean {close[0].replace('_', '-')}?" if close else ""
            raise ConfigError("config", f"{path} has {str(key)[:60]!r}, which is no option{hint}")
        if isinstance(value, dict):
            raise ConfigError("config", f"{path} has a table at {key}, where a value belongs")
        listed = name in LISTS and not isinstance(value, list)
        defaults[name] = [value] if listed else value
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


@app.command(cls=Command)
@takes()
def serve(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Take options from this YAML file.", is_eager=True, callback=_from_file),
    ] = None,
    *,
    server: ServerConfig,
    engine: EngineConfig,
) -> None:
    """Serve a model with OpenAI's API.

    Any OpenAI client works with the base URL http://127.0.0.1:8000/v1. An option given here counts more than the same
    one in --config, which may name the MODEL too. SIGTERM and Ctrl-C let running requests finish.
    """
    if model is None:
        raise ConfigError("model", "name one: octavo serve MODEL")
    if key := os.environ.get("OCTAVO_API_KEY"):
        server = replace(server, api_key=(*server.api_key, key))
    if server.admin_api_key is None and (key := os.environ.get("OCTAVO_ADMIN_API_KEY")):
        server = replace(server, admin_api_key=key)
    path = _fetch(model)

    from octavo.server.listen import run  # takes a moment

    raise typer.Exit(run(path, model, server, engine))


@app.command(cls=Command)
def pull(model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = None) -> None:
    """Fetch a model and print its path, or list the catalogue."""
    from octavo.models.catalog import MODELS

    if model is not None:
        screen.print(str(_fetch(model)))
    else:
        for name, entry in MODELS.items():
            screen.print(f"{name}  {entry.description}")


PLANNED = (
    *("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("kv_cache_memory_bytes", "swap_space", "kv_cache_dtype_skip_layers"),
)
SHAPE_HELP = "A config.json, a folder with one, a .gguf file, a catalogue name, or a well-known model"


@app.command(cls=Command)
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
    from octavo.engine.sizing import available_memory
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
    if not devices and tensor_parallel_size > 1:
        raise ConfigError("tensor_parallel_size", "needs --gpu or --memory: this engine computes in one process")
    told = kv_cache_dtype if kv_cache_dtype == "fp16" else ""
    plans = [
        sums.plan(shape, engine, wanted, where, weight_dtype=weight_dtype, kv_dtype=told)
        for where in devices or [available_memory()]
    ]
    if as_json:
        screen.print(json.dumps(document(model, shape, plans), indent=1))
        return
    for line in lines(model, shape, plans):
        screen.print(line)


def _page_sizes(model: str, shape: Shape, engine: EngineConfig, wanted: list[Demand], measure: bool, js: bool) -> None:
    """Print what page sizes cost."""
    from octavo.planner.page_size import DTYPES, SIZES, page_costs, report, usual_lengths

    costs = page_costs(shape.model, engine, {"given": wanted} if wanted else usual_lengths())
    measured: dict[str, dict[int, Any]] = {}
    if measure:
        from octavo.bench.page_size import measure as steps

        path = _fetch(model)
        with aside.status("Loading") as status:
            measured = steps(path, engine, SIZES, DTYPES, progress=status.update)
    if js:
        figures = {"model": model, "pages": [asdict(cost) for cost in costs], "measured": measured}
        screen.print(json.dumps(figures, indent=1))
        return
    for line in report(costs, measured):
        screen.print(line)


def _shape(model: str) -> Shape:
    """What is known of a model without loading it."""
    from octavo.models import catalog
    from octavo.planner.known import MODELS, Shape
    from octavo.planner.memory import read_shape

    path = Path(model).expanduser()
    if model in catalog.MODELS or path.suffix == ".gguf":
        from octavo.models.weights import open_checkpoint  # takes a moment

        checkpoint = open_checkpoint(_fetch(model))
        return Shape(model, checkpoint.config, weight_bytes=checkpoint.stored_bytes)
    if path.exists():
        return read_shape(path)
    if model.lower() in MODELS:
        return MODELS[model.lower()]
    close = get_close_matches(model.lower(), MODELS, n=1)
    hint = f": did you mean {close[0]}?" if close else "; octavo plan --list shows those"
    raise ModelError(model, f"is no file or folder and no well-known model{hint}")


class TraceKind(StrEnum):
    """The names in octavo.simulator.traces, for --help."""

    azure = "azure"
    mooncake = "mooncake"
    sharegpt = "sharegpt"


@app.command(cls=Command)
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
    gpu: Annotated[str, typer.Option(help="On this GPU, by its data sheet; a wrong name lists them.")] = "h100",
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs that each layer is split over.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file too.")] = None,
    chrome_trace: Annotated[
        Path | None, typer.Option(help="Write steps and requests for chrome://tracing to this file.")
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
    cost, engine = _cost(calibration, model, gpu, tensor_parallel_size, engine)
    core = simulator.engine(engine, cost)
    arrivals = islice(_arrivals(trace, kind, requests, rate, chars_per_token, engine.seed), requests)
    whole = True
    with simulator.chrome_trace(chrome_trace) as chrome, _counting(requests) as shown:
        simulation = simulator.Simulation(core, arrivals, chrome)
        try:
            simulation.run(shown)
        except KeyboardInterrupt:
            whole = False
    figures = {"trace": trace, "whole": whole, "engine": asdict(engine), **simulation.report()}
    if json_file is not None:
        json_file.write_text(json.dumps(figures) + "\n")
    lines = list(_simulated(figures))
    for name, value in lines:
        screen.print(f"{name:<12} {value}")
    write(charts.of_simulation(figures, lines), html, png)
    if not whole:
        aside.print("interrupted: these are the figures so far", style="red")
        raise typer.Exit(130)


def _cost(
    calibration: Path | None, model: str | None, gpu: str, count: int, config: EngineConfig
) -> tuple[Cost, EngineConfig]:
    """What steps take, and the configuration with the pages of its layout."""
    from octavo.gpus import GPUS
    from octavo.kv_format import ALIASES
    from octavo.planner.known import MODELS
    from octavo.simulator.cost import Measured, Sheet

    if (calibration is None) == (model is None):
        raise ConfigError("model", "name either a well-known model, or a --calibration file")
    if calibration is not None:
        if config.kv_layout == "contiguous":
            if config.max_model_len is None:
                raise ConfigError("max_model_len", "is what a reservation holds: kv_layout contiguous needs it here")
            config = config.for_model(config.max_model_len)
        return Measured.open(calibration).at(config.kv_cache_dtype, config.block_size), config
    dense = {name: shape.model for name, shape in MODELS.items() if shape.experts == 1}
    for option, name, known in (("model", model, dense), ("gpu", gpu, GPUS)):
        if name not in known:
            raise ConfigError(option, f"{name!r} is not known: there are {', '.join(known)}")
    dtype = ALIASES.get(config.kv_cache_dtype, config.kv_cache_dtype)
    config = config.for_model(dense[str(model)].context_length)
    return Sheet(dense[str(model)], GPUS[gpu], count, dtype, config.block_size), config


def _arrivals(
    trace: str, kind: TraceKind | None, requests: int | None, rate: float | None, chars_per_token: float, seed: int
) -> Iterator[Arrival]:
    from octavo.bench.workloads import WORKLOADS
    from octavo.simulator.traces import arrivals_of, paced, read

    if trace in WORKLOADS and not Path(trace).exists():
        _, work = WORKLOADS[trace].draw(requests, 49_152, seed)
        arrivals = arrivals_of(work)
    else:
        arrivals = read(Path(trace), kind and kind.value, chars_per_token=chars_per_token)
    return arrivals if rate is None else paced(arrivals, rate, seed)


ADVISED = (
    *("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"),
    *("swap_space", "kv_cache_dtype", "preemption_mode"),
)


class GoalName(StrEnum):
    """The names in octavo.planner.advisor, for --help."""

    throughput = "throughput"
    latency = "latency"
    tail = "tail"


@app.command(cls=Command)
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
    from octavo.bench import trials
    from octavo.engine.sizing import available_memory
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
            list(islice(_arrivals(trace, kind, requests, rate, chars_per_token, engine.seed), requests)),
        )
    else:
        name, arrivals = lengths, trials.of_lengths(lengths, shared_tokens, requests, rate, engine.seed)
    if gpu is not None and gpu not in GPUS:
        raise ConfigError("gpu", f"{gpu!r} is not known: there are {', '.join(GPUS)}")
    where: Device | int = available_memory()
    if gpu is not None:
        where = Device(gpu, memory or GPUS[gpu].memory_bytes, tensor_parallel_size, 1.0 if memory else MEMORY_SHARE)
    elif memory is not None:
        where = Device("given", memory, tensor_parallel_size)
    if calibration is not None:
        cost_of = trials.timed(shape, Measured.open(calibration))
    else:
        cores = processor(len(os.sched_getaffinity(0)), memory or available_memory())
        cost_of = trials.sheet(shape, cores if gpu is None else GPUS[gpu], tensor_parallel_size)
    columns = [TextColumn("Trials"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=aside, transient=True, disable=not aside.is_terminal) as bar:
        task = bar.add_task("")
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

    files = [path / "model_index.json", path / "config.json"] if path.is_dir() else [path]
    for file in files:
        if file.suffix == ".json" and file.is_file():
            try:
                raw = json.loads(_text(file))
            except ValueError as error:
                raise ModelError(file, f"cannot be read as JSON: {error}") from error
            return nothing_to_page(raw) if isinstance(raw, dict) else None
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


bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure this engine, or any server.")
app.add_typer(bench, name="bench")


class WorkloadName(StrEnum):
    """The names in octavo.bench.workloads, for --help."""

    mixed = "mixed"
    uniform = "uniform"
    prefix = "prefix"
    single = "single"
    long = "long"


@bench.command()
@takes(max_num_seqs=32, seed=1, without=(UNGATED,))
def throughput(
    model: Model,
    workload: Annotated[WorkloadName, typer.Option(help="What to serve.")] = WorkloadName.mixed,
    requests: Annotated[int | None, typer.Option(min=1, help="How many; the default is the workload's own.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file too.")] = None,
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
    path = _fetch(model)
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


@bench.command()
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
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file too.")] = None,
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
    path = _fetch(model)
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
        _show_grid(charts.compared(result), *gains(result))
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    if figures["results"]:
        write(charts.of_layouts(figures), html, png)
    raise typer.Exit(0 if whole else 130)


@bench.command("prefix-cache")
@takes(seed=1, max_num_seqs=32, kv_cache_memory_bytes=1 << 30, without=("kv_layout", UNGATED, *CACHED_ONLY))
def prefix_cache(
    model: Model,
    workload: Annotated[
        list[WorkloadName] | None, typer.Option(help="What to serve; may be given again.", show_default="all three")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many in a round.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds, in which both engines take turns.")] = 9,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file too.")] = None,
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

    path, works = _fetch(model), [WORKLOADS[name] for name in (workload or COMPARED)]
    with aside.status("Loading") as status:
        found = measure(path, engine, works, requests, repeats, status.update)
    if json_file is not None:
        figures = {"machine": machine(), "model": model, "engine": asdict(engine), "results": found}
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    for result in found:
        for line in report(result):
            screen.print(line)


class Endpoints(StrEnum):
    """What a server is asked at, for --help."""

    completions = "/v1/completions"
    chat = "/v1/chat/completions"


class PromptKind(StrEnum):
    """How prompts are told, for --help."""

    tokens = "tokens"
    text = "text"


@bench.command("serve", cls=Command)
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
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to it.")] = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """Load any server with OpenAI's API, streaming, and print rates, latencies, failures, goodput and cost.

    With several servers each run is done by all of them in turn, who is first changing from round to round; no two runs
    have prompts in common. Tokens are those that the server counts (usage), else its events. Names are those of vLLM's
    bench serve. Ctrl-C ends early and keeps what was measured. docs/benchmarking.md tells more.
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
        list(_numbers("concurrency", concurrency)) or [None],
        rounds=rounds,
        seed=seed,
        timeout_s=timeout,
        num_warmups=num_warmups,
        ignore_eos=ignore_eos,
        goals=goals(goodput or []),
        price=None if price_per_hour is None else Price(price_per_hour, output_weight),
    )
    names: list[str | None] = [*(name or []), *[None] * len(url)]
    known = model or []
    models: list[str | None] = [*known, *[known[0] if len(known) == 1 else None] * len(url)]
    targets = [
        serving.Target.find(one, called, served, api_key, endpoint.value, as_text, vocab_size)
        for one, called, served in zip(url, names, models, strict=False)
    ]
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    on = machine()
    with Progress(*columns, console=aside, transient=True, disable=not aside.is_terminal, refresh_per_second=2) as bar:
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
            _show_grid(grid)
        write(charts.of_serving(document), html, png)
    for line in charts.failures(document):
        aside.print(line, style="red")
    for line in serving.warnings(servers):
        aside.print(line, style="yellow")
    if not whole:
        aside.print("interrupted: these are the figures so far", style="red")
        raise typer.Exit(130)


BENCH_SERVE = (
    *("endpoint", "prompts", "ignore_eos", "workload", "trace", "turns", "think_time", "scale", "num_requests"),
    *("request_rate", "concurrency", "rounds", "num_warmups", "seed", "timeout", "goodput", "price_per_hour"),
    "output_weight",
)
"""What of its options a benchmark's figures hang on."""


def _plain_option(value: Any) -> Any:
    return value.value if isinstance(value, StrEnum) else str(value) if isinstance(value, Path) else value


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


def _show_grid(grid: Grid, *below: str) -> None:
    """A table for the terminal, on its side if it is too wide, and lines below it."""
    screen.print(f"{grid.title}")
    columns = [grid.head, *grid.rows]
    widths = [max(len(row[at]) for row in columns) for at in range(len(grid.head))]
    if sum(widths) + 2 * len(widths) <= screen.width:
        columns = list(zip(*columns, strict=True))
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        cells = [
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        screen.print("  ".join(cells).rstrip())
    screen.print("\n".join([*below, ""]))


class DayName(StrEnum):
    """The names in octavo.bench.day, for --help."""

    none = "none"
    prefix = "prefix"
    tiers = "tiers"


@bench.command()
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
    plot: Annotated[Path, typer.Option(metavar="FILE", help="Draw the day into this PNG.")] = Path("day.png"),
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the figures to this file after each configuration."),
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
        figures = json.loads(_text(json_file))
        if figures["asked"] != asked:
            raise InvalidRequest("resume", f"{json_file} is of another day: give the same options")
    path, found, whole = _fetch(model), figures["configurations"], True
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=aside, transient=True, disable=not aside.is_terminal) as bar:
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


@bench.command()
@takes(seed=1, without=("kv_cache_dtype", UNGATED))
def quality(
    model: Model,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Score this text; may be given again. The default is what the model says by itself."),
    ] = None,
    dtypes: Annotated[str, typer.Option(help="Formats to compare with bf16.")] = "fp32,int8,fp8_e4m3,fp8_e5m2,int4",
    lengths: Annotated[str, typer.Option(help="Contexts in which facts are looked for.")] = "512,1024,2048,4096,8192",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file too.")] = None,
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

    texts = [_text(path) for path in text or []]
    names, sizes = dtypes.split(","), _numbers("lengths", lengths)
    path = _fetch(model)
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=aside, transient=True, disable=not aside.is_terminal) as bar:
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


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",") if number]
    except ValueError:
        raise InvalidRequest(name, f"must be whole numbers with commas between them, got {text!r}") from None


@bench.command()
@takes(max_num_seqs=32, without=(UNGATED,))
def calibrate(
    model: Model,
    json_file: Annotated[Path, typer.Option("--json", help="Write what was found to this file.")] = Path(
        "calibration.json"
    ),
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
    path = _fetch(model)
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


# ── what they are made of ─────────────────────────────────────────────────────────────────────────────────────────


def _fetch(model: str) -> Path:
    """Where the model lies, fetched first if need be."""
    from octavo.models.catalog import resolve

    columns = [TextColumn("Fetching {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    with Progress(*columns, console=aside, transient=True, disable=not aside.is_terminal) as bar:
        task = bar.add_task(model, visible=False)
        return resolve(model, progress=lambda done, total: bar.update(task, completed=done, total=total, visible=True))


def _remote(url: str, model: str | None, config: EngineConfig) -> RemoteChat:
    from octavo.client import RemoteChat

    for knob in fields(EngineConfig):
        if knob.name != "seed" and getattr(config, knob.name) != knob.default:
            raise ConfigError(knob.name, "is an option of the engine, and with --url that is the server's")
    return RemoteChat(url, model, os.environ.get("OPENAI_API_KEY"))


def _load(model: str | None, config: EngineConfig) -> LLM:
    if model is None:
        raise InvalidRequest("model", "name one, or a server with --url")
    path = _fetch(model)
    with aside.status(f"Loading {model}") if aside.is_terminal else nullcontext():
        from octavo.engine.llm import LLM  # takes a moment: numpy, tokenizers, the native kernels

        llm = LLM(path, **asdict(config))
    if aside.is_terminal and (cost := kv_costs.told(config, llm.model)):
        aside.print(cost, style="dim")
    return llm


def _prompts(prompts: list[str], file: Path | None) -> list[str]:
    """Those given, then those of the file's lines; with neither, all of standard input."""
    if file is not None:
        prompts = prompts + [line for line in _text(file).splitlines() if line.strip()]
        if not prompts:
            raise InvalidRequest("file", f"{file} has no line with a prompt")
    elif not prompts:
        if sys.stdin.isatty():
            raise InvalidRequest("prompt", "give one as an argument, with --file, or on standard input")
        prompts = [_text(Path("-")).rstrip("\n")]
    return prompts


def _text(file: Path) -> str:
    try:
        return (sys.stdin.buffer.read() if file == Path("-") else file.read_bytes()).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest("file", f"{file} cannot be read: {error}") from error


def _lines() -> Iterator[str]:
    """What is typed or piped in, line by line, without blank ones."""
    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() a history)
    while True:
        try:
            line = input("› " if sys.stdin.isatty() else "").strip()
        except KeyboardInterrupt:
            screen.print()
        except EOFError:
            return
        else:
            if line:
                yield line


def _show(llm: LLM | RemoteChat, events: Iterator[StreamEvent | Delta]) -> tuple[str, bool]:
    """Print an answer as it comes. Returns its text, and whether it is whole: Ctrl-C ends it early."""
    before, start, first_s = llm.stats(), time.monotonic(), 0.0
    text, whole = "", True
    with closing(events):  # type: ignore[type-var]  # a generator
        try:
            for event in events:
                first_s = first_s or time.monotonic() - start
                text += event.text
                sys.stdout.write(event.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            whole = False
    sys.stdout.write("\n" if whole else " …\n")
    sys.stdout.flush()
    if aside.is_terminal:
        after = llm.stats()
        counts = ("generation_tokens", "hit_tokens", "queried_tokens")
        num_tokens, hits, queried = (after[key] - before[key] for key in counts)
        rate = max(num_tokens - 1, 0) / max(time.monotonic() - start - first_s, 1e-9)
        aside.print(
            f"{num_tokens} tokens, {rate:.0f}/s, the first after {first_s:.2f} s; "
            f"{hits} of the prompt's {queried} tokens were in the cache",
            style="dim",
        )
    return text, whole


def _plain(value: Any) -> Any:
    """What JSON can say of dicts, lists and named tuples."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value._asdict() if isinstance(value, tuple) and hasattr(value, "_asdict") else value


PLAIN_OPTIONS = {
    "file",
    "goal",
    "memory",
    "calibration",
    "config",
    "gpu",
    "lengths",
    "shared_tokens",
    "tensor_parallel_size",
    "weight_dtype",
}


def _as_option(error: OctavoError) -> str:
    """The error's text, with an option's name as it is typed."""
    name = getattr(error, "option", getattr(error, "field", ""))
    known = {field.name for config in CONFIGS for field in fields(config)} | PLAIN_OPTIONS
    return f"--{name.replace('_', '-')}{str(error).removeprefix(name)}" if name in known else str(error)


def main() -> None:
    """Run the command line. A wrong option or request leaves with status 2, any other failure with 1."""
    try:
        app()
    except OctavoError as error:
        aside.print(f"octavo: {_as_option(error)}", style="red")
        sys.exit(2 if isinstance(error, (ConfigError, InvalidRequest)) else 1)
