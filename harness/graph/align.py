"""Sequences of several ranks side by side: what is common becomes one row, in an order that keeps each rank's own."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Sequence

__all__ = ["align"]


def align(sequences: Sequence[Sequence[Hashable]]) -> list[dict[int, int]]:
    """Rows of ``{rank: index}``; every index of every rank stands in one row, equal items of different ranks share rows
    where they can.

    Equal sequences take linear time; a common beginning and end is never searched.
    """
    rows: list[tuple[Hashable, dict[int, int]]] = []
    for rank, items in enumerate(sequences):
        rows = _merged(rows, items, rank)
    return [row for _, row in rows]


def _merged(
    rows: list[tuple[Hashable, dict[int, int]]], items: Sequence[Hashable], rank: int
) -> list[tuple[Hashable, dict[int, int]]]:
    keys = [key for key, _ in rows]
    shortest = min(len(keys), len(items))
    head = next((i for i in range(shortest) if keys[i] != items[i]), shortest)
    rest = shortest - head
    tail = next((i for i in range(rest) if keys[-1 - i] != items[-1 - i]), rest)
    keys_end, items_end = len(keys) - tail, len(items) - tail
    matcher = difflib.SequenceMatcher(None, keys[head:keys_end], list(items[head:items_end]), autojunk=False)
    merged = [(key, {**row, rank: i}) for i, (key, row) in enumerate(rows[:head])]
    for tag, a0, a1, b0, b1 in matcher.get_opcodes():
        ours = rows[head + a0 : head + a1]
        if tag == "equal":
            merged.extend((key, {**row, rank: head + b0 + k}) for k, (key, row) in enumerate(ours))
        else:
            merged.extend(ours)
            merged.extend((items[b], {rank: b}) for b in range(head + b0, head + b1))
    merged.extend((key, {**row, rank: items_end + i}) for i, (key, row) in enumerate(rows[keys_end:]))
    return merged
