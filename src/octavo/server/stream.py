"""From an engine's outputs to replies: texts, log-probabilities and usage, in one piece or event by event.

Owns the answers of one request while they grow. Both ways of replying read the same `Piece`s, so a stream joins to
exactly the whole. It waits for nothing and knows no socket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from msgspec import UNSET

from octavo.engine.text import ChoiceText, Detokenizer
from octavo.server.protocol import (
    AnswerMessage,
    APIError,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Delta,
    Finish,
    FunctionCall,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    Usage,
    encode,
)
from octavo.server.tools import CallDelta, ToolParser, ToolUse
from octavo.types import Output, Request, Sampled

if TYPE_CHECKING:
    from octavo.models.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
End = Literal["stop", "length"]
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def event(value: object) -> bytes:
    """A server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


class Piece(NamedTuple):
    """News of one choice: text that will not change any more, and the tokens that came, which may be ahead of it.

    `ended` says that the text met a stop string, of which the engine does not know.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index
    text: str
    tokens: Sequence[Sampled]
    finish_reason: End | None
    ended: bool = False


class Choice:
    """One choice so far. `decoded` is the length of its text with what is held back, when offsets are asked for."""

    def __init__(self, text: ChoiceText, offsets: Detokenizer | None) -> None:
        self.text = text
        self.offsets = offsets
        self.decoded = 0
        self.started = False
        self.texts: list[str] = []
        self.tokens: list[Sampled] = []
        self.finish_reason: End | None = None
        self.stop_reason: int | str | None = None


class Answer:
    """One prompt's answer under way: `num_choices` choices, the first of which has number `first_index` in the reply.

    With `scored_only` the engine's one token is no part of the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: Request,
        first_index: int = 0,
        *,
        prompt: str | None = None,
        skip_special: bool = True,
        offsets: bool = False,
        scored_only: bool = False,
    ) -> None:
        self.request, self.prompt, self.first_index = request, prompt, first_index
        self.num_cached_tokens = 0
        self.prompt_logprobs: Sequence[Sampled] = ()
        self._tokenizer, self._scored_only = tokenizer, scored_only
        ids, params = request.prompt_token_ids, request.params
        self.choices = [
            Choice(
                ChoiceText(tokenizer.detokenizer(ids, skip_special), params),
                tokenizer.detokenizer(ids, skip_special) if offsets else None,
            )
            for _ in range(params.n)
        ]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)

    def take(self, news: Output) -> Piece | None:
        """Take an engine's output in. None for what comes after a choice's end."""
        choice, params = self.choices[news.index], self.request.params
        if choice.finish_reason is not None:
            return None
        self.num_cached_tokens = news.num_cached_tokens
        if news.prompt_logprobs is not None:
            self.prompt_logprobs = news.prompt_logprobs
        if news.finish_reason == "abort":
            if params.guide is not None:
                what = "the schema, expression or grammar that the answer must follow became too complex on the way"
                raise APIError(400, what, code="guide_too_complex")
            raise APIError(503, "the request was aborted by the server", code="aborted")
        tokens, reason = news.new_tokens, news.finish_reason
        if self._scored_only:
            choice.finish_reason = reason = "length"
            return Piece(news.index, "", (), reason)
        text, num_tokens, stop = choice.text.push([token.token_id for token in tokens], reason)
        if num_tokens < len(tokens):
            tokens = tokens[:num_tokens]
        choice.tokens += tokens
        if text:
            choice.texts.append(text)
        if stop is not None:
            choice.finish_reason, choice.stop_reason = "stop", stop
        elif reason is not None:
            choice.finish_reason = reason
            last = tokens[-1].token_id if tokens else -1
            if reason == "stop" and last in params.stop_token_ids and not self._is_end(last):
                choice.stop_reason = last
        return Piece(news.index, text, tokens, choice.finish_reason, stop is not None)

    def _is_end(self, token_id: int) -> bool:
        return not self.request.params.ignore_eos and token_id in self._tokenizer.eos_token_ids


