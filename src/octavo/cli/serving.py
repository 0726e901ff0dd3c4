"""serve, top and pull: what an operator runs."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from octavo.cli.options import LISTS, MODEL_HELP, takes
from octavo.cli.terminal import PIPE_WIDTH, fetch, screen
from octavo.config import EngineConfig
from octavo.errors import ConfigError, OctavoError
from octavo.server.settings import ServerConfig


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
    path = fetch(model)

    from octavo.server.listen import run  # takes a moment

    raise typer.Exit(run(path, model, server, engine))


def pull(model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = None) -> None:
    """Fetch a model and print its path, or list the catalogue."""
    from octavo.models.catalog import MODELS

    if model is not None:
        screen.print(str(fetch(model)))
    else:
        for name, entry in MODELS.items():
            screen.print(f"{name}  {entry.description}")


class TopSort(StrEnum):
    """The orders of octavo.top.memory, for --help."""

    bytes = "bytes"
    idle = "idle"
    name = "name"


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
