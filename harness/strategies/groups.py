"""Partitions of ranks into groups."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from hypothesis import strategies as st

from harness.spec.program import Group

__all__ = ["GROUPS", "group_lists", "groups_from", "partitions"]

_MAX_ENUMERATED: Final = 6
_MAX_EXTRA: Final = 3
_TWIN: Final = "_twin"
_OFTEN: Final = 144

GROUPS: Final = 1 + _MAX_EXTRA
"""The bytes that choose a list of groups."""


@lru_cache(maxsize=None)
def partitions(world_size: int) -> tuple[Group, ...]:
    """Partitions of ``world_size`` ranks into equal parts.

    First the whole world, then the axes of every mesh of these ranks (``rows``: neighbours; ``columns``: as far apart as can be;
    ``strided``: in between), then, for six ranks or fewer, all other partitions (``mixed``). Then those of the same ranks once
    more, under another name: another communicator. The last are singletons.
    """
    found: dict[tuple[tuple[int, ...], ...], str] = {(tuple(range(world_size)),): "world"}
    for size in range(world_size - 1, 1, -1):
        if world_size % size:
            continue
        for step in (s for s in range(1, world_size // size + 1) if (world_size // size) % s == 0):
            name = f"rows{size}" if step == 1 else f"columns{size}" if step * size == world_size else f"strided{size}x{step}"
            found.setdefault(_strided(world_size, size, step), name)
        if world_size <= _MAX_ENUMERATED:
            for i, parts in enumerate(_equal_parts(tuple(range(world_size)), size)):
                found.setdefault(parts, f"mixed{size}_{i}")
    groups = [Group(name, parts) for parts, name in found.items()]
    singletons = [Group("rows1", tuple((rank,) for rank in range(world_size)))] if world_size > 1 else []
    twins = [Group(group.name + _TWIN, group.parts) for group in (*groups[:3], *singletons)]
    return (*groups, *twins, *singletons)


def _strided(world_size: int, size: int, step: int) -> tuple[tuple[int, ...], ...]:
    """Parts of ``size`` ranks, ``step`` apart."""
    block = size * step
    return tuple(
        tuple(range(start + first, start + block, step)) for start in range(0, world_size, block) for first in range(step)
    )


def _equal_parts(ranks: tuple[int, ...], size: int) -> list[tuple[tuple[int, ...], ...]]:
    """All partitions of ``ranks`` into parts of ``size``, each part and the parts in ascending order."""
    if not ranks:
        return [()]
    result = []
    for others in _choices(ranks[1:], size - 1):
        rest = tuple(r for r in ranks[1:] if r not in others)
        result += [((ranks[0], *others), *parts) for parts in _equal_parts(rest, size)]
    return result


def _choices(ranks: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    if count == 0:
        return [()]
    return [(r, *more) for i, r in enumerate(ranks) for more in _choices(ranks[i + 1 :], count - 1)]


def groups_from(world_size: int, tape: bytes) -> tuple[Group, ...]:
    """The groups that ``GROUPS`` bytes of a tape ask for: the world, and up to three others, all different."""
    world, *others = partitions(world_size)
    parted = [g for g in others if 1 < g.size < world_size and not g.name.endswith(_TWIN)]
    groups = [world]
    for byte in tape[1 : 1 + tape[0] * GROUPS // 256]:
        among = parted if parted and byte < _OFTEN else others
        if among and among[byte % len(among)] not in groups:
            groups.append(among[byte % len(among)])
    return tuple(groups)


@lru_cache(maxsize=None)
def group_lists(world_size: int) -> st.SearchStrategy[tuple[Group, ...]]:
    """Up to four different groups of ``world_size`` ranks, the whole world first; several may cross. Shrinks towards the world alone."""
    return st.binary(min_size=GROUPS, max_size=GROUPS).map(lambda tape: groups_from(world_size, tape))