def usage(answers: Sequence[Answer]) -> Usage:
    """What the request came to."""
    prompt = sum(answer.num_prompt_tokens for answer in answers)
    completion = sum(answer.num_completion_tokens for answer in answers)
    cached = sum(answer.num_cached_tokens for answer in answers)
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


class Names:
    """How tokens are written in log-probabilities: as their text, or as `token_id:7`."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def __call__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def bytes(self, token_id: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token_id))


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > LEAST_LOGPROB else LEAST_LOGPROB


def _prompt_logprobs(answer: Answer, names: Names) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`: by token id, null for the first token."""
    num_top = answer.request.params.prompt_logprobs or 0
    entries: PromptLogprobs = [None]
    for token in answer.prompt_logprobs:
        entry = {str(token.token_id): PromptLogprob(_finite(token.logprob), token.rank, names(token.token_id))}
        for rank, (token_id, logprob) in enumerate(token.top[:num_top], 1):
            entry.setdefault(str(token_id), PromptLogprob(_finite(logprob), rank, names(token_id)))
        entries.append(entry)
    return entries


# ── completions ──────────────────────────────────────────────────────────────────────────────────────────────────


class CompletionReplies:
    """Writes the answers of a completion request."""

    def __init__(self, reply_id: str, created: int, model: str, body: CompletionRequest, tokenizer: Tokenizer) -> None:
        self._id, self._created, self._model, self._body = reply_id, created, model, body
        self._tokenizer = tokenizer
        self._names = Names(tokenizer, bool(body.return_tokens_as_token_ids))
        self._with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._always_usage = self._with_usage and bool(body.stream_options.continuous_usage_stats)  # type: ignore[union-attr]

    def event(self, answers: Sequence[Answer], answer: Answer, piece: Piece) -> bytes:
        """The event for a piece; nothing if it has nothing to say yet."""
        body, choice = self._body, answer.choices[piece.index]
        silent = not piece.text and piece.finish_reason is None and body.logprobs is None and not body.return_token_ids
        if silent and (choice.started or not body.echo):
            return b""
        out = CompletionChoice(
            index=answer.first_index + piece.index, text=piece.text, finish_reason=piece.finish_reason
        )
        if body.logprobs is not None:
            out.logprobs = CompletionLogprobs()
        if not choice.started:
            choice.started = True
            self._open(answer, choice, out)
        if body.logprobs is not None:
            self._score(choice, piece.tokens, out)
        if piece.finish_reason is not None:
            out.stop_reason = choice.stop_reason
        if body.return_token_ids:
            out.token_ids = [token.token_id for token in piece.tokens]
        total = usage(answers) if self._always_usage else None
        return event(self._reply([out], total if self._with_usage else UNSET))

    def usage_event(self, answers: Sequence[Answer]) -> bytes:
        """The last event, if it was asked for."""
        return event(self._reply([], usage(answers))) if self._with_usage else b""

    def whole(self, answers: Sequence[Answer]) -> Completion:
        """The reply in one piece."""
        choices: list[CompletionChoice] = []
        for answer in answers:
            for choice in _best(answer, self._body.n or 1):
                out = CompletionChoice(
                    index=len(choices),
                    text="".join(choice.texts),
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                )
                if self._body.logprobs is not None:
                    out.logprobs = CompletionLogprobs()
                self._open(answer, choice, out)
                if self._body.logprobs is not None:
                    self._score(choice, choice.tokens, out)
                if self._body.return_token_ids:
                    out.token_ids = [token.token_id for token in choice.tokens]
                choices.append(out)
        return self._reply(choices, usage(answers))

    def _reply(self, choices: list[CompletionChoice], total: object) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=total,  # type: ignore[arg-type]
        )

    def _open(self, answer: Answer, choice: Choice, out: CompletionChoice) -> None:
        """What only the first piece of a choice has: the echo, and what is known of the prompt."""
        body, ids = self._body, list(answer.request.prompt_token_ids)
        if body.prompt_logprobs is not None:
            out.prompt_logprobs = _prompt_logprobs(answer, self._names)
        if body.return_token_ids:
            out.prompt_token_ids = ids
        if not body.echo:
            return
        detokenizer, offsets, length = self._tokenizer.detokenizer((), False), [], 0
        given_bos = answer.prompt is not None and self._tokenizer.add_bos and ids[:1] == [self._tokenizer.bos_token_id]
        pieces = []
        for position, token in enumerate(ids):
            offsets.append(length)
            pieces.append("" if given_bos and position == 0 else detokenizer.push((token,)))
            length += len(pieces[-1])
        prompt = answer.prompt if answer.prompt is not None else "".join(pieces)
        out.text = prompt + out.text
        choice.decoded += len(prompt)
        if out.logprobs is not None:
            scores = out.logprobs
            scores.text_offset += offsets
            scores.tokens += map(self._names, ids)
            scores.token_logprobs.append(None)
            scores.top_logprobs.append(None)
            for scored in answer.prompt_logprobs:
                scores.token_logprobs.append(_finite(scored.logprob))
                scores.top_logprobs.append(self._top(scored))

    def _score(self, choice: Choice, tokens: Sequence[Sampled], out: CompletionChoice) -> None:
        scores = out.logprobs
        assert scores is not None
        assert choice.offsets is not None
        for token in tokens:
            scores.text_offset.append(choice.decoded)
            scores.tokens.append(self._names(token.token_id))
            scores.token_logprobs.append(_finite(token.logprob))
            scores.top_logprobs.append(self._top(token))
            choice.decoded += len(choice.offsets.push((token.token_id,)))

    def _top(self, token: Sampled) -> dict[str, float]:
        """The chosen token first, then the likeliest."""
        best = {self._names(token.token_id): _finite(token.logprob)}
        for token_id, logprob in token.top[: self._body.logprobs]:
            best.setdefault(self._names(token_id), _finite(logprob))
        return best


