"""What goes over the wire: the shapes of requests and replies, their decoding from bytes, and errors.

Names and meanings are OpenAI's, and vLLM's beyond them. Bodies are decoded straight into these structs: what is not of
the right shape is refused here, in a few words that name the field and never repeat the input. It knows no engine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from octavo.errors import InvalidRequest, RequestTooLarge
from octavo.types import MAX_CHOICES, MAX_LOGPROBS, MAX_SEED, SamplingParams

MAX_TOTAL_CHOICES = 4096
"""Prompts times choices in one request."""
MAX_INT = 2**31 - 1

# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
MAX_MESSAGE_CHARS = 1000


class APIError(Exception):
    """An answer other than 2xx. `param` names the field that is to blame, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[: MAX_MESSAGE_CHARS - 1] + "…"
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def body(self) -> ErrorReply:
        kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        return ErrorReply(ErrorBody(self.message, kind, self.param, self.code))


class ErrorBody(Struct):
    """`type` is a class of errors, `param` the field to blame, `code` for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Struct):
    """The body of every reply that is not 2xx, and of a stream's last event when it breaks."""

    error: ErrorBody


def refused(error: InvalidRequest) -> APIError:
    """The engine's refusal as a 400."""
    code = "context_length_exceeded" if isinstance(error, RequestTooLarge) else "invalid_value"
    param = "prompt" if error.field.startswith("prompt[") else error.field
    return APIError(400, str(error), param=param, code=code)


# ── decoding ─────────────────────────────────────────────────────────────────────────────────────────────────────

T = TypeVar("T")


def decode(body: bytes, kind: type[T]) -> T:
    """A request from a body. Raises APIError(400): not JSON, not an object, a field of the wrong type, too deep."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at ")
        path = where.strip("`").removeprefix("key` in `").removeprefix("$").lstrip(".")
        what = what.replace("`", "").replace("Expected", "expected", 1)
        if match := re.fullmatch(r"Object missing required field (\w+)", what):
            path, what = ".".join(filter(None, (path, match[1]))), "is missing"
        raise APIError(400, f"{path or 'the body'}: {what}", param=_parameter(path), code="invalid_type") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise APIError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise APIError(400, "the body is nested too deeply", code="invalid_json") from None


def _parameter(path: str) -> str | None:
    match = re.match(r"\w+", path)
    return match[0] if match else None


def encode(value: Any) -> bytes:
    """JSON. A struct's UNSET fields are left out."""
    return _encoder.encode(value)


_encoder = msgspec.json.Encoder()

# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
Stop = Annotated[str, Meta(min_length=1, max_length=4096)]
SESSION_ID = r"[^\x00-\x1f\x7f-\x9f]{1,256}"
"""All of a session's name, without control characters."""
SessionId = Annotated[str, Meta(min_length=1, max_length=256, extra_json_schema={"pattern": f"^{SESSION_ID}$"})]
Unsupported = Annotated[Any, Meta(description="Not supported: null or absent.")]

_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {"type": "null"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}
_MESSAGE = {
    "type": "object",
    "properties": {"role": {"type": "string"}, "content": _CONTENT, "name": {"type": "string"}},
    "required": ["role"],
}
Messages = Annotated[list[dict[str, Any]], Meta(min_length=1, extra_json_schema={"items": _MESSAGE})]
Prompt = str | list[int | str | list[int]]


