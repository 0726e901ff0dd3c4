"""Top: the screen and its keys. What is shown comes from `memory`, what is done goes to `feed`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Sparkline, Static

from octavo.errors import OctavoError
from octavo.top.feed import Action, Feed, hopeless
from octavo.top.memory import Holder, Memory, SortKey, duration, inert, size
from octavo.top.report import HOLDERS, REQUESTS, TEXTS, facts, holder, request

COLOURS = {
    "active": "#4c9be8",
    "shared": "#9d7fe8",
    "pinned": "#e8a33d",
    "idle": "#e2725b",
    "cached": "#5aa87a",
    "moving": "#d8d15a",
    "free": "#4a4f57",
}
"""Of the states of pages."""
PIN_S = 600.0
RETRY_S = (1.0, 2.0, 5.0, 10.0)
MAX_ROWS = 500
SAMPLES = 600


class News(Message):
    """Something that another thread wants done."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self.tell = tell


class Top(App[None]):
    """A server's memory, live."""

    TITLE = "octavo top"
    CSS = """
    #head, #facts, #advice { height: auto; padding: 0 1; }
    #advice { color: $text-warning; text-style: bold; padding: 0 1 1 1; }
    #pools { height: auto; padding: 0 1; }
    #lines { height: 3; padding: 0 1; }
    #lines Vertical { width: 1fr; height: 3; }
    #lines Static { height: 1; color: $text-muted; }
    Sparkline { height: 2; }
    DataTable { height: 1fr; }
    #requests { height: 1fr; max-height: 40%; border-top: solid $primary; }
    Input { dock: bottom; display: none; }
    Input.shown { display: block; }
    Said { align: center middle; }
    Said VerticalScroll {
      width: 80%; max-width: 110; height: auto; max-height: 80%; padding: 1 2;
      border: round $primary; background: $surface;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("b", "sort('bytes')", "By bytes"),
        Binding("i", "sort('idle')", "By idle time"),
        Binding("n", "sort('name')", "By name"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("p", "act('pin')", "Pin"),
        Binding("u", "act('unpin')", "Unpin"),
        Binding("d", "act('demote')", "Demote"),
        Binding("r", "act('release')", "Release"),
        Binding("e", "explain", "Explain"),
        Binding("escape", "clear", "Clear", show=False),
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, feed: Feed, *, interval: float = 1.0, sort: SortKey = "bytes", wanted: str = "") -> None:
        super().__init__()
        self.memory = Memory()
        self._feed = feed
        self._interval = interval
        self._sort: SortKey = sort
        self._wanted = wanted
        self._rows: list[Holder] = []
        self._lost: str | None = "connecting"
        self._closing = False

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="pools")
        yield Static(id="facts")
        with Horizontal(id="lines"):
            for name, title in (("held", "memory in use"), ("first", "time to first token")):
                with Vertical():
                    yield Static(title)
                    yield Sparkline([0.0], id=name)
        yield Static(id="advice")
        holders: DataTable[Text] = DataTable(id="holders", cursor_type="row", zebra_stripes=True)
        requests: DataTable[Text] = DataTable(id="requests", cursor_type="row", zebra_stripes=True)
        yield holders
        yield requests
        yield Input(placeholder="letters of a name, kind or tenant; Enter keeps, Esc clears", id="filter")
        yield Footer()

    def on_mount(self) -> None:
        self._table("#holders").add_columns(*HOLDERS)
        self._table("#requests").add_columns(*REQUESTS)
        self._table("#holders").focus()
        self._paint()
        self._watch()

    def on_unmount(self) -> None:
        self._closing = True
        self._feed.close()

    # ── what the server says ──

    @work(thread=True)
    def _watch(self) -> None:
        tries = 0
        while not self._closing:
            try:
                for event, data in self._feed.events(1 / self._interval):
                    tries = 0
                    self._tell(self._take, event, data)
            except OctavoError as error:
                if (remedy := hopeless(error)) is not None:
                    self._tell(partial(self.exit, return_code=1, message=f"octavo: {remedy}"))
                    return
                wait = RETRY_S[min(tries, len(RETRY_S) - 1)]
                tries += 1
                self._tell(self._lose, f"{error}; trying again in {wait:.0f} s")
                until = time.monotonic() + wait
                while not self._closing and time.monotonic() < until:
                    time.sleep(0.05)

    def _tell(self, what: Callable[..., None], *arguments: Any) -> None:
        """Have something done in the screen's thread, whose end nobody waits for."""
        self.post_message(News(partial(what, *arguments)))

    def on_news(self, news: News) -> None:
        news.tell()

    def _take(self, event: str, data: Any) -> None:
        try:
            self.memory.take(event, data)
        except OctavoError as error:
            self.exit(return_code=1, message=f"octavo: {error}")
            return
        self._lost = None
        self._sample()
        self._paint()

    def _lose(self, why: str) -> None:
        self._lost = why
        self._paint()

    def _sample(self) -> None:
        """Add a moment to the history that came with the snapshot, once a second."""
        history, stats = self.memory.history, self.memory.stats
        if history and self.memory.time - float(history[-1]["time"]) < 1:
            return
        device = stats["tiers"].get("device", {}).get("states", {})
        first = stats.get("ttft_s") or {}
        history.append({"time": self.memory.time, "device": device, "ttft_s": first.get("p50")})
        del history[:-SAMPLES]

    # ── what is shown ──

    def _table(self, name: str) -> DataTable[Text]:
        table: DataTable[Text] = self.query_one(name, DataTable)
        return table

    def _paint(self) -> None:
        memory = self.memory
        self.query_one("#head", Static).update(self._head())
        if not memory.about:
            return
        self.query_one("#pools", Static).update(self._pools())
        self.query_one("#facts", Static).update(Text(facts(memory)))
        self.query_one("#advice", Static).update(Text(memory.advice()))
        held = [sum(at["device"].values()) - at["device"].get("free", 0) for at in memory.history]
        self.query_one("#held", Sparkline).data = [*held[-SAMPLES:], 0] if len(held) < 2 else held[-SAMPLES:]
        first = [at.get("ttft_s") or 0.0 for at in memory.history]
        self.query_one("#first", Sparkline).data = first[-SAMPLES:] or [0.0]
        chosen = self._chosen()
        self._rows = memory.holders(self._sort, self._wanted)[:MAX_ROWS]
        styles = {"pin": COLOURS["pinned"], "idle": COLOURS["idle"], "progress": COLOURS["active"]}
        _fill(self._table("#holders"), [_cells(HOLDERS, holder(memory, at), styles) for at in self._rows])
        if chosen is not None:  # the line that keys act on stays the same holder's wherever that goes
            same = (at for at, row in enumerate(self._rows) if row.identity == chosen.identity)
            self._table("#holders").move_cursor(row=next(same, 0), animate=False)
        requests = memory.requests[:MAX_ROWS]
        _fill(self._table("#requests"), [_cells(REQUESTS, request(at), styles) for at in requests])

    def _head(self) -> Text:
        text = Text(f"octavo top  {self._feed.url}", style="bold")
        if self.memory.about:
            text.append(f"  {inert(str(self.memory.about['model']))}", style="")
            text.append(f"  {self.memory.about['page_tokens']} tokens a page", style="dim")
        text.append(f"  by {self._sort}", style="dim")
        if self._wanted:
            text.append(f"  only “{inert(self._wanted)}”", style="yellow")
        if self._lost:
            text.append(f"\n{self._lost}", style="bold red")
        return text

    def _pools(self) -> Text:
        """A bar a tier, with its legend."""
        text = Text()
        width = max(self.size.width - 30, 10)
        for tier, number in self.memory.num_pages.items():
            states = self.memory.stats["tiers"][tier]["states"]
            text.append(f"{tier:>6} {size(number * self.memory.page_bytes):>8} ")
            filled = 0.0
            drawn = 0
            for state, colour in COLOURS.items():
                filled += states.get(state, 0) / max(number, 1) * width
                text.append("█" * (round(filled) - drawn), style=colour)
                drawn = max(drawn, round(filled))
            text.append(f" {number:,} pages\n")
            text.append(" " * 16)
            for state, colour in COLOURS.items():
                if count := states.get(state, 0):
                    text.append("■ ", style=colour)
                    text.append(f"{state} {count:,}  ", style="dim")
            text.append("\n")
        text.rstrip()
        return text

    # ── keys ──

    def action_sort(self, key: SortKey) -> None:
        self._sort = key
        self._paint()

    def action_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.add_class("shown")
        box.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._wanted = event.value
        self._paint()

    def on_input_submitted(self) -> None:
        self.query_one("#filter", Input).remove_class("shown")
        self._table("#holders").focus()

    def action_clear(self) -> None:
        self.query_one("#filter", Input).value = ""
        self.on_input_submitted()

    def action_act(self, action: Action) -> None:
        session = self._chosen()
        if session is None or session.kind != "session":
            self.notify("Choose a session first: this line is none.", severity="warning")
        elif action == "release":
            question = f"Forget session {session.shown} and drop the {session.pages.total():,} pages that it holds?"
            self.push_screen(Asked(question), partial(self._released, session))
        else:
            self._act(action, session)

    def _released(self, session: Holder, sure: bool | None) -> None:
        if sure:
            self._act("release", session)

    def _chosen(self) -> Holder | None:
        table = self._table("#holders")
        return self._rows[table.cursor_row] if 0 <= table.cursor_row < len(self._rows) else None

    @work(thread=True)
    def _act(self, action: Action, session: Holder) -> None:
        done = {
            "pin": f"pinned for {duration(PIN_S)}",
            "unpin": "unpinned",
            "demote": "put away to the tier below",
            "release": "forgotten",
        }
        try:
            self._feed.act(action, session, PIN_S, admin=bool(self.memory.about["admin"]))
        except OctavoError as error:
            self._tell(partial(self.notify, str(error), severity="error", markup=False))
        else:
            self._tell(partial(self.notify, f"{session.shown}: {done[action]}", markup=False))

    def action_explain(self) -> None:
        table = self._table("#requests")
        if 0 <= table.cursor_row < len(self.memory.requests):
            self._explain(str(self.memory.requests[table.cursor_row]["id"]))
        else:
            self.notify("No request is running or waiting.", severity="warning")

    @work(thread=True)
    def _explain(self, request_id: str) -> None:
        try:
            told = str(self._feed.explain(request_id)["text"])
        except (OctavoError, LookupError, TypeError) as error:
            told = str(error)
        self._tell(self._say, told)

    def _say(self, text: str) -> None:
        self.push_screen(Said(Text(text)))


