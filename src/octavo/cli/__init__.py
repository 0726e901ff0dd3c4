"""The command line: options in, an engine, what it says out. It never schedules, samples or touches a page."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from octavo import __version__
from octavo.cli.benchmarks import calibrate, compare, day, prefix_cache, quality, throughput
from octavo.cli.loading import bench_serve
from octavo.cli.options import Command, as_option
from octavo.cli.planning import advise, plan, simulate
from octavo.cli.serving import pull, serve, top
from octavo.cli.talk import chat, generate
from octavo.cli.terminal import aside, screen
from octavo.errors import ConfigError, InvalidRequest, OctavoError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # whole option names at any width
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve language models from a paged KV cache.",
)


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


for command in (generate, chat, top, serve, pull, plan, simulate, advise):
    app.command(cls=Command)(command)
bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure this engine, or any server.")
app.add_typer(bench, name="bench")
for command in (throughput, compare):
    bench.command()(command)
bench.command("prefix-cache")(prefix_cache)
bench.command("serve", cls=Command)(bench_serve)
for command in (day, quality, calibrate):
    bench.command()(command)


def main() -> None:
    """Run the command line. A wrong option or request leaves with status 2, any other failure with 1."""
    try:
        app()
    except OctavoError as error:
        aside.print(f"octavo: {as_option(error)}", style="red")
        sys.exit(2 if isinstance(error, (ConfigError, InvalidRequest)) else 1)
    except KeyboardInterrupt:  # before a command has begun
        sys.exit(130)
