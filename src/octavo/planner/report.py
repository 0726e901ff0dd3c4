"""Plans and advice as tables for a terminal, and as what JSON can say. It never computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from octavo.planner.advisor import Advice, command
from octavo.planner.known import Shape
from octavo.planner.memory import Plan, Room

SIZES = (
    *("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
    *("context_length", "sliding_window", "tie_embeddings"),
)


def document(name: str, shape: Shape, plans: Sequence[Plan]) -> dict[str, Any]:
    """All figures of some plans for one model."""
    rooms = [[{**asdict(room), "gain": room.gain} for room in plan.rooms] for plan in plans]
    return {
        "model": name,
        "source": shape.source,
        "shape": {name: getattr(shape.model, name) for name in SIZES} | {"experts": shape.experts},
        "num_parameters": shape.num_parameters,
        "plans": [asdict(plan) | {"rooms": found} for plan, found in zip(plans, rooms, strict=True)],
    }


def lines(name: str, shape: Shape, plans: Sequence[Plan]) -> Iterator[str | Table]:
    """What a person wants to see first, and the tables below it."""
    c = shape.model
    yield f"{name}: {shape.num_parameters / 1e9:.2f} billion parameters, {c.num_layers} layers, {c.num_heads} heads"
    yield f"of which {c.num_kv_heads} keep keys and values, {c.head_dim} wide ({shape.source})"
    if c.sliding_window:
        yield f"It sees {c.sliding_window:,} tokens back; those before them stay in memory all the same."
    yield ""
    yield _memory(plans)
    for plan in plans:
        yield ""
        yield f"Sequences at once, {_device(plan)}, max_model_len {plan.max_model_len:,}:"
        yield _rooms(plan.rooms)
        if not plan.num_pages:
            yield "Weights and activations leave no room."
        elif plan.weight_bytes + plan.pool_bytes > plan.memory_bytes:
            yield "Weights and pool are more than the memory."


def advice_document(model: str, advice: Advice) -> dict[str, Any]:
    """All of it; `command` are the words of a shell."""
    rest = {name: getattr(advice, name) for name in ("workload", "goal", "gain", "paging_gain", "pays", "num_trials")}
    return {
        "model": model,
        **rest,
        "paging": list(advice.paging),
        "recommendations": [one._asdict() for one in advice.recommendations],
        "predicted": advice.result._asdict(),
        "as_asked": advice.before._asdict(),
        "plan": asdict(advice.plan),
        "room": asdict(advice.room) if advice.room is not None else None,
        "command": command(model, advice.config),
    }


def advice_lines(model: str, advice: Advice) -> Iterator[str]:
    """What is recommended, with reasons, and the command that serves so."""
    plan, result = advice.plan, advice.result
    if advice.room is not None:
        lengths = f"{advice.room.prompt_tokens:,.0f} tokens in and {advice.room.output_tokens:,.0f} out on average"
        yield f"{advice.workload}: {lengths}; goal: {advice.goal}; {advice.num_trials} trials"
    yield f"{_device(plan)}: {plan.pool_bytes:,} bytes for pages, {plan.pool_tokens:,} tokens in {plan.kv_dtype}"
    yield ""
    for one in advice.recommendations:
        value, other = (str(value).lower() if isinstance(value, bool) else value for value in (one.value, one.other))
        option = f"--{one.option.replace('_', '-')} {value}"
        gain = "" if other == value else "impossible: " if one.gain is None else f"{one.gain:.2f} ×: "
        yield f"{option:<30} {'' if other == value else f'instead of {other}, {gain}'}{one.reason}"
    yield ""
    rates = f"{result.output_tokens_per_s:,.1f} tokens/s out, requests of {result.request_s:,.2f} s"
    yield f"Predicted: {rates} (99th percentile {result.request_p99_s:,.2f} s), {result.running:,.1f} at once;"
    yield f"{advice.gain:.2f} times as good as the options that were given."
    yield from advice.paging
    yield ""
    yield " ".join(command(model, advice.config))


def _memory(plans: Sequence[Plan]) -> Table:
    table = Table("bytes", box=None, pad_edge=False)
    for plan in plans:
        table.add_column(_device(plan), justify="right")
    first = plans[0]
    rows = {
        "memory": "memory_bytes",
        "weights": "weight_bytes",
        "activations, at most": "activation_bytes",
        f"a token in {first.kv_dtype}": "token_bytes",
        f"a page of {first.block_size} tokens": "page_bytes",
        "a sequence of max_model_len": "sequence_bytes",
        "the pool": "pool_bytes",
        "its pages": "num_pages",
        "its tokens": "pool_tokens",
        "host pages": "num_host_pages",
        "page tables, on the host": "page_table_bytes",
        "pool and index, on the host": "index_bytes",
    }
    for title, name in rows.items():
        if name != "num_host_pages" or first.num_host_pages:
            table.add_row(title, *(f"{getattr(plan, name):,}" for plan in plans))
    return table


def _rooms(rooms: Sequence[Room]) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False)
    for title in ("tokens", "pages", "bytes", "paged", "typically", "waste", "contiguous", "waste", "gain"):
        table.add_column(title, justify="right")
    for room in rooms:
        table.add_row(
            f"{room.tokens:,.0f}",
            f"{room.pages:,.0f}",
            f"{room.sequence_bytes:,.0f}",
            f"{room.paged_at_once:,}",
            f"{int(room.paged_typically):,}",
            f"{room.paged_waste:.0%}",
            f"{room.contiguous_at_once:,}",
            f"{room.contiguous_waste:.0%}",
            f"{room.gain:.1f} ×" if room.gain is not None else "–",
        )
    return table


def _device(plan: Plan) -> str:
    return plan.device if plan.num_devices == 1 else f"{plan.num_devices} × {plan.device}"
