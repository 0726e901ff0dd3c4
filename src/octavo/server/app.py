"""The application: routes, keys, limits, and the life of a request from its bytes to its last event.

Owns what is open, and ends it when its client goes, when the engine dies and when the server drains. Tokens are the
engine's, texts are `stream`'s, shapes are `protocol`'s; sockets and signals are `listen`'s.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from jinja2 import TemplateSyntaxError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from octavo import __version__
from octavo.engine.async_llm import AsyncLLM, RequestStream, Take
from octavo.errors import (
    ConfigError,
    EngineDead,
    InvalidRequest,
    OctavoError,
    Overloaded,
    PinRefused,
    RequestFailed,
    RequestTooLarge,
)
from octavo.models.tokenizer import Tokenizer
from octavo.server import assets
from octavo.server.explain import Stories
from octavo.server.feed import Feed, rate
from octavo.server.keys import Caller, Keys
from octavo.server.look import Looks
from octavo.server.metrics import CONTENT_TYPE, Metrics, RequestMetrics
from octavo.server.openapi import document
from octavo.server.protocol import (
    MAX_TOTAL_CHOICES,
    APIError,
    ChatRequest,
    CompletionRequest,
    DetokenizeReply,
    DetokenizeRequest,
    GenerationRequest,
    HealthReply,
    ModelCard,
    ModelList,
    PinRequest,
    TokenizeReply,
    TokenizeRequest,
    VersionReply,
    decode,
    encode,
    message_text,
    refused,
)
from octavo.server.sessions import PIN_S, Action, SessionAPI, session_of
from octavo.server.settings import ServerConfig
from octavo.server.stream import DONE, Answer, ChatReplies, CompletionReplies, event, usage
from octavo.server.structured import LEGACY_FIELDS, Constraint, constraint, json_size
from octavo.server.tools import template_messages, tool_use
from octavo.types import Output, Request, SamplingParams

_log = logging.getLogger(__name__)
_requests = logging.getLogger("octavo.requests")

SMALL_BODY = 1 << 13
"""Bodies up to this many bytes are decoded and tokenised at once; larger ones in a thread, beside the event loop."""
HUGE_BODY = 1 << 20
"""From here on they wait for each other, so that those between need not wait for them."""
PROBES = ("/health", "/metrics")
"""What is asked again and again, and logged only when it goes wrong."""
STALLED_S = 30.0
"""How long a client that watches may take nothing of what it is sent."""
LOGGED = "octavo.logged"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

T = TypeVar("T")
G = TypeVar("G", bound=GenerationRequest)
Replies = CompletionReplies | ChatReplies


class Disconnected(Exception):
    """The client is gone: nobody is left to be answered."""


class Exchange:
    """One HTTP request to a generating endpoint: what its log line says, and its way back."""

    def __init__(self, scope: Scope, send: Send, prefix: str) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.arrived = time.monotonic()
        self.started = False
        self.fields: dict[str, Any] = {"id": self.id, "path": scope["path"], "client": _client(scope)}
        self.answers: Sequence[Answer] = ()
        self.first_token_s: float | None = None
        self.renamed: dict[str, str] = {}  # the engine's names of fields to the body's
        self.gone: Callable[[], bool] = lambda: False
        self._send = send

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        self.fields["status"] = status
        headers = [*headers, (b"x-request-id", self.id.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        if self.gone():  # the end of a reply lets the watch for that end too, but not before this
            raise Disconnected

    async def reply(self, status: int, value: object, extra: dict[str, str] | None = None) -> None:
        body = encode(value)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.lower().encode(), text.encode()) for name, text in (extra or {}).items()]
        await self.start(status, headers)
        await self.write(body, more=False)

    async def fail(self, error: APIError) -> None:
        """Say what went wrong: as the reply, or as the last event of a stream that has begun."""
        if not self.started:
            await self.reply(error.status, error.body(), error.headers)
        else:
            await self.write(event(error.body()) + DONE, more=False)


class Application:
    """The server's state: an engine, its metrics, and what is open."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig, model: str) -> None:
        self.llm, self.config = llm, config
        self.names = tuple(config.served_model_name) or (model,)
        self.metrics = Metrics.of(llm, config.metrics_namespace, self.names[0])
        self.draining = False
        self.num_open = 0
        self.created = int(time.time())
        if (template := config.template()) is not None:
            llm.tokenizer.set_chat_template(template)
            _check_template(llm.tokenizer)
        self._root = model
        self._keys = Keys(config)
        self._sessions = SessionAPI(llm, self._keys)
        recent = self.metrics.recent_first_token_s, self.metrics.recent_token_s
        self._stories, self._looks = Stories(llm), Looks(llm, show_text=config.ui_show_text)
        self.feed = Feed(llm, self.names[0], *recent, show_text=config.ui_show_text)
        self._longest_token = max(len(llm.tokenizer.token_bytes(token)) for token in range(llm.tokenizer.vocab_size))
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="octavo-text")
        self._slow_thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-huge")
        self._document = encode(document(self.names))

    def asgi(self) -> Starlette:
        """What a server of ASGI applications runs."""
        routes = [
            Route("/v1/completions", _Generating(self, self._completion, "cmpl"), methods=["POST"]),
            Route("/v1/chat/completions", _Generating(self, self._chat, "chatcmpl"), methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{model:path}", self._model, methods=["GET"]),
            Route("/v1/sessions", self._session_list, methods=["GET"]),
            Route("/v1/sessions/{id:path}/{action}", self._touch_session, methods=["POST"]),
            Route("/v1/sessions/{id:path}", self._session, methods=["GET"]),
            Route("/v1/cache/save", self._save, methods=["POST"]),
            Route("/v1/cache/map", self._map, methods=["GET"]),
            Route("/v1/cache/tree", self._tree, methods=["GET"]),
            Route("/v1/cache/pages/{tier}/{page}", self._page, methods=["GET"]),
            Route("/v1/requests/{id}/explain", self._explain, methods=["GET"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/version", self._version, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/openapi.json", self._openapi, methods=["GET"]),
            *(() if self.config.no_ui else assets.routes()),
        ]
        middleware = [Middleware(_Watched, metrics=self.metrics, log=not self.config.disable_log_requests)]
        if self.config.allowed_origins:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(self.config.allowed_origins),
                    allow_methods=["*"],
                    allow_headers=["*"],
                )
            )
        handlers: dict[Any, Any] = {
            APIError: _api_error,
            HTTPException: _http_error,
            Disconnected: _nobody,
            OctavoError: _unexpected,
            Exception: _unexpected,
        }
        starlette = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
        starlette.router.redirect_slashes = False  # a redirect would repeat the Host header of whoever asks
        return starlette

    def close(self) -> None:
        for threads in (self._threads, self._slow_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    # ── small endpoints ──

    async def _models(self, http: HTTPRequest) -> Response:
        self._keys.caller(http.scope)
        return _json(ModelList(data=[self._card(name) for name in self.names]))

    async def _model(self, http: HTTPRequest) -> Response:
        self._keys.caller(http.scope)
        self._check_model(name := http.path_params["model"])
        return _json(self._card(name))

    async def _health(self, http: HTTPRequest) -> Response:
        if self.draining:
            raise _draining()
        if not self.llm.healthy:
            raise APIError(503, "the engine is not running", code="engine_dead", headers={"Retry-After": "5"})
        return _json(HealthReply("ok"))

    async def _version(self, http: HTTPRequest) -> Response:
        return _json(VersionReply(__version__))

    async def _metrics(self, http: HTTPRequest) -> Response:
        return Response(self.metrics.page(), media_type=CONTENT_TYPE)

    async def _openapi(self, http: HTTPRequest) -> Response:
        return Response(self._document, media_type="application/json")

    async def _tokenize(self, http: HTTPRequest) -> Response:
        self._keys.caller(http.scope)
        body = await self._read(http.scope, http.receive, TokenizeRequest)
        self._check_model(body.model)
        body.check()
        return await _unless_gone(self._tokenized(body), http.receive)

    async def _tokenized(self, body: TokenizeRequest) -> Response:
        try:
            if body.messages is not None:
                tokens = await self._chat_tokens(body, body.messages, body.tools)
            else:
                tokens = await self._tokens(body.prompt or "", body.add_special_tokens is not False)
        except InvalidRequest as error:
            raise refused(error) from None
        texts = self.llm.tokenizer.token_text
        return await self._beside(
            len(tokens),
            lambda: _json(
                TokenizeReply(
                    count=len(tokens),
                    max_model_len=self.llm.max_model_len,
                    tokens=tokens,
                    token_strs=[texts(token) for token in tokens] if body.return_token_strs else None,
                )
            ),
        )

    async def _detokenize(self, http: HTTPRequest) -> Response:
        self._keys.caller(http.scope)
        body = await self._read(http.scope, http.receive, DetokenizeRequest)
        self._check_model(body.model)
        vocab_size = self.llm.tokenizer.vocab_size
        if (token := max(body.tokens, default=0)) >= vocab_size:
            message = f"tokens: {token} is not a token id from 0 to {vocab_size - 1}"
            raise APIError(400, message, param="tokens", code="invalid_value")
        decoding = self._beside(len(body.tokens), self.llm.tokenizer.decode, body.tokens, False)
        return _json(DetokenizeReply(await _unless_gone(decoding, http.receive)))

    # ── sessions, named by the path as it is: a route's pattern overlooks a newline at the end ──

    async def _session_list(self, http: HTTPRequest) -> Response:
        caller, query = self._caller(http), http.query_params
        return _json(await self._sessions.listed(caller, query.get("tenant"), query.get("limit")))

    async def _session(self, http: HTTPRequest) -> Response:
        return await self._act(http, http.scope["path"], "show")

    async def _touch_session(self, http: HTTPRequest) -> Response:
        path, _, action = http.scope["path"].rpartition("/")
        if action not in ("pin", "release", "demote"):
            raise HTTPException(404)
        return await self._act(http, path, action)

    async def _act(self, http: HTTPRequest, path: str, action: Action) -> Response:
        caller, tenant = self._caller(http), http.query_params.get("tenant")
        ttl_s = None
        if action == "pin":
            ttl_s = (await self._read(http.scope, http.receive, PinRequest, empty=PinRequest())).ttl_s
        session_id = path.removeprefix("/v1/sessions/")
        return _json(await self._sessions.act(caller, tenant, session_id, action, PIN_S if ttl_s is None else ttl_s))

    async def _save(self, http: HTTPRequest) -> Response:
        """It goes on to its end though nobody waits for it."""
        return _json(await self._sessions.save(self._caller(http)))

    async def _map(self, http: HTTPRequest) -> Response:
        """The map of all pages: once, or as it changes."""
        caller, query = self._caller(http), http.query_params
        hz, wanted = rate(query.get("hz")), query.get("stream")
        if wanted not in (None, "true", "false"):
            raise APIError(400, "stream: must be true or false", param="stream", code="invalid_value")
        if wanted == "true" or (wanted is None and "text/event-stream" in http.headers.get("accept", "")):
            return _Stream(self.feed, self.feed.open(caller, hz))
        return Response(await self.feed.snapshot(caller), media_type="application/json")

    async def _page(self, http: HTTPRequest) -> Response:
        caller, path = self._caller(http), http.path_params
        return _json(await self._looks.page(caller, path["tier"], path["page"]))

    async def _tree(self, http: HTTPRequest) -> Response:
        return _json(await self._looks.tree(self._caller(http), http.query_params.get("limit")))

    async def _explain(self, http: HTTPRequest) -> Response:
        return _json(self._stories.explain(self._caller(http), http.path_params["id"]))

    def _caller(self, http: HTTPRequest) -> Caller:
        if self.draining:
            raise _draining()
        return self._keys.caller(http.scope)

    def _card(self, name: str) -> ModelCard:
        return ModelCard(id=name, created=self.created, root=self._root, max_model_len=self.llm.max_model_len)

    # ── a request's way in ──

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise APIError(
                404,
                f"the model {_shown(name)!r} does not exist: there is {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )

    async def _read(self, scope: Scope, receive: Receive, kind: type[T], empty: T | None = None) -> T:
        """A request's body, decoded; without one, `empty` if that is given. Raises APIError, and Disconnected."""
        headers = dict(scope["headers"])
        if empty is not None and headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers:
            return empty
        content_type = headers.get(b"content-type", b"application/json").partition(b";")[0].strip().lower()
        if content_type != b"application/json" and not content_type.endswith(b"+json"):
            message = "the body must be JSON, sent as Content-Type: application/json"
            raise APIError(415, message, code="unsupported_media_type", headers={"Connection": "close"})
        body = await self._body(headers.get(b"content-length"), receive)
        return await self._beside(len(body), decode, body, kind)

    async def _body(self, announced: bytes | None, receive: Receive) -> bytes:
        most = self.config.max_body_bytes
        too_large = APIError(
            413,
            f"the body is larger than {most} bytes, the server's --max-body-bytes",
            code="body_too_large",
            headers={"Connection": "close"},
        )
        if announced is not None and announced.isdigit() and int(announced) > most:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.config.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Disconnected
                    part = message.get("body", b"")
                    size += len(part)
                    if size > most:
                        raise too_large
                    parts.append(part)
                    if not message.get("more_body", False):
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            late = f"the body did not come within {self.config.body_timeout:g} s, the server's --body-timeout"
            raise APIError(408, late, code="timeout", headers={"Connection": "close"}) from None

    async def _beside(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """Do work on `size` bytes, in a thread if they are many, so that the event loop stays quick."""
        if size <= SMALL_BODY:
            return work(*arguments)
        threads = self._threads if size <= HUGE_BODY else self._slow_thread
        return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)

    async def _tokens(self, text: str, special: bool = True) -> list[int]:
        """A text's tokens. Raises RequestTooLarge for one that is hopelessly long, without counting them."""
        size, most = len(text.encode(errors="replace")), self.llm.max_model_len
        if size > 4 * most * self._longest_token:
            least = size // self._longest_token
            raise RequestTooLarge(
                "prompt",
                f"has at least {least} tokens, and a context of {most} must also hold an answer: "
                "shorten it or raise max_model_len",
            )
        return await self._beside(size, self.llm.tokenizer.encode, text, special)

    async def _chat_tokens(
        self, body: ChatRequest | TokenizeRequest, messages: list[dict[str, Any]], tools: Sequence[Any] | None
    ) -> list[int]:
        """A conversation's tokens. The template has written its own begin-of-text mark; encoding never doubles it."""
        variables = dict(body.chat_template_kwargs or {})
        if body.documents is not None:
            variables["documents"] = body.documents
        size = json_size([messages, tools, variables])
        return await self._tokens(await self._beside(size, self._rendered, body, messages, tools, variables))

    def _rendered(
        self,
        body: ChatRequest | TokenizeRequest,
        messages: list[dict[str, Any]],
        tools: Sequence[Any] | None,
        variables: dict[str, Any],
    ) -> str:
        tokenizer = self.llm.tokenizer
        template = tokenizer.chat_template(bool(tools)) or ""
        conversation = template_messages(messages)
        if "developer" not in template:
            conversation = [
                {**message, "role": "system"} if message["role"] == "developer" else message for message in conversation
            ]
        generation = (
            not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
        )
        text = tokenizer.render_chat(conversation, generation, tools, variables)
        return _cut_after(text, messages[-1]) if body.continue_final_message else text

    # ── completions ──

    async def _completion(
        self, scope: Scope, receive: Receive, exchange: Exchange
    ) -> tuple[Any, list[Answer], Replies]:
        caller, body, session = await self._asked(scope, receive, exchange, CompletionRequest)
        prompts = body.prompts()
        if len(prompts) > (most := self.config.max_prompts_per_request):
            message = f"prompt: there are {len(prompts)}, and the limit is {most} (--max-prompts-per-request)"
            raise APIError(400, message, param="prompt", code="too_many_prompts")
        if len(prompts) * body.num_choices > MAX_TOTAL_CHOICES:
            message = f"n: {len(prompts)} prompts and {body.num_choices} choices are more than {MAX_TOTAL_CHOICES}"
            raise APIError(400, message, param="n", code="invalid_value")
        self._check_logprobs("logprobs", body.logprobs)
        self._check_logprobs("prompt_logprobs", body.prompt_logprobs)
        scored_only = body.max_tokens == 0
        more: dict[str, Any] = {}
        if body.echo and body.logprobs is not None:
            more["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
        if scored_only:
            more["min_tokens"] = 0
        logprobs = body.logprobs
        if body.num_choices > (body.n or 1):
            logprobs = logprobs or 0
        params = self._params(
            exchange, body, 1 if scored_only else body.max_tokens, logprobs, _constraint(body), **more
        )
        answers = []
        for i, prompt in enumerate(prompts):
            try:
                if isinstance(prompt, str):
                    ids = await self._tokens(prompt, body.add_special_tokens is not False)
                else:
                    ids = prompt
                request = self._request(body, f"{exchange.id}-{i}", ids, params, caller, session)
            except InvalidRequest as error:
                if len(prompts) > 1:
                    what = str(error).removeprefix(f"{error.field}: ")
                    place = f"prompt[{i}]" if error.field == "prompt" else f"prompt[{i}] {error.field}"
                    raise type(error)(place, what) from None
                raise
            answers.append(
                Answer(
                    self.llm.tokenizer,
                    request,
                    i * params.n,
                    prompt=prompt if isinstance(prompt, str) and len(request.prompt_token_ids) == len(ids) else None,
                    skip_special=body.skip_special_tokens is not False,
                    offsets=body.logprobs is not None,
                    scored_only=scored_only,
                )
            )
        name = exchange.fields["model"]
        return body, answers, CompletionReplies(exchange.id, int(time.time()), name, body, self.llm.tokenizer)

    # ── chats ──

    async def _chat(self, scope: Scope, receive: Receive, exchange: Exchange) -> tuple[Any, list[Answer], Replies]:
        caller, body, session = await self._asked(scope, receive, exchange, ChatRequest)
        self._check_logprobs("top_logprobs", body.top_logprobs)
        self._check_logprobs("prompt_logprobs", body.prompt_logprobs)
        template = self.llm.tokenizer.chat_template(bool(body.tools))
        use = tool_use(template, body.tools, body.tool_choice, body.parallel_tool_calls, _constraint(body))
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        if body.num_choices > (body.n or 1):
            logprobs = logprobs or 0
        params = self._params(exchange, body, body.most_tokens, logprobs, use.constraint)
        exchange.renamed["prompt"] = "messages"
        if body.max_completion_tokens is not None:
            exchange.renamed["max_tokens"] = "max_completion_tokens"
        ids = await self._chat_tokens(body, body.messages, use.tools)
        request = self._request(body, exchange.id, ids, params, caller, session)
        # some files mark <tool_call> as a control token, and calls are found by it
        skip_special = body.skip_special_tokens is not False and use.style != "hermes"
        answer = Answer(self.llm.tokenizer, request, skip_special=skip_special)
        name = exchange.fields["model"]
        return body, [answer], ChatReplies(exchange.id, int(time.time()), name, body, self.llm.tokenizer, use)

    # ── what they share ──

    async def _asked(
        self, scope: Scope, receive: Receive, exchange: Exchange, kind: type[G]
    ) -> tuple[Caller, G, str | None]:
        """Who asks for what, and in which session. Raises APIError, Disconnected."""
        caller = self._keys.caller(scope)
        body = await self._read(scope, receive, kind)
        self._check_model(body.model)
        body.check()
        session = session_of(body, scope)
        exchange.fields["model"], exchange.fields["stream"] = body.model or self.names[0], bool(body.stream)
        if session is not None:
            exchange.fields["session"] = session
        return caller, body, session

    def _check_logprobs(self, name: str, count: int | None) -> None:
        if (count or 0) > self.config.max_logprobs:
            message = f"{name}: {count} is above {self.config.max_logprobs}, the server's --max-logprobs"
            raise APIError(400, message, param=name, code="invalid_value")

    def _params(
        self,
        exchange: Exchange,
        body: GenerationRequest,
        max_tokens: int | None,
        logprobs: int | None,
        wanted: Constraint | None,
        **more: Any,
    ) -> SamplingParams:
        if wanted is not None:
            more["guide"] = wanted.guide
            exchange.renamed["guide"] = wanted.field
        if (allowed := body.allowed_token_ids) is not None:
            self.llm.limits.check_ids("allowed_token_ids", allowed)
            if not set(allowed) & set(self.llm.tokenizer.eos_token_ids):
                more["ignore_eos"] = True  # a guide may end otherwise
        return body.sampling(max_tokens=max_tokens, logprobs=logprobs, **more)

    def _request(
        self,
        body: GenerationRequest,
        request_id: str,
        ids: Sequence[int],
        params: SamplingParams,
        caller: Caller,
        session: str | None,
    ) -> Request:
        """A request, checked. Raises InvalidRequest, APIError."""
        if (most := body.truncate_prompt_tokens) is not None:
            if most < 0:  # as many as leave room for the answer
                most = max(self.llm.max_model_len - (params.max_tokens or 1), 0)
            ids = ids[max(len(ids) - most, 0) :]
        if body.priority and self.llm.config.scheduling_policy != "priority":
            message = "priority: the server does not run with --scheduling-policy priority"
            raise APIError(400, message, param="priority", code="invalid_value")
        identity: tuple[str, ...] = ()
        if caller.tenant and not self.config.share_prefixes:
            identity += ("key", caller.tenant)
        if body.cache_salt is not None:
            identity += ("salt", body.cache_salt)
        request = Request(request_id, ids, params, identity, body.priority or 0, caller.tenant, session)
        self.llm.limits.check(request)
        return request

    # ── answering ──

    async def answer(self, exchange: Exchange, body: Any, answers: list[Answer], replies: Replies) -> None:
        """Have the answers computed and send them. Whatever ends this ends the requests too.

        Outputs are read as they come, however slow the client: stop strings end a choice at once, and times are right.
        """
        exchange.answers = answers
        streams: list[RequestStream[bytes]] = []
        marks = [self._mark(answer, exchange.arrived) for answer in answers]

        def taking(answer: Answer, mark: RequestMetrics) -> Take[bytes]:
            def take(stream: RequestStream[bytes], output: Output, known_at: float) -> bytes | None:
                piece = answer.take(output)
                if piece is None:
                    return None
                if piece.ended:
                    stream.finish(piece.index)
                if exchange.first_token_s is None:
                    exchange.first_token_s = known_at - exchange.arrived
                waited = (stream.scheduled_at or stream.queued_at) - stream.queued_at
                mark.tokens(piece.index, len(piece.tokens), known_at, waited)
                if piece.finish_reason is not None:
                    mark.finished(piece.index, piece.finish_reason)
                return (replies.event(answers, answer, piece) or None) if body.stream else None

            return take

        try:
            takes = [taking(*both) for both in zip(answers, marks, strict=True)]
            await self._submit(answers, takes, streams)
            async for news in _merged(streams):
                if not exchange.started:
                    await exchange.start(200, STREAM_HEADERS)
                await exchange.write(news)
            if body.stream:
                await exchange.write(replies.usage_event(answers) + DONE, more=False)
            else:
                await exchange.reply(200, replies.whole(answers))
        except (APIError, EngineDead, RequestFailed):
            for mark in marks:
                mark.close("error")
            raise
        finally:
            for stream in streams:
                stream.abort()
            for mark in marks:
                mark.close("abort")

    def _mark(self, answer: Answer, arrived: float) -> RequestMetrics:
        params = answer.request.params
        return self.metrics.request_started(answer.num_prompt_tokens, params.n, params.max_tokens, arrived)

    async def _submit(
        self, answers: Sequence[Answer], takes: Sequence[Take[bytes]], streams: list[RequestStream[bytes]]
    ) -> None:
        """Queue them all, or none."""
        if len(answers) == 1:
            streams.append(await self.llm.submit(answers[0].request, takes[0]))
            return
        both = zip(answers, takes, strict=True)
        tasks = [asyncio.create_task(self.llm.submit(answer.request, take)) for answer, take in both]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            streams += [stream for stream in done if isinstance(stream, RequestStream)]


class _Stream(Response):
    """A feed's events, until they end or the client goes; one that takes none for long is not waited for."""

    def __init__(self, feed: Feed, events: AsyncIterator[bytes]) -> None:
        super().__init__()
        self._feed, self._events = feed, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(Disconnected, TimeoutError):
                await _unless_gone(self._write(send), receive)
        finally:
            self._feed.close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        async for piece in self._events:
            async with asyncio.timeout(STALLED_S):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Generating:
    """An endpoint that generates. It races the answer against the client's going."""

    def __init__(self, app: Application, prepare: Callable[..., Any], prefix: str) -> None:
        self._app, self._prepare, self._prefix = app, prepare, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, exchange = self._app, Exchange(scope, send, self._prefix)
        outcome = "ok"
        app.num_open += 1
        try:
            if app.draining:
                raise _draining()
            prepared = await self._prepare(scope, receive, exchange)
            await _unless_gone(app.answer(exchange, *prepared), receive, exchange)
        except Disconnected:
            outcome = "disconnected"
        except Exception as error:
            if isinstance(error, InvalidRequest) and error.field in exchange.renamed:
                what = str(error).removeprefix(f"{error.field}: ")
                error = type(error)(exchange.renamed[error.field], what)
            failure = _failure(error)
            outcome = failure.code or "error"
            with suppress(OSError, Disconnected):
                await exchange.fail(failure)
        finally:
            scope[LOGGED] = True
            app.num_open -= 1
            if not app.config.disable_log_requests:
                _requests.info("request", extra={"fields": self._line(exchange, outcome)})

    def _line(self, exchange: Exchange, outcome: str) -> dict[str, Any]:
        answers, now = exchange.answers, time.monotonic()
        fields = exchange.fields | {"outcome": outcome, "total_s": round(now - exchange.arrived, 6)}
        if exchange.first_token_s is not None:
            fields["first_token_s"] = round(exchange.first_token_s, 6)
        if answers:
            total = usage(answers)
            choices = [choice for answer in answers for choice in answer.choices]
            fields["prompt_tokens"], fields["completion_tokens"] = total.prompt_tokens, total.completion_tokens
            fields["cached_tokens"] = total.prompt_tokens_details.cached_tokens
            reasons = [choice.finish_reason for choice in choices]
            fields["finish_reasons"] = {str(reason): reasons.count(reason) for reason in dict.fromkeys(reasons)}
            if self._app.config.log_prompts:
                decoded = self._app.llm.tokenizer.decode
                fields["prompts"] = [
                    decoded(list(answer.request.prompt_token_ids), False) if answer.prompt is None else answer.prompt
                    for answer in answers
                ]
                fields["texts"] = ["".join(choice.texts) for choice in choices]
        return fields


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _draining() -> APIError:
    return APIError(
        503,
        "the server is shutting down",
        code="shutting_down",
        headers={"Connection": "close", "Retry-After": "5"},
    )


def _failure(error: Exception) -> APIError:
    """Any error as what the client is told. What was not raised on purpose goes to the log with its trace."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, InvalidRequest):
        return refused(error)
    if isinstance(error, Overloaded):
        return APIError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, PinRefused):
        return APIError(409, str(error), code="pin_refused")
    if isinstance(error, ConfigError):
        return APIError(400, str(error), param=error.option, code="invalid_value")
    if isinstance(error, EngineDead):
        return APIError(503, str(error), code="engine_dead", headers={"Retry-After": "5"})
    if isinstance(error, RequestFailed):
        return APIError(500, str(error), code="request_failed")
    _log.error("a request failed", exc_info=error)
    return APIError(500, "something went wrong in the server; its log says what", code="internal_error")


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, media_type="application/json")


async def _api_error(http: HTTPRequest, error: APIError) -> Response:
    return _json(error.body(), error.status, error.headers)


async def _http_error(http: HTTPRequest, error: HTTPException) -> Response:
    """Starlette's own: there is no such path, or it has no such method."""
    path = _shown(http.url.path)
    method = http.method[:20]
    message = {404: f"there is no {path}", 405: f"{path} does not take {method}"}.get(error.status_code, error.detail)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return _json(APIError(error.status_code, message, code=code).body(), error.status_code, dict(error.headers or {}))


async def _nobody(http: HTTPRequest, error: Disconnected) -> Response:
    return Response(status_code=499)  # goes nowhere


async def _unexpected(http: HTTPRequest, error: Exception) -> Response:
    return await _api_error(http, _failure(error))


# ── small parts ──────────────────────────────────────────────────────────────────────────────────────────────────


class _Watched:
    """Counts replies by their status, and logs requests to the small endpoints: one that generates has its own line."""

    def __init__(self, app: Any, metrics: Metrics, log: bool) -> None:
        self._app, self._metrics, self._log = app, metrics, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived, status = time.monotonic(), 0

        async def watching(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._metrics.responded(status)
            await send(message)

        await self._app(scope, receive, watching)
        path = scope["path"]
        if self._log and LOGGED not in scope and not (path in PROBES and status == 200):
            fields = {"path": _shown(path), "client": _client(scope), "status": status}
            fields["total_s"] = round(time.monotonic() - arrived, 6)
            _requests.info("request", extra={"fields": fields})


async def _unless_gone(work: Awaitable[T], receive: Receive, exchange: Exchange | None = None) -> T:
    """Run work to its end, or cancel it when the client goes. Raises Disconnected then."""
    working, going = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    if exchange is not None:
        exchange.gone = lambda: going.done() and not going.cancelled()
    try:
        await asyncio.wait((working, going), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Disconnected
        return await working
    finally:
        going.cancel()
        if not working.done():
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _merged(streams: Sequence[RequestStream[T]]) -> AsyncIterator[T]:
    """The items of several streams as they come."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield item
        return
    news: asyncio.Queue[T | Exception] = asyncio.Queue()

    async def pump(stream: RequestStream[T]) -> None:
        try:
            async for item in stream:
                news.put_nowait(item)
        except Exception as error:
            news.put_nowait(error)
        else:
            news.put_nowait(StopAsyncIteration())

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        num_open = len(streams)
        while num_open:
            match await news.get():
                case StopAsyncIteration():
                    num_open -= 1
                case Exception() as error:
                    raise error
                case item:
                    yield item
    finally:
        for task in tasks:
            task.cancel()


def _client(scope: Scope) -> str:
    return str((scope["client"] or ("",))[0])


def _shown(text: str) -> str:
    return text if len(text) <= 100 else text[:99] + "…"


def _constraint(body: GenerationRequest) -> Constraint | None:
    names = ("response_format", "structured_outputs", "allowed_token_ids", *LEGACY_FIELDS)
    return constraint(**{name: getattr(body, name) for name in names})


def _check_template(tokenizer: Tokenizer) -> None:
    """Raise ConfigError for a template that is none; one may well refuse this conversation."""
    try:
        tokenizer.render_chat([{"role": "user", "content": "a"}])
    except InvalidRequest as error:
        if isinstance(error.__cause__, TemplateSyntaxError):
            what = f"{error.__cause__} (line {error.__cause__.lineno})"
            raise ConfigError("chat_template", f"is no Jinja template: {what}") from error


def _cut_after(text: str, message: dict[str, Any]) -> str:
    """A rendered conversation up to the end of its last message's content, which the model is to continue.

    Raises InvalidRequest if the template changed the content beyond recognition.
    """
    content = message_text(message)
    start = text.rfind(content.strip())
    if not content.strip() or start < 0:
        raise InvalidRequest("messages", "the chat template does not keep the last message's text as it is")
    # blanks at the end stay if the template left them
    kept = content.lstrip()
    return text[: start + len(kept)] if text.startswith(kept, start) else text[: start + len(content.strip())]
