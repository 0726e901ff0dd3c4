"""Figures as one self-contained page, and as a picture: tables and plots of whatever a benchmark found.

Owns drawing and nothing of what is drawn. A page is HTML with its plots as SVG inside, made here, so that it needs no
package and asks no server for anything; a picture is made by matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from octavo import __version__
from octavo.errors import ConfigError

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
"""Okabe and Ito's, which people with any kind of colour vision tell apart."""
WIDTH, HEIGHT = 620, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 10, 42


class Series(NamedTuple):
    """Points in order; `notes` say what is special about each."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    notes: Sequence[str] = ()


class Plot(NamedTuple):
    """Axes from zero. Areas lie one on the other; bars stand in groups, whose names are `groups`."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    kind: Literal["lines", "areas", "bars"] = "lines"
    groups: Sequence[str] = ()

    @property
    def tops(self) -> list[Sequence[float]]:
        """Where each series is drawn: areas on what lies below them."""
        if self.kind != "areas":
            return [one.y for one in self.series]
        heights: Sequence[float] = [0.0] * len(self.series[0].y)
        tops: list[Sequence[float]] = []
        for one in self.series:
            heights = [below + own for below, own in zip(heights, one.y, strict=True)]
            tops.append(heights)
        return tops


class Grid(NamedTuple):
    """A table: its heading, its columns and its cells."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Report(NamedTuple):
    """`about` are facts by name; they and the parts come in order."""

    title: str
    about: Sequence[tuple[str, str]]
    parts: Sequence[Plot | Grid]


def write(report: Report, html: Path | None, png: Path | None) -> None:
    """To those files that are wanted."""
    if html is not None:
        html.write_text(page(report), encoding="utf-8")
    if png is not None:
        draw([part for part in report.parts if isinstance(part, Plot)], png)


def check_png(png: Path | None) -> None:
    """Raises ConfigError where a picture is wanted that cannot be made."""
    if png is not None and find_spec("matplotlib") is None:
        raise ConfigError("png", "needs matplotlib: pip install matplotlib; --html needs nothing")


# ── a page ───────────────────────────────────────────────────────────────────────────────────────────────────────

STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 1320px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1rem; margin: 0 0 .4rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; opacity: .8 } dd { margin: 0 }
.wide { overflow-x: auto; margin: 1.5rem 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 2rem }
figure { margin: 0 } svg { width: 100%; height: auto; overflow: visible }
svg text { font: 12px system-ui, sans-serif; fill: currentColor } .grid { stroke: #8883 }
ul { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .3rem 0; padding: 0; font-size: .85rem }
i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; border-radius: 2px }
"""


def page(report: Report) -> str:
    """The whole report as HTML that asks nobody for anything."""
    plots = "".join(figure(part) for part in report.parts if isinstance(part, Plot))
    tables = "".join(table(part) for part in report.parts if isinstance(part, Grid))
    about = "".join(f"<dt>{escape(name)}<dd>{escape(text)}" for name, text in report.about)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(report.title)}</title><style>{STYLE}</style>"
        f'<h1>{escape(report.title)}</h1><dl>{about}</dl>{tables}<div class="plots">{plots}</div>'
        f"<p><small>octavo {__version__}</small></html>\n"
    )


def table(grid: Grid) -> str:
    head = "".join(f'<th scope="col">{escape(name)}' for name in grid.head)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in grid.rows)
    return f'<div class="wide"><h2>{escape(grid.title)}</h2><table><tr>{head}{rows}</table></div>'


def figure(plot: Plot) -> str:
    """A plot with its heading and what its colours mean."""
    legend = "".join(f'<li><i style="background:{_colour(at)}"></i>{escape(one.name)}' for at, one in _each(plot))
    return f"<figure><h2>{escape(plot.title)}</h2>{svg(plot)}<ul>{legend}</ul></figure>"


