"""What a guided answer may say next. Owns compiled guides and a matcher for each guided sequence; decides no token.

llguidance does the matching. A matcher's state is a function of the guide and of the tokens generated so far, and of
nothing else: one that is not here, as after a fork, is made anew by feeding it those tokens. A sequence is known by its
live array of tokens, and its matcher goes when that array does.

Masks are computed by a thread while the forward pass runs; llguidance lets other threads run meanwhile. Schemas and
expressions come from strangers: their size is bounded, and llguidance bounds by counting what compiling them and each
step with them may cost. What is over the bound when it is compiled is refused; what gets there later ends its choice.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance
import llguidance.numpy as masks
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from octavo.errors import InvalidRequest
from octavo.models.tokenizer import Tokenizer
from octavo.types import Draw, Guide, Slice

_log = logging.getLogger(__name__)

MAX_REGEX_CHARS = 1 << 15
"""Of a regular expression; what a step costs grows with it."""
MAX_COMPILED = 64
"""Guides that stay compiled, and the least recently used goes."""
LIMITS = llguidance.LLParserLimits(
    max_grammar_size=20_000, step_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False
)
"""Where they differ from llguidance's own: compiling takes no more than a second, a step some hundredths of one."""
JSON_OPTIONS: llguidance._lib.JsonCompileOptions = {
    "whitespace_pattern": r" {1,2}|\r?\n( {0,40}|\t{0,10})",
    "coerce_one_of": True,
}
"""Blanks in JSON are for one line or for an indented one: small models go on and on otherwise. oneOf is anyOf."""

Mask = NDArray[np.bool_]


