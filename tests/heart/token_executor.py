"""An executor whose "KV" is the tokens themselves, so that any paging fault is seen at once.

Each page is a list of slots; computing a token writes (position, token) into its slot. Every slot that a slice attends
to must hold exactly the sequence's own tokens. The next token is a hash of all tokens read back from the pages, so a
wrong page changes the answer even if the check were blind.

Moves take `delay` plans, or a random number up to it, and read their source only when they end, as a copying thread
may: a source that was written meanwhile gives a wrong page. Every `fail_every`th fails and leaves garbage.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterable, Sequence

from octavo.types import (
    AwaitMove,
    CopyPage,
    Draw,
    Moved,
    MovePage,
    PageLabel,
    PageOp,
    Place,
    Sampled,
    Slice,
    SliceResult,
    StepPlan,
    StepResult,
    Tier,
)

Content = list[tuple[int, int] | None]
MOVE_S = 0.001


class TokenExecutor:
    def __init__(
        self,
        num_pages: int,
        block_size: int,
        vocab_size: int,
        *,
        seed: int = 0,
        delay: int = 0,
        fail_every: int = 0,
        random_delay: bool = False,
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.seed = seed
        self.contents: dict[Place, Content] = {}
        self.labels: dict[int, PageLabel] = {}  # of what lies on disk
        self.num_computed = 0
        self.plans: list[StepPlan] = []
        self.delay, self.random_delay, self.fail_every = delay, random_delay, fail_every
        self.num_moves = 0
        self.closed = False
        self._random = random.Random(seed)
        self._under_way: deque[tuple[MovePage, int]] = deque()
        self._ended: list[Moved] = []

    def begin(self, page_ops: Iterable[PageOp]) -> None:
        for op in page_ops:
            match op:
                case CopyPage(src, dst):
                    self.contents[Place(Tier.DEVICE, dst)] = list(self.page(src))
                case MovePage():
                    assert (op.target.tier is Tier.DISK) == (op.label is not None)
                    due = self._random.randint(0, self.delay) if self.random_delay else self.delay
                    self._under_way.append((op, due))
                case AwaitMove(number):
                    while any(move.number == number for move, _ in self._under_way):
                        self._end_move()

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.begin(plan.page_ops)
        for piece in plan.slices:
            for offset, token in enumerate(piece.token_ids):
                position = piece.start + offset
                if position >= piece.write_start:
                    page = piece.pages[position // self.block_size]
                    self.page(page)[position % self.block_size] = (position, token)
                self.num_computed += 1
        results = [self._result(piece) for piece in plan.slices]
        while self._under_way and self._under_way[0][1] <= 0:
            self._end_move()
        self._under_way = deque((move, due - 1) for move, due in self._under_way)
        if plan.wait and not self._ended and self._under_way:
            self._end_move()
        moved, self._ended = self._ended, []
        return StepResult(results, moved)

    def close(self) -> None:
        assert not self._under_way
        self.closed = True

    def page(self, page: int) -> Content:
        return self.contents.setdefault(Place(Tier.DEVICE, page), [None] * self.block_size)

    def _end_move(self) -> None:
        move, _ = self._under_way.popleft()
        self.num_moves += 1
        ok = not self.fail_every or self.num_moves % self.fail_every != 0
        self.contents[move.target] = list(self.contents[move.source]) if ok else [(-1, -1)] * self.block_size
        if move.label is not None:
            self.labels.pop(move.target.page, None)
            if ok:
                self.labels[move.target.page] = move.label
        self._ended.append(Moved(move.number, ok, MOVE_S))

    def read(self, piece: Slice) -> list[int]:
        stop = piece.start + len(piece.token_ids)
        tokens = []
        for position in range(stop):
            slot = self.page(piece.pages[position // self.block_size])[position % self.block_size]
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