def _best(answer: Answer, n: int) -> Sequence[Choice]:
    """The choices that are returned: with `best_of` the `n` whose tokens are the likeliest on average."""
    if len(answer.choices) <= n:
        return answer.choices
    return sorted(answer.choices, key=lambda c: -sum(t.logprob for t in c.tokens) / max(len(c.tokens), 1))[:n]


# ── chats ────────────────────────────────────────────────────────────────────────────────────────────────────────


class ChatReplies:
    """Writes the answers of a chat."""

    def __init__(
        self, reply_id: str, created: int, model: str, body: ChatRequest, tokenizer: Tokenizer, use: ToolUse
    ) -> None:
        self._id, self._created, self._model, self._body, self._use = reply_id, created, model, body, use
        self._parsers: dict[int, ToolParser] = {}
        self._names = Names(tokenizer, bool(body.return_tokens_as_token_ids))
        self._with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._always_usage = self._with_usage and bool(body.stream_options.continuous_usage_stats)  # type: ignore[union-attr]

    def event(self, answers: Sequence[Answer], answer: Answer, piece: Piece) -> bytes:
        """The events for a piece: the first one of a choice says who speaks."""
        body, choice = self._body, answer.choices[piece.index]
        total = usage(answers) if self._always_usage else None
        out, first = ChatChunkChoice(index=piece.index, delta=Delta()), b""
        if not choice.started:
            choice.started = True
            out.delta = Delta(role="assistant", content=body.echoed)
            opening = self._chunk([out], total)
            if body.return_token_ids:
                opening.prompt_token_ids = list(answer.request.prompt_token_ids)
            first = event(opening)
            out = ChatChunkChoice(index=piece.index, delta=Delta())
        silent = not self._say(piece, out)
        if body.logprobs and piece.tokens:
            out.logprobs, silent = self._scores(piece.tokens), False
        if body.return_token_ids:
            out.token_ids, silent = [token.token_id for token in piece.tokens], False
        if piece.finish_reason is not None:
            out.stop_reason = choice.stop_reason
        elif silent:
            return first
        return first + event(self._chunk([out], total))

    def _say(self, piece: Piece, out: ChatChunkChoice) -> bool:
        """Put a piece's text and calls into a chunk; whether there was anything."""
        content, out.finish_reason = piece.text, piece.finish_reason
        if self._use.style is not None:
            parser = self._parsers.get(piece.index)
            if parser is None:
                parser = self._parsers[piece.index] = ToolParser(self._use.style, self._use.names)
            content, calls = parser.push(piece.text)
            if piece.finish_reason is not None:
                more, late = parser.flush()
                content, calls = content + more, [*calls, *late]
                if piece.finish_reason == "stop" and parser.calls:
                    out.finish_reason = "tool_calls"
            if calls:
                out.delta.tool_calls = [_call_delta(call) for call in calls]
        if content:
            out.delta.content = content
        return bool(content) or out.delta.tool_calls is not UNSET

    def usage_event(self, answers: Sequence[Answer]) -> bytes:
        """The last event, if it was asked for."""
        return event(self._chunk([], usage(answers))) if self._with_usage else b""

    def whole(self, answers: Sequence[Answer]) -> ChatCompletion:
        """The reply in one piece."""
        [answer], body = answers, self._body
        choices: list[ChatChoice] = []
        for choice in _best(answer, body.n or 1):
            message, reason = self._message("".join(choice.texts), choice.finish_reason)
            if body.echoed:
                message.content = body.echoed + (message.content or "")
            out = ChatChoice(index=len(choices), message=message, finish_reason=reason, stop_reason=choice.stop_reason)
            if body.logprobs:
                out.logprobs = self._scores(choice.tokens)
            if body.return_token_ids:
                out.token_ids = [token.token_id for token in choice.tokens]
            choices.append(out)
        reply = ChatCompletion(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage(answers)
        )
        if body.prompt_logprobs is not None:
            reply.prompt_logprobs = _prompt_logprobs(answer, self._names)
        if body.return_token_ids:
            reply.prompt_token_ids = list(answer.request.prompt_token_ids)
        return reply

    def _message(self, text: str, reason: Finish | None) -> tuple[AnswerMessage, Finish | None]:
        if self._use.style is None:
            return AnswerMessage(content=text), reason
        parser = ToolParser(self._use.style, self._use.names)
        content = parser.push(text).content
        content += parser.flush().content
        if not parser.calls:
            return AnswerMessage(content=content), reason
        calls = [
            ToolCall(id=call.id, type="function", function=FunctionCall(call.name, call.arguments))
            for call in parser.calls
        ]
        message = AnswerMessage(content=content or None, tool_calls=calls)
        return message, "tool_calls" if reason == "stop" else reason

    def _chunk(self, choices: list[ChatChunkChoice], total: Usage | None) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=total if self._with_usage else UNSET,
        )

    def _scores(self, tokens: Sequence[Sampled]) -> ChatLogprobs:
        num_top, names = self._body.top_logprobs or 0, self._names
        return ChatLogprobs(
            [
                TokenLogprob(
                    names(token.token_id),
                    _finite(token.logprob),
                    names.bytes(token.token_id),
                    [TopLogprob(names(t), _finite(logprob), names.bytes(t)) for t, logprob in token.top[:num_top]],
                )
                for token in tokens
            ]
        )


def _call_delta(news: CallDelta) -> ToolCall:
    """A piece of a call; its first piece has the id and the name."""
    if news.name is None:
        return ToolCall(index=news.index, function=FunctionCall(arguments=news.arguments))
    function = FunctionCall(news.name, news.arguments)
    return ToolCall(index=news.index, id=news.id or UNSET, type="function", function=function)
