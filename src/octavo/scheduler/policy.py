"""Choices that are a matter of policy, each a pure function."""

from __future__ import annotations

from collections import abc

from octavo.scheduler.sequence import Sequence


def victim(running: abc.Iterable[Sequence], needy: Sequence) -> Sequence:
    """Who gives its pages up to `needy`: of those served last by priority, the one with the least computed.

    So the least work is at stake, be it computed or copied again. Nobody gives way to one that comes later in order of
    (priority, arrival, choice), and `needy` not if it is the first: that one finishes, so everyone does. Who came back
    from a preemption is spared until it has got a token further, if there is anyone else, so that no pages go to and
    fro for nothing. Of equals the latest goes.
    """
    in_order = sorted(running, key=lambda seq: seq.key)
    later = [seq for seq in in_order if seq.key > needy.key or (seq is needy and needy is not in_order[0])] or [needy]
    lowest = max(seq.group.priority for seq in later)
    last = [seq for seq in later if seq.group.priority == lowest]
    last = [seq for seq in last if not seq.protected] or last
    return min(reversed(last), key=lambda seq: seq.num_computed)


def fair_shares(wanted: abc.Sequence[int], budget: int) -> list[int]:
    """Divide a token budget: whoever gets less than they want gets no less than anyone else (remainders apart).

    A short prompt is thus served whole beside a long one, and the long one still advances every step.
    """
    shares = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    for done, place in enumerate(order):
        shares[place] = min(wanted[place], -(-budget // (len(order) - done)))
        budget -= shares[place]
    return shares