class Guides:
    """Compiles guides and follows guided sequences. `vocab_size` is the model's, which may pad the tokenizer's."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[Guide, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._states: dict[int, _State] = {}  # by the id of the sequence's array
        self._executor = llguidance.LLExecutor()
        self._compiler = ThreadPoolExecutor(1, "octavo-compile")
        self._worker = ThreadPoolExecutor(1, "octavo-masks")

    def check(self, guide: Guide) -> None:
        """Compile a guide. Raises InvalidRequest("guide") if that is not possible, or too much work."""
        self._matcher(guide)

    def check_soon(self, guide: Guide) -> Future[None]:
        """`check` in a thread for such work, which takes one guide after the other; done if it is compiled already."""
        with self._lock:
            if guide in self._compiled:
                done: Future[None] = Future()
                done.set_result(None)
                return done
        return self._compiler.submit(self.check, guide)

    @property
    def num_followed(self) -> int:
        """Sequences with a matcher."""
        return len(self._states)

    def begin(self, slices: Iterable[Slice]) -> Masks:
        """Begin to compute what the guided ones among the slices' draws may choose."""
        rows: dict[int, int] = {}
        work: list[tuple[_State, list[int]]] = []
        for piece in slices:
            for draw in piece.draws:
                if draw.params.guide is None or id(draw.token_ids) in rows:
                    continue
                rows[id(draw.token_ids)] = len(work)
                state = self._state(draw.params.guide, draw.token_ids)
                work.append((state, draw.token_ids[draw.num_prompt_tokens + state.num_taken :].tolist()))
                state.num_taken = len(draw.token_ids) - draw.num_prompt_tokens
        return Masks(rows, self._worker.submit(self._compute, work) if work else None, self.vocab_size)

    def _state(self, guide: Guide, tokens: array[int]) -> _State:
        key, states = id(tokens), self._states
        if key not in states:
            states[key] = _State(guide, weakref.ref(tokens, lambda _: states.pop(key, None)))
        return states[key]

    def _compute(self, work: Sequence[tuple[_State, list[int]]]) -> NDArray[np.int32]:
        """A row of bits for each state after it has taken its tokens; none is set where the guide fails."""
        bits = np.zeros(masks.get_bitmask_shape(len(work), self.vocab_size), np.int32)
        live: list[tuple[llguidance.LLMatcher, int]] = []
        for row, (state, tokens) in enumerate(work):
            try:
                if state.matcher is None:
                    state.matcher = self._matcher(state.guide).deep_copy()
                state.matcher.consume_tokens(tokens)
            except Exception:
                _log.exception("a guide cannot be followed")
                continue
            live.append((state.matcher, row))
        if live:
            masks.fill_next_token_bitmask_par(self._executor, live, bits)
        for matcher, row in live:
            if matcher.is_error():
                _log.warning("a guide cannot be followed any further: %s", _first_line(matcher.get_error()))
                bits[row] = 0
        return bits

    def _matcher(self, guide: Guide) -> llguidance.LLMatcher:
        """The guide's matcher, before any token. Raises InvalidRequest."""
        with self._lock:
            if guide in self._compiled:
                self._compiled.move_to_end(guide)
                return self._compiled[guide]
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer, self.vocab_size)
        matcher = llguidance.LLMatcher(self._vocabulary, _grammar(guide), log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some limits show only here, and every answer needs it
        if matcher.is_error():
            raise InvalidRequest("guide", f"this {guide.kind} cannot be followed: {_first_line(matcher.get_error())}")
        with self._lock:
            self._compiled[guide] = matcher
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher


class Masks:
    """What the draws of one step may choose."""

    def __init__(self, rows: dict[int, int], bits: Future[NDArray[np.int32]] | None, vocab_size: int) -> None:
        self._rows, self._bits, self._vocab_size = rows, bits, vocab_size

    def of(self, draw: Draw) -> Mask | None:
        """True for the tokens that the draw may choose, bool [vocab]; None without a guide. Waits for the thread.

        All False if the guide cannot be followed any further.
        """
        if self._bits is None or draw.params.guide is None:
            return None
        row = self._bits.result()[self._rows[id(draw.token_ids)]]
        return np.unpackbits(row.view(np.uint8), count=self._vocab_size, bitorder="little").view(np.bool_)


class _State:
    """A sequence's matcher, None until the thread makes it, and how many generated tokens it has been given."""

    __slots__ = ("guide", "matcher", "num_taken", "owner")

    def __init__(self, guide: Guide, owner: weakref.ref[array[int]]) -> None:
        self.guide = guide
        self.owner = owner  # held for its callback
        self.matcher: llguidance.LLMatcher | None = None
        self.num_taken = 0


# ── compiling ────────────────────────────────────────────────────────────────────────────────────────────────────


class _Vocabulary:
    """The tokenizer as llguidance's TokenizerWrapper wants it: control tokens are marked, so that no text is them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_token_ids[0], tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = [token for token in range(vocab_size) if tokenizer.is_special(token)]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)


def _vocabulary(tokenizer: Tokenizer, vocab_size: int) -> llguidance.LLTokenizer:
    if not tokenizer.eos_token_ids:
        raise InvalidRequest("guide", "the model's file names no token that ends a text, and a guide needs one")
    wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size))
    return llguidance.LLTokenizer(wrapper, eos_token=list(tokenizer.eos_token_ids))


def _grammar(guide: Guide) -> str:
    """The guide in llguidance's own terms. Raises InvalidRequest."""
    match guide.kind:
        case "json_schema" | "json_object":
            schema = guide.spec or '{"type": "object"}'
            try:
                return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
            except ValueError as error:
                raise InvalidRequest("guide", f"is not a JSON schema: {_first_line(str(error))}") from None
        case "regex":
            return _regex(guide.spec)
        case "choice":
            return _regex("|".join(re.escape(text) for text in _texts(guide.spec)))
        case "grammar":
            try:
                return llguidance.LLMatcher.grammar_from_lark(any_to_lark(guide.spec))
            except Exception as error:  # the converter raises that very class
                raise InvalidRequest("guide", f"is not a grammar: {_first_line(str(error))}") from None


def _regex(expression: str) -> str:
    """A grammar of one expression, in which a digit is one of 0 to 9."""
    if len(expression) > MAX_REGEX_CHARS:
        raise InvalidRequest("guide", f"has {len(expression)} characters, and the limit is {MAX_REGEX_CHARS}")
    return llguidance.LLMatcher.grammar_from_lark(f"start: /{llguidance.regex_to_lark(expression, 'd')}/")


def _texts(spec: str) -> list[str]:
    try:
        texts = json.loads(spec)
    except (ValueError, RecursionError):
        texts = None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("guide", "choices must be a JSON list of at least one text")
    return texts


def _first_line(message: str) -> str:
    """What an error says, in one line that does not repeat a long input."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    first = (lines or ["no reason is given"])[0]
    first = first if len(first) <= 160 else f"{first[:157]}…"
    return f"{first} {reason[:160]}".strip()