def svg(plot: Plot) -> str:
    """The plot alone. Points say what they are when one points at them."""
    tops = plot.tops
    y_ticks = ticks(max((value for top in tops for value in top), default=0.0))
    bars = plot.kind == "bars"
    x_ticks = [] if bars else ticks(max((value for one in plot.series for value in one.x), default=0.0))
    x_most = len(plot.groups) if bars else x_ticks[-1]
    inner, bottom = WIDTH - LEFT - RIGHT, HEIGHT - BOTTOM

    def across(value: float) -> float:
        return round(LEFT + inner * value / x_most, 1)

    def up(value: float) -> float:
        return round(bottom - (bottom - TOP) * value / y_ticks[-1], 1)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(plot.title)}">']
    for tick in y_ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {up(tick)}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up(tick) + 4}" text-anchor="end">{shown(tick)}</text>')
    names = [(at + 0.5, name) for at, name in enumerate(plot.groups)] if bars else [(t, shown(t)) for t in x_ticks]
    for at, name in names:
        parts.append(f'<text x="{across(at)}" y="{bottom + 16}" text-anchor="middle">{escape(name)}</text>')
    middle = (TOP + bottom) / 2
    parts.append(f'<text x="{LEFT + inner / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(plot.x)}</text>')
    parts.append(f'<text transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">{escape(plot.y)}</text>')
    below: Sequence[float] = [0.0] * len(tops[0]) if tops else []
    for (at, one), top in zip(_each(plot), tops, strict=True):
        colour = _colour(at)
        if bars:
            wide = 0.8 / len(plot.series)
            for group, value in enumerate(top):
                left = across(group + 0.1 + at * wide)
                size = f'width="{round(inner * wide / x_most, 1)}" height="{round(bottom - up(value), 1)}"'
                parts.append(
                    f'<rect x="{left}" y="{up(value)}" {size} fill="{colour}">{_hint(plot, one, group)}</rect>'
                )
            continue
        points = [f"{across(x)} {up(y)}" for x, y in zip(one.x, top, strict=True)]
        if not points:
            continue
        if plot.kind == "areas":
            back = [f"{across(x)} {up(y)}" for x, y in zip(reversed(one.x), reversed(below), strict=True)]
            parts.append(f'<path d="M{"L".join(points + back)}Z" fill="{colour}" fill-opacity=".75"/>')
            below = top
            continue
        parts.append(f'<path d="M{"L".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(points) <= 64:
            for number, point in enumerate(points):
                x, y = point.split()
                parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}">{_hint(plot, one, number)}</circle>')
    return "".join(parts) + "</svg>"


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to the first that is not below `most`, at most seven."""
    if not most > 0 or not math.isfinite(most):
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most / 6))
    step = next(power * digit for digit in (1, 2, 2.5, 5, 10) if power * digit * 6 >= most * (1 - 1e-9))
    return [step * number for number in range(math.ceil(most / step - 1e-9) + 1)]


def shown(value: float) -> str:
    """A number as short as it can be read."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _hint(plot: Plot, series: Series, at: int) -> str:
    where = plot.groups[at] if plot.kind == "bars" else f"{plot.x}: {shown(series.x[at])}"
    note = f", {series.notes[at]}" if series.notes else ""
    return f"<title>{escape(f'{series.name}{note}; {where}; {plot.y}: {shown(series.y[at])}')}</title>"


def _each(plot: Plot) -> Iterator[tuple[int, Series]]:
    return iter(enumerate(plot.series))


def _colour(at: int) -> str:
    return COLOURS[at % len(COLOURS)]


# ── a picture ────────────────────────────────────────────────────────────────────────────────────────────────────


def draw(plots: Iterable[Plot], path: Path) -> None:
    """All plots in one PNG, two beside each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plots = list(plots)
    rows = max(-(-len(plots) // 2), 1)
    canvas, panels = pyplot.subplots(rows, 2, figsize=(13, 4.2 * rows), squeeze=False)
    for panel in panels.flat[len(plots) :]:
        panel.set_axis_off()
    for panel, plot in zip(panels.flat, plots, strict=False):
        for at, one in _each(plot):
            look = {"color": _colour(at), "label": one.name}
            if plot.kind == "bars":
                wide = 0.8 / len(plot.series)
                panel.bar([group + 0.1 + (at + 0.5) * wide for group in range(len(one.y))], one.y, wide, **look)
            elif plot.kind == "lines":
                panel.plot(one.x, one.y, "o-" if len(one.x) <= 64 else "-", **look)
        if plot.kind == "areas":
            labels, colours = [one.name for one in plot.series], [_colour(at) for at, _ in _each(plot)]
            panel.stackplot(plot.series[0].x, *(one.y for one in plot.series), labels=labels, colors=colours)
        if plot.kind == "bars":
            panel.set_xticks([group + 0.5 for group in range(len(plot.groups))], plot.groups)
        panel.set(title=plot.title, xlabel=plot.x, ylabel=plot.y, ylim=(0, None))
        if plot.kind != "bars":
            panel.set(xlim=(0, None))
        panel.legend()
        panel.grid(alpha=0.3)
    canvas.tight_layout()
    canvas.savefig(path, dpi=100, format="png")
    pyplot.close(canvas)
