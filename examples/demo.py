"""Several conversations at once over one pool of pages: watch the answers come, then see where every page went.

python examples/demo.py [MODEL]
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from octavo import LLM, SamplingParams

SYSTEM = (
    "You are a patient teacher of small children. Answer in two or three plain sentences, with words that they know. "
    "Do not write lists. If you do not know something, say so."
)
QUESTIONS = {
    "Why is the sky blue?": 1,
    "What does a heart do?": 1,
    "How do plants eat?": 1,
    "Tell me a very short story about a lighthouse.": 2,  # two answers from one stored prompt
}


@dataclass
class Answer:
    """One choice as it grows."""

    question: str
    text: str = ""
    first_s: float | None = None
    num_tokens: int = 0
    finished: bool = False


@dataclass
class Account:
    """What a run took. Times in seconds."""

    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)
    total_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers.values())


def ask(llm: LLM, screen: Console) -> Account:
    """Put all questions at once and show the answers as they come, side by side."""
    conversations = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}] for question in QUESTIONS
    ]
    params = [SamplingParams(n=n, temperature=0.7, top_p=0.9, max_tokens=96, seed=8) for n in QUESTIONS.values()]
    account = Account(
        {(at, choice): Answer(question) for at, (question, n) in enumerate(QUESTIONS.items()) for choice in range(n)}
    )
    start = time.monotonic()
    with Live(console=screen, refresh_per_second=12, transient=True) as live:
        for event in llm.stream_chat(conversations, params):
            answer = account.answers[event.prompt_index, event.choice_index]
            answer.first_s = answer.first_s or time.monotonic() - start
            answer.text += event.text
            answer.num_tokens += len(event.token_ids)
            answer.finished = event.finish_reason is not None
            live.update(pictured(account))
    account.total_s = time.monotonic() - start
    screen.print(pictured(account))
    return account


def pictured(account: Account) -> Group:
    return Group(
        *(
            Panel(
                Text(answer.text),
                title=answer.question,
                title_align="left",
                border_style="green" if answer.finished else "dim",
            )
            for answer in account.answers.values()
        )
    )


def accounted(account: Account, stats: dict[str, int]) -> Table:
    """The run in numbers, most of them pages."""
    first = sorted(answer.first_s or 0.0 for answer in account.answers.values())
    num_tokens = account.num_tokens
    tokens_per_page, held = stats["page_bytes"] // stats["token_bytes"], stats["pages_referenced"]
    rows = [
        ("page", f"{tokens_per_page} tokens", f"{stats['page_bytes'] >> 10} KiB; the pool has {stats['num_pages']:,}"),
        ("used", stats["pages_allocated"], f"at most {stats['peak_pages']} at once"),
        ("shared", stats["pages_shared"], "times a page was taken over instead of computed again"),
        ("copied", stats["pages_copied"], "because one of those who shared it had to write"),
        ("freed", stats["pages_allocated"] - held, f"{held} still held, {stats['pages_cached']} kept findable"),
        ("speed", f"{num_tokens / account.total_s:.0f} tokens/s", f"{num_tokens} tokens in {account.total_s:.1f} s"),
        ("first token", f"{first[0]:.2f} s", f"{first[-1]:.2f} s for the last of {len(first)} answers"),
    ]
    table = Table.grid(padding=(0, 2))
    for name, number, meaning in rows:
        table.add_row(f"[bold]{name}", f"[cyan]{number}", meaning)
    return table


def main() -> None:
    screen = Console(highlight=False)
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m") as llm:
        account = ask(llm, screen)
        stats = llm.stats()
    screen.print(accounted(account, stats))  # leaving the block audited the pool: no page was lost


if __name__ == "__main__":
    main()