class StreamOptions(Struct):
    """`include_usage` adds a last chunk with the usage; `continuous_usage_stats` adds it to every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_RESPONSE_FORMAT = {
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "json_schema": {"type": "object", "properties": {"schema": {"type": "object"}}, "required": ["schema"]},
    },
    "required": ["type"],
}
_STRUCTURED = {
    "properties": {
        "json": {"type": ["object", "string"]},
        "regex": {"type": "string"},
        "choice": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "grammar": {"type": "string"},
        "json_object": {"type": "boolean"},
    },
    "minProperties": 1,
}
ResponseFormat = Annotated[dict[str, Any], Meta(extra_json_schema=_RESPONSE_FORMAT)]
StructuredOutputs = Annotated[dict[str, Any], Meta(extra_json_schema=_STRUCTURED)]


SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "min_tokens", "ignore_eos"),
    *("use_beam_search", "length_penalty", "prompt_logprobs"),
)
"""Those that SamplingParams has by the same names and takes as they are."""


class GenerationRequest(Struct, kw_only=True):
    """What completions and chats have in common."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = 1
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=1e9)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    min_p: Probability | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=1000.0)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=4096)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=65536)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    use_beam_search: bool | None = None
    beam_width: Annotated[int, Meta(ge=1, le=64)] | None = None
    length_penalty: Annotated[float, Meta(ge=-10.0, le=10.0)] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    session_id: SessionId | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=8192)] | None = None
    bad_words: Unsupported = None
    logits_processors: Unsupported = None

    def check(self) -> None:
        """Raise APIError(400) for what types alone cannot say."""
        for name in self.unsupported():
            if getattr(self, name) not in (None, [], {}, ""):
                raise APIError(400, f"{name}: is not supported", param=name, code="unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise APIError(400, "stream_options: only with stream", param="stream_options", code="invalid_value")
        n, best_of = self.n or 1, self.best_of
        if best_of is not None and best_of < n:
            raise APIError(400, f"best_of: {best_of} is below n, which is {n}", param="best_of", code="invalid_value")
        if best_of is not None and best_of > n and (self.stream or self.use_beam_search):
            raise APIError(
                400, "best_of: above n only without stream and beam search", param="best_of", code="invalid_value"
            )

    def unsupported(self) -> tuple[str, ...]:
        return ("bad_words", "logits_processors")

    @property
    def num_choices(self) -> int:
        """How many are generated for each prompt."""
        return max(self.n or 1, self.best_of or 1)

    def sampling(self, *, max_tokens: int | None, logprobs: int | None, **more: Any) -> SamplingParams:
        """How tokens are chosen. Raises InvalidRequest."""
        given = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.seed is not None:
            if self.seed > MAX_SEED:
                raise InvalidRequest("seed", f"must be a whole number from 0 to {MAX_SEED}")
            given["seed"] = self.seed
        if self.use_beam_search:
            given["beam_width"] = self.beam_width or self.num_choices
        if self.logit_bias:
            given["logit_bias"] = {_token_id(token): bias for token, bias in self.logit_bias.items()}
        return SamplingParams(n=self.num_choices, max_tokens=max_tokens, logprobs=logprobs, **(given | more))


def _token_id(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,20}", text):
        raise InvalidRequest("logit_bias", "its keys must be token ids")
    return int(text)


class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of /v1/completions. `prompt` is a text, a list of token ids, or a list of either."""

    prompt: Prompt
    max_tokens: Count | None = 16
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: Unsupported = None
    prompt_embeds: Unsupported = None

    def unsupported(self) -> tuple[str, ...]:
        return (*super().unsupported(), "suffix", "prompt_embeds")

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise APIError(400, "max_tokens: 0 only with echo", param="max_tokens", code="invalid_value")

    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, one or many. A list whose first item is a number is one prompt's tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise APIError(400, "prompt: is empty", param="prompt", code="invalid_value")
        if all(isinstance(item, int) for item in self.prompt):
            return [self.prompt]  # type: ignore[list-item]
        for position, item in enumerate(self.prompt):
            if isinstance(item, int):
                message = f"prompt[{position}]: a number among texts or lists; token ids stand in a list of their own"
                raise APIError(400, message, param="prompt", code="invalid_type")
        return self.prompt  # type: ignore[return-value]


class ChatRequest(GenerationRequest, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None

    def unsupported(self) -> tuple[str, ...]:
        return (*super().unsupported(), "chat_template", "functions", "function_call", "audio")

    def check(self) -> None:
        super().check()
        check_messages(self.messages, self.add_generation_prompt, self.continue_final_message)
        if self.most_tokens == 0:
            name = "max_completion_tokens" if self.max_completion_tokens == 0 else "max_tokens"
            raise APIError(400, f"{name}: must be at least 1", param=name, code="invalid_value")
        if self.top_logprobs and not self.logprobs:
            raise APIError(400, "top_logprobs: only with logprobs", param="top_logprobs", code="invalid_value")
        if self.prompt_logprobs is not None and self.stream:
            raise APIError(400, "prompt_logprobs: not with stream", param="prompt_logprobs", code="invalid_value")

    @property
    def echoed(self) -> str:
        """What stands before the answer: with `echo`, the message of the assistant's that comes last."""
        last = self.messages[-1]
        return message_text(last) if self.echo and last["role"] == "assistant" else ""

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def message_text(message: dict[str, Any]) -> str:
    """The text of a message that was checked."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def check_messages(messages: Sequence[dict[str, Any]], generation: bool | None, continued: bool | None) -> None:
    """Raise APIError(400) for a conversation that no template could read."""

    def fail(where: str, message: str) -> APIError:
        return APIError(400, f"{where}: {message}", param="messages", code="invalid_value")

    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise fail(where, "needs a role, which is a string")
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise fail(where, "content parts must be of type text: the model reads nothing else")
        elif content is None:
            if role != "assistant":
                raise fail(where, "needs content")
        elif not isinstance(content, str):
            raise fail(where, "content must be a string or a list of text parts")
    if continued:
        if generation:
            raise fail("continue_final_message", "not together with add_generation_prompt")
        if not messages[-1].get("content"):
            raise fail(f"messages[{len(messages) - 1}]", "has no content to be continued")


class TokenizeRequest(Struct, kw_only=True):
    """The body of /tokenize: a `prompt`, or `messages` as for a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise APIError(400, "prompt: give either prompt or messages", param="prompt", code="invalid_value")
        if self.messages is not None:
            check_messages(self.messages, self.add_generation_prompt, self.continue_final_message)


class DetokenizeRequest(Struct, kw_only=True):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=1 << 20)]


