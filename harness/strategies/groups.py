"""Partitions of ranks into groups."""

from __future__ import annotations

from functools import lru_cache

from hypothesis import strategies as st

from harness.spec.program import Group

__all__ = ["group_lists", "partitions"]


@lru_cache(maxsize=None)
def partitions(world_size: int) -> tuple[Group, ...]:
    """Partitions of ``world_size`` ranks into equal parts, each in the two ways a mesh has: rows and columns.

    The first is the whole world; the last are singletons.
    """
    groups = [Group("world", (tuple(range(world_size)),))]
    for size in range(world_size - 1, 0, -1):
        if world_size % size:
            continue
        rows = tuple(tuple(range(start, start + size)) for start in range(0, world_size, size))
        groups.append(Group(f"rows{size}", rows))
        step = world_size // size
        if 1 < size:
            groups.append(Group(f"columns{size}", tuple(tuple(range(first, world_size, step)) for first in range(step))))
    return tuple(groups)


@lru_cache(maxsize=None)
def group_lists(world_size: int) -> st.SearchStrategy[tuple[Group, ...]]:
    """Lists of groups, the whole world first; several may cross. Shrinks towards the world alone."""
    all_groups = partitions(world_size)
    others = all_groups[1:]
    if not others:
        return st.just(all_groups)
    chosen = [()] + [(g,) for g in others] + [(a, b) for a in others for b in others if a is not b]
    return st.sampled_from([(all_groups[0], *extra) for extra in chosen])