class Said(ModalScreen[None]):
    """Something to be read; any of these keys closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter,e", "dismiss", "Close")]

    def __init__(self, text: Text) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(self._text)


class Asked(ModalScreen[bool]):
    """A question that y answers."""

    CSS = """
    Asked { align: center middle; }
    Asked Static { width: auto; max-width: 80%; padding: 1 2; border: round $error; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape,q", "dismiss(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(Text(f"{self._question}\n\ny  yes      n  no"))


def _fill(table: DataTable[Text], rows: list[list[Text]]) -> None:
    """Show these rows, and leave the cursor and the scrolled part where they are."""
    if table.row_count != len(rows):
        at, top = table.cursor_row, table.scroll_y
        table.clear()
        table.add_rows(rows)
        table.move_cursor(row=min(at, len(rows) - 1), animate=False)
        table.scroll_to(y=top, animate=False)
        return
    for number, row in enumerate(rows):
        if table.get_row_at(number) != row:
            for column, cell in enumerate(row):
                table.update_cell_at((number, column), cell, update_width=True)  # type: ignore[arg-type]


def _cells(columns: Sequence[str], row: Sequence[str], styles: Mapping[str, str]) -> list[Text]:
    """A row of a table; the styles are columns'."""
    both = zip(columns, row, strict=True)
    return [Text(cell, styles.get(name, ""), justify="left" if name in TEXTS else "right") for name, cell in both]