class PinRequest(Struct, kw_only=True):
    """The body of /v1/sessions/{id}/pin, which may be missing. 0 seconds end a pin; the default is 600."""

    ttl_s: Annotated[float, Meta(ge=0.0, le=86400.0)] | None = None


# ── replies ──────────────────────────────────────────────────────────────────────────────────────────────────────

Finish = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(Struct):
    """How many of the prompt's tokens were found in the cache."""

    cached_tokens: int


class Usage(Struct):
    """Tokens of all prompts, each counted once, and of all answers, with the tokens that ended them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(Struct):
    """vLLM's form of a prompt token's log-probability."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Struct):
    """One entry for each token. A prompt's first token, which nothing precedes, has null."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class AnyChoice(Struct, kw_only=True):
    """What an answer has, or a piece of one. The piece that ends it says why."""

    index: int
    finish_reason: Finish | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class AnyReply(Struct, kw_only=True):
    """What a reply has, or an event of one."""

    id: str
    created: int
    model: str
    usage: Usage | UnsetType | None = UNSET


class CompletionChoice(AnyChoice, kw_only=True):
    """An answer, or a piece of one."""

    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(AnyReply, kw_only=True):
    """The reply of /v1/completions, and each event of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class TopLogprob(Struct):
    """A token that was likely; `bytes` are those it stands for."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token that was chosen, and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """One entry for each token."""

    content: list[TokenLogprob]


class FunctionCall(Struct):
    """`arguments` is a text that holds JSON."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCall(Struct, kw_only=True):
    """A call, or in a stream a piece of the call number `index`."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCall


class AnswerMessage(Struct, kw_only=True):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(AnyChoice, kw_only=True):
    """An answer."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None = None


class ChatCompletion(AnyReply, kw_only=True):
    """The reply of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(Struct, kw_only=True):
    """What is new of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(AnyChoice, kw_only=True):
    """A piece of an answer."""

    delta: Delta
    logprobs: ChatLogprobs | None = None


class ChatChunk(AnyReply, kw_only=True):
    """An event of a chat's stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(Struct, kw_only=True):
    """A name under which the model is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["octavo"] = "octavo"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(Struct, kw_only=True):
    """The reply of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeReply(Struct, kw_only=True):
    """`token_strs` only if they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(Struct):
    """The text of the tokens."""

    prompt: str


class PerTier(Struct):
    """Of each tier, the nearest first: the page pool, host memory, a file."""

    device: int
    host: int
    disk: int


class Session(Struct, kw_only=True):
    """What a session holds, and how much of its prompts was found in the cache. `tenant` begins its key's digest.

    `shared_pages` of its pages other sessions use too. `idle_s` is 0 while a request runs, `pinned_s` what remains of a
    pin.
    """

    object: Literal["session"] = "session"
    id: str
    tenant: str
    running: int
    requests: int
    idle_s: float
    pinned_s: float
    pages: PerTier
    bytes: PerTier
    shared_pages: int
    own_pages: int
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float


class SessionList(Struct, kw_only=True):
    """The reply of /v1/sessions, the longest idle first."""

    object: Literal["list"] = "list"
    data: list[Session]


class CacheSave(Struct, kw_only=True):
    """The reply of /v1/cache/save: pages that were written, and that could not be."""

    object: Literal["cache.save"] = "cache.save"
    pages: int
    failed: int
    seconds: float


class VersionReply(Struct):
    """Octavo's version."""

    version: str


class HealthReply(Struct):
    """Whether requests are taken: ok, or draining before the end."""

    status: Literal["ok", "draining"]
