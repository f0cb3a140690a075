"""Process groups as the ranks of one program call them, put together to partitions of all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from harness.spec.program import Group

__all__ = ["GroupFold", "Members"]

Members = Callable[[int, str], tuple[int, ...]]
"""The ranks of the group that a rank calls by a name; KeyError where the rank has none of that name."""

_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_.-]")


class GroupFold:
    """Collects groups statement by statement.

    Ranks that run one statement together each name a group; their parts make one partition. Two parts belong to the
    same partition where some statement uses both; groups of equal parts under different names stay apart. Numbers stand
    for partitions until ``groups`` gives them their names.
    """

    def __init__(self, world_size: int, given: Sequence[Group] | Members) -> None:
        self._given = None if callable(given) else tuple(given)
        self._members = given if callable(given) else _members_of(given)
        self._world_size = world_size
        self._folds: list[dict[tuple[int, ...], str]] = []

    def split(self, names: Mapping[int, str]) -> Iterator[dict[int, str]]:
        """The ranks of ``names`` parted so that those together have parts that are equal under one name, or disjoint.

        Raises:
            KeyError: a rank has no group of that name.
        """
        classes: list[tuple[dict[tuple[int, ...], str], dict[int, str]]] = []
        for rank, name in names.items():
            part = self._members(rank, name)
            found = next((c for c in classes if _fits(c[0], {part: name})), None)
            if found is None:
                found = ({}, {})
                classes.append(found)
            found[0][part] = name
            found[1][rank] = name
        yield from (ranks for _, ranks in classes)

    def number(self, names: Mapping[int, str]) -> int:
        """The partition that the ranks of ``names`` use together; they come from ``split``."""
        parts = {self._members(rank, name): name for rank, name in names.items()}
        if self._given is not None:
            name = next(iter(names.values()))
            return next(i for i, group in enumerate(self._given) if group.name == name)
        fitting = [
            i for i, fold in enumerate(self._folds) if _fits(fold, parts) and any(part in fold for part in parts)
        ]
        best = next((i for i in fitting if parts.keys() <= self._folds[i].keys()), fitting[0] if fitting else None)
        if best is None:
            best = len(self._folds)
            self._folds.append({})
        self._folds[best].update(parts)
        return best

    def groups(self) -> tuple[Group, ...]:
        """The partitions by number; a name that stands twice, or cannot stand in a Program, gets another."""
        if self._given is not None:
            return self._given
        result: list[Group] = []
        taken: set[str] = set()
        for fold in self._folds:
            wanted = _NOT_IN_NAMES.sub("_", next(iter(fold.values())))[:56] or "group"
            name, number = wanted, 0
            while name in taken:
                number += 1
                name = f"{wanted}_{number}"
            taken.add(name)
            result.append(Group(name, tuple(sorted(fold))))
        return tuple(result)


def _members_of(groups: Sequence[Group]) -> Members:
    by_name = {group.name: group for group in groups}

    def members(rank: int, name: str) -> tuple[int, ...]:
        for part in by_name[name].parts:
            if rank in part:
                return part
        raise KeyError(name)

    return members


def _fits(fold: Mapping[tuple[int, ...], str], parts: Mapping[tuple[int, ...], str]) -> bool:
    """Whether all parts are equal to one of ``fold`` under the same name, or disjoint from all of them."""
    held = {rank: part for part in fold for rank in part}
    for part, name in parts.items():
        if part in fold:
            if fold[part] != name:
                return False
        elif any(rank in held for rank in part):
            return False
    return True
