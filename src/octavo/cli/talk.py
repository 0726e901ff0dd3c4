"""generate and chat: texts in, answers as they come."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo import kv_costs
from octavo.cli.options import MODEL_HELP, Model, takes
from octavo.cli.terminal import aside, fetch, screen, text_of
from octavo.config import EngineConfig
from octavo.errors import ConfigError, InvalidRequest
from octavo.types import SamplingParams

if TYPE_CHECKING:
    from octavo.client import Delta, RemoteChat
    from octavo.engine.llm import LLM, StreamEvent

ONE_ANSWER = ("n", "logprobs", "prompt_logprobs", "use_beam_search", "beam_width", "length_penalty")
CHAT_HELP = "/reset begins anew, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


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


def _remote(url: str, model: str | None, config: EngineConfig) -> RemoteChat:
    from octavo.client import RemoteChat

    for knob in fields(EngineConfig):
        if knob.name != "seed" and getattr(config, knob.name) != knob.default:
            raise ConfigError(knob.name, "is an option of the engine, and with --url that is the server's")
    return RemoteChat(url, model, os.environ.get("OPENAI_API_KEY"))


def _load(model: str | None, config: EngineConfig) -> LLM:
    if model is None:
        raise InvalidRequest("model", "name one, or a server with --url")
    path = fetch(model)
    with aside.status(f"Loading {model}") if aside.is_terminal else nullcontext():
        from octavo.engine.llm import LLM  # takes a moment: numpy, tokenizers, the native kernels

        llm = LLM(path, **asdict(config))
    if aside.is_terminal and (cost := kv_costs.told(config, llm.model)):
        aside.print(cost, style="dim")
    return llm


def _prompts(prompts: list[str], file: Path | None) -> list[str]:
    """Those given, then those of the file's lines; with neither, all of standard input."""
    if file is not None:
        prompts = prompts + [line for line in text_of(file).splitlines() if line.strip()]
        if not prompts:
            raise InvalidRequest("file", f"{file} has no line with a prompt")
    elif not prompts:
        if sys.stdin.isatty():
            raise InvalidRequest("prompt", "give one as an argument, with --file, or on standard input")
        prompts = [text_of(Path("-")).rstrip("\n")]
    return prompts


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
