"""Collectives: what is issued, in which order, and what happens while they are in flight."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

from harness.oracles.evidence import Evidence
from harness.spec.outcome import CollectiveRecord, RankOutcome
from harness.spec.verdict import Reason

__all__ = ["caps_respected", "collectives_conserved", "in_flight", "order_kept", "ranks_agree"]

_PADDING_BYTES = 16


def in_flight(e: Evidence) -> list[Reason]:
    """Between its start and its wait nobody reads or writes a collective's output, or writes its input."""
    for rank, old, new in _ranks(e):
        if new.in_flight and not old.in_flight:
            flight = new.in_flight[0]
            what = {"read_output": "reads the output", "write_output": "writes the output", "write_input": "writes the input"}
            message = f"{flight.node} {what[flight.access]} of {flight.collective} in flight, on rank {rank}"
            return [
                Reason("in_flight", "FAIL", flight.access, message, rank=rank, node=flight.node, expected=f"a wait on {flight.collective} first")
            ]
    return []


def ranks_agree(e: Evidence) -> list[Reason]:
    """All ranks issue the same collectives in the same order, as they did before."""
    if not e.after or any(len({_sequence(r) for r in o.ranks}) > 1 for o in e.before[:1]):
        return []
    ranks = e.after[0].ranks
    first = _sequence(ranks[0])
    for rank, outcome in enumerate(ranks[1:], 1):
        if outcome.error is None and ranks[0].error is None and _sequence(outcome) != first:
            at = next((i for i, (a, b) in enumerate(zip(first, _sequence(outcome), strict=False)) if a != b), len(first))
            message = f"ranks 0 and {rank} part at collective {at}"
            return [Reason("ranks_agree", "FAIL", "order", message, rank=rank, expected=str(first[at : at + 1]), seen=str(_sequence(outcome)[at : at + 1]))]
    return []


def collectives_conserved(e: Evidence) -> list[Reason]:
    """No collective is lost or duplicated: for each kind, group and reduce op as many bytes go in as before, but for padding where some were merged."""
    for rank, old, new in _ranks(e):
        before, after = _totals(old), _totals(new)
        for key in sorted({*before, *after}, key=str):
            (num_before, bytes_before), (num_after, bytes_after) = before[key], after[key]
            allowed = bytes_before + _PADDING_BYTES * (num_before - num_after)
            if num_after > num_before or not bytes_before <= bytes_after <= allowed:
                kind = "lost" if bytes_after < bytes_before else "duplicated"
                seen, expected = (f"{count} of {size} bytes in all" for count, size in (after[key], before[key]))
                message = f"{' '.join(str(k) for k in key if k)}: {seen} on rank {rank}, {expected} before"
                return [Reason("collectives_conserved", "FAIL", kind, message, rank=rank, expected=expected, seen=seen)]
    return []


def order_kept(e: Evidence) -> list[Reason]:
    """Within each group and kind the collectives come in the order they had before: each new one takes a run of old ones.

    Judged by sizes: where the order is kept, the running totals of the new sequence are among those of the old. Sequences
    with padding have other totals and are left out.
    """
    for rank, old, new in _ranks(e):
        before, after = _sizes(old), _sizes(new)
        for key, sizes in after.items():
            if sum(sizes) != sum(before.get(key, ())):
                continue
            totals = set(accumulate(before[key]))
            for position, total in enumerate(accumulate(sizes)):
                if total not in totals:
                    message = f"{key[0]} on group {key[1]!r}, rank {rank}: sizes {before[key]} became {sizes}, which is no run of them in order"
                    return [Reason("order_kept", "FAIL", "order", message, rank=rank, index=str(position), expected=str(before[key]), seen=str(sizes))]
    return []


def caps_respected(e: Evidence) -> list[Reason]:
    """A bucket of several collectives is no larger than the cap, larger of input and output counted."""
    if e.caps_bytes is None:
        return []
    largest_cap = max(e.caps_bytes(i) for i in range(64))
    for rank, old, new in _ranks(e):
        single = {_size(c, e) for c in old.collectives}
        for collective in new.collectives:
            size = _size(collective, e)
            if size > largest_cap and size not in single:
                message = f"{collective.node} on rank {rank} is a bucket of {size} bytes; the cap is {largest_cap}"
                return [Reason("caps_respected", "FAIL", "over_cap", message, rank=rank, node=collective.node, seen=str(size), allowed=str(largest_cap))]
    return []


def _ranks(e: Evidence) -> list[tuple[int, RankOutcome, RankOutcome]]:
    if not e.before:
        return []
    pairs = zip(e.before[0].ranks, e.after[0].ranks, strict=True)
    return [(r, old, new) for r, (old, new) in enumerate(pairs) if old.error is None and new.error is None]


def _sequence(outcome: RankOutcome) -> tuple[tuple[object, ...], ...]:
    return tuple((c.kind, c.group, c.reduce_op, c.dtypes, c.num_bytes if c.kind != "all_to_all" else 0) for c in outcome.collectives)


def _totals(outcome: RankOutcome) -> dict[tuple[str, str, str | None], tuple[int, int]]:
    """How many collectives and how many bytes, by kind, group and reduce op; a coalesced one counts once."""
    totals: dict[tuple[str, str, str | None], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for c in outcome.collectives:
        count, size = totals[c.kind, c.group, c.reduce_op]
        totals[c.kind, c.group, c.reduce_op] = (count + 1, size + c.num_bytes)
    return totals


def _sizes(outcome: RankOutcome) -> dict[tuple[str, str], list[int]]:
    sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
    for c in outcome.collectives:
        if c.num_bytes:
            sizes[c.kind, c.group].append(c.num_bytes)
    return sizes


def _size(collective: CollectiveRecord, e: Evidence) -> int:
    if collective.kind == "all_gather":
        return collective.num_bytes * e.program.group(collective.group).size
    return collective.num_bytes
