"""What an operator may set of the server; the engine's own knobs are EngineConfig's. Validated once, here."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The server's knobs, named as its flags with underscores.

    host: address to listen on; 0.0.0.0 is every network the machine is on.
    port: port to listen on; 0 takes a free one.
    uds: listen on this Unix socket instead.
    ssl_certfile: certificate chain, for HTTPS.
    ssl_keyfile: its private key.
    ssl_ca_certs: certificates that sign clients' certificates.
    ssl_cert_reqs: clients' certificates; 0 asks for none, 1 checks those that come, 2 requires one.
    allowed_origins: origin whose web pages may call, or *; may be given again, or as a JSON list.
    served_model_name: name in the API, in place of MODEL; may be given again.
    chat_template: Jinja file to use in place of the model's own template.
    max_logprobs: most log-probabilities a request may ask for at each token.
    api_key: key that clients must send; may be given again. OCTAVO_API_KEY in the environment is one more.
    admin_api_key: key that sees every key's sessions, and alone may save. OCTAVO_ADMIN_API_KEY stands in for it.
    share_prefixes: let one key's requests find prompts that another key's left in the cache.
    max_body_bytes: largest body of a request.
    max_prompts_per_request: prompts in one request.
    max_queued_requests: prompts waiting for their first step; further ones are answered 429.
    max_connections: clients connected at once; further ones are answered 503.
    header_timeout: seconds a client has to send a request's head.
    body_timeout: seconds it has to send the body.
    timeout_keep_alive: seconds a connection may be idle between requests.
    drain_timeout: seconds that running requests get to finish after SIGTERM.
    step_timeout: seconds the engine may take for one step; it is then ended as if it had crashed. 0 is for ever.
    disable_log_requests: log no line for each request.
    log_prompts: put prompts and answers into those lines.
    metrics_namespace: first part of the names at /metrics; vllm suits dashboards made for it.
    no_ui: serve no page at /ui; what it shows is still there at /v1/cache/map.
    ui_show_text: let a client that looks at a page of its own read the text in it; an administrator, of any.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    allowed_origins: Sequence[str] = ()
    served_model_name: Sequence[str] = ()
    chat_template: str | None = None
    max_logprobs: int = 20
    api_key: Sequence[str] = ()
    admin_api_key: str | None = None
    share_prefixes: bool = False
    max_body_bytes: int = 16 << 20
    max_prompts_per_request: int = 256
    max_queued_requests: int = 1024
    max_connections: int = 4096
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    timeout_keep_alive: float = 5.0
    drain_timeout: float = 30.0
    step_timeout: float = 300.0
    disable_log_requests: bool = False
    log_prompts: bool = False
    metrics_namespace: str = "octavo"
    no_ui: bool = False
    ui_show_text: bool = False

    def __post_init__(self) -> None:
        origins: list[str] = []
        for text in self.allowed_origins:
            origins += _origins(text)
        object.__setattr__(self, "allowed_origins", tuple(origins))
        for name in ("served_model_name", "api_key"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if not all(isinstance(text, str) and text.strip() for text in getattr(self, name)):
                raise ConfigError(name, "must not be empty")
        if self.admin_api_key is not None and not self.admin_api_key.strip():
            raise ConfigError("admin_api_key", "must not be empty")
        if self.admin_api_key in self.api_key:
            raise ConfigError("admin_api_key", "must not be one of the API keys")
        _within("port", self.port, 0, 65535)
        _within("ssl_cert_reqs", self.ssl_cert_reqs, 0, 2)
        _within("max_logprobs", self.max_logprobs, 0, 1024)
        _within("max_body_bytes", self.max_body_bytes, 1024, 1 << 40)
        _within("max_prompts_per_request", self.max_prompts_per_request, 1, 1 << 20)
        _within("max_queued_requests", self.max_queued_requests, 1, 1 << 30)
        _within("max_connections", self.max_connections, 1, 1 << 20)
        _within("header_timeout", self.header_timeout, 0.1, 86400)
        _within("body_timeout", self.body_timeout, 0.1, 86400)
        _within("timeout_keep_alive", self.timeout_keep_alive, 0, 86400)
        _within("drain_timeout", self.drain_timeout, 0, 86400)
        _within("step_timeout", self.step_timeout, 0, 86400)
        for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "chat_template"):
            if (path := getattr(self, name)) is not None and not os.path.isfile(path):
                raise ConfigError(name, f"there is no file {path}")
        if self.ssl_certfile is None and (self.ssl_keyfile is not None or self.ssl_ca_certs is not None):
            raise ConfigError("ssl_certfile", "is missing: HTTPS needs a certificate")
        self.ssl_context()

    def ssl_context(self) -> ssl.SSLContext | None:
        """For HTTPS; None for HTTP. Raises ConfigError."""
        if self.ssl_certfile is None:
            return None
        import ssl  # takes a moment, which the other commands need not wait

        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password=lambda: b"")
        except (OSError, ssl.SSLError) as error:
            raise ConfigError("ssl_certfile", f"cannot be used with its key: {error}") from error
        if self.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(self.ssl_ca_certs)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError("ssl_ca_certs", f"cannot be used: {error}") from error
        context.verify_mode = ssl.VerifyMode(self.ssl_cert_reqs)
        return context

    def template(self) -> str | None:
        """The text of `chat_template`. Raises ConfigError."""
        if self.chat_template is None:
            return None
        try:
            return Path(self.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("chat_template", f"cannot be read: {error}") from error


def _origins(text: str) -> list[str]:
    if not text.lstrip().startswith("["):
        return [text]
    try:
        value: Any = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError("allowed_origins", f"must be an origin or a JSON list of them, got {text[:60]!r}")
    return value


def _within(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not math.isfinite(value) or not low <= value <= high:
        raise ConfigError(name, f"must be from {low:g} to {high:g}, got {value!r}")
