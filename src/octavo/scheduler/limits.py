"""What an engine can ever serve. Plain numbers, so that a request may be refused far from the engine that has them."""

from __future__ import annotations

from array import array
from collections import abc
from typing import Any, NamedTuple

from octavo.errors import InvalidRequest, RequestTooLarge
from octavo.types import Request

MAX_PRIORITY = 2**31 - 1


class Limits(NamedTuple):
    """Lengths in tokens; `num_pages` pages of `block_size` tokens are all there is."""

    max_model_len: int
    vocab_size: int
    num_pages: int
    block_size: int

    def check(self, request: Request) -> int:
        """The most tokens the request may generate. Raises InvalidRequest or RequestTooLarge."""
        params, ids = request.params, request.prompt_token_ids
        if not len(ids):
            raise InvalidRequest("prompt", "is empty: give at least one token")
        priority, length = request.priority, len(ids)
        if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > MAX_PRIORITY:
            raise InvalidRequest(
                "priority", f"must be a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}, got {priority!r}"
            )
        if length >= self.max_model_len:
            raise RequestTooLarge(
                "prompt",
                f"has {length} tokens, and a context of {self.max_model_len} must also hold an answer: "
                "shorten it or raise max_model_len",
            )
        for field, tokens in {
            "prompt": ids,
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": params.logit_bias or (),
        }.items():
            self.check_ids(field, tokens)
        for field, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if (count or 0) > self.vocab_size:
                raise InvalidRequest(field, f"{count} is more than the {self.vocab_size} tokens of the vocabulary")

        # the last sampled token's KV is never needed, so a pool of N slots holds a prompt and an answer of N + 1 tokens
        most = min(self.max_model_len - length, self.num_pages * self.block_size + 1 - length)
        wanted = params.max_tokens
        if wanted is not None and length + wanted > self.max_model_len:
            raise RequestTooLarge(
                "max_tokens",
                f"{length} prompt tokens and {wanted} more exceed the context of {self.max_model_len}: "
                f"ask for at most {self.max_model_len - length}, or raise max_model_len",
            )
        if most < (wanted or 1):
            needed = -(-(length + (wanted or 1) - 1) // self.block_size)
            raise RequestTooLarge(
                "prompt" if most < 1 else "max_tokens",
                f"prompt and answer need {needed} pages and the pool has {self.num_pages}: "
                "lower max_tokens, shorten the prompt, or raise kv_cache_memory_bytes",
            )
        return most if wanted is None else wanted

    def check_ids(self, field: str, tokens: abc.Collection[Any]) -> None:
        """Raise InvalidRequest unless all are token ids."""
        whole = isinstance(tokens, array) and tokens.typecode == "i"
        if whole and tokens and min(tokens) >= 0 and max(tokens) < self.vocab_size:
            return  # two passes in C instead of one here
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                raise InvalidRequest(field, f"{token!r} is not a token id from 0 to {self.vocab_size - 1}")
