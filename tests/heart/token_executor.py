"""An executor whose "KV" is the tokens themselves, so that any paging fault is seen at once.

Each page is a list of slots; computing a token writes (position, token) into its slot. Every slot that a slice attends
to must hold exactly the sequence's own tokens. The next token is a hash of all tokens read back from the pages, so a
wrong page changes the answer even if the check were blind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from octavo.types import Draw, Sampled, Slice, SliceResult, StepPlan, StepResult


class TokenExecutor:
    def __init__(self, num_pages: int, block_size: int, vocab_size: int, *, seed: int = 0) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.seed = seed
        self.pages: list[list[tuple[int, int] | None]] = [[None] * block_size for _ in range(num_pages)]
        self.num_computed = 0
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        for op in plan.page_ops:
            self.pages[op.dst] = list(self.pages[op.src])
        for piece in plan.slices:
            for offset, token in enumerate(piece.token_ids):
                position = piece.start + offset
                if position >= piece.write_start:
                    page = piece.pages[position // self.block_size]
                    self.pages[page][position % self.block_size] = (position, token)
                self.num_computed += 1
        return StepResult([self._result(piece) for piece in plan.slices])

    def read(self, piece: Slice) -> list[int]:
        stop = piece.start + len(piece.token_ids)
        tokens = []
        for position in range(stop):
            slot = self.pages[piece.pages[position // self.block_size]][position % self.block_size]
            assert slot is not None and slot[0] == position, f"position {position} of {piece.seq_id} holds {slot}"
            tokens.append(slot[1])
        assert tokens[piece.start :] == list(piece.token_ids)
        return tokens

    def _result(self, piece: Slice) -> SliceResult:
        tokens = self.read(piece)
        scored = tuple(Sampled(target, -1.0, 1, ()) for target in piece.targets)
        return SliceResult([self.choose(tokens, draw) for draw in piece.draws], scored)

    def choose(self, tokens: Sequence[int], draw: Draw) -> Sampled:
        assert list(tokens) == list(draw.token_ids)
        seed = draw.seed if not draw.params.greedy else 0
        if draw.params.use_beam_search:
            ranked = sorted(range(self.vocab_size), key=lambda token: self._hash(tokens, 0, token))
            top = [(token, -1.0 - 0.25 * rank) for rank, token in enumerate(ranked)]
            return Sampled(*top[0], 1, top[: draw.num_top])
        token = self._hash(tokens, seed, 0) % self.vocab_size
        return Sampled(token, -1.0, 1, ())

    def _hash(self, tokens: Sequence[int], seed: int, salt: int) -> int:
        text = f"{self.seed} {seed} {salt} {list(tokens)}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
