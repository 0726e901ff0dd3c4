"""Options: every field of the configurations as one, and the types and texts that several commands share.

Every engine and sampling option is a field of EngineConfig or SamplingParams, with its default and its check; here is
only what a terminal needs besides.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from octavo.config import EngineConfig
from octavo.errors import InvalidRequest, OctavoError
from octavo.server.settings import ServerConfig
from octavo.types import SamplingParams

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


MODEL_HELP = "A catalogue name, a hub name, or the path of a .gguf file or a folder."
SHAPE_HELP = "A config.json, a folder with one, a .gguf file, a catalogue name, or a well-known model"
HTML_HELP = "Write tables and plots to this file, one page that asks no server for anything."
PNG_HELP = "Write the plots to this file; that needs matplotlib (pip install matplotlib)."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]


def writable(path: Path | None) -> Path | None:
    """A file that what is found can be written to, said before anything is measured."""
    if path is None:
        return None
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a directory")
    if not path.exists() and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written")
    return path


Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help=HTML_HELP, callback=writable)]
Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the figures to this file too.", callback=writable),
]
Png = Annotated[Path | None, typer.Option("--png", metavar="FILE", help=PNG_HELP, callback=writable)]


class WorkloadName(StrEnum):
    """The names in octavo.bench.workloads, for --help."""

    mixed = "mixed"
    uniform = "uniform"
    prefix = "prefix"
    single = "single"
    long = "long"


class TraceKind(StrEnum):
    """The names in octavo.simulator.traces, for --help."""

    azure = "azure"
    mooncake = "mooncake"
    sharegpt = "sharegpt"


PLAIN_OPTIONS = {
    "file",
    "goal",
    "memory",
    "calibration",
    "config",
    "gpu",
    "lengths",
    "measure",
    "output_tokens",
    "prompt_tokens",
    "shared_tokens",
    "tensor_parallel_size",
    "weight_dtype",
}


def as_option(error: OctavoError) -> str:
    """The error's text, with options' names as they are typed: the one it is of, and those that a remedy names."""
    name = getattr(error, "option", getattr(error, "field", ""))
    known = {field.name for config in CONFIGS for field in fields(config)} | PLAIN_OPTIONS
    text = str(error).removeprefix(name) if name in known else str(error)
    named = re.sub(
        r"(?<![\w/.'\"-])[a-z]+(?:_[a-z]+)+(?![\w/'\"]|\.\w)",
        lambda found: _typed(found[0]) if found[0] in known else found[0],
        text,
    )
    return f"{_typed(name)}{named}" if name in known else named


def _typed(name: str) -> str:
    return f"--{name.replace('_', '-')}"
