"""What commands read and print: models fetched with a progress bar, files, numbers, tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

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
from rich.table import Table

from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo.bench.report import Grid

screen = Console(highlight=False, markup=False, soft_wrap=True)
aside = Console(highlight=False, markup=False, soft_wrap=True, stderr=True)
PIPE_WIDTH = 200
"""Of a wide table that goes into a file or a pipe."""


def fetch(model: str) -> Path:
    """Where the model lies, fetched first if need be."""
    from octavo.models.catalog import resolve

    columns = [TextColumn("Fetching {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    with Progress(*columns, console=aside, transient=True, disable=not aside.is_terminal) as bar:
        task = bar.add_task(model, visible=False)
        return resolve(model, progress=lambda done, total: bar.update(task, completed=done, total=total, visible=True))


def text_of(file: Path) -> str:
    try:
        return (sys.stdin.buffer.read() if file == Path("-") else file.read_bytes()).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest("file", f"{file} cannot be read: {error}") from error


def numbers(name: str, text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",") if number]
    except ValueError:
        raise InvalidRequest(name, f"must be whole numbers with commas between them, got {text!r}") from None


def show(line: str | Table) -> None:
    """A line, or a table at its own width: no figure is cut where the terminal, or a pipe, is narrower."""
    if isinstance(line, Table):
        line.width = screen.measure(line, options=screen.options.update(max_width=1 << 16)).maximum
    screen.print(line)


def show_grid(grid: Grid, *below: str) -> None:
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


def counting() -> Progress:
    """A bar for so many of so many, gone when it is full; none where standard error is no terminal."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    return Progress(*columns, console=aside, transient=True, disable=not aside.is_terminal, refresh_per_second=2)
