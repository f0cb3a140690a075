"""The process groups of a Program on a real rank: made once for each set of members, found by the names that its graph uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch.distributed as dist

from harness.graph.private import private
from harness.spec.program import Group

__all__ = ["named_groups"]

_C10D: Final = "torch.distributed.distributed_c10d"
_MADE: Final[dict[tuple[int, ...], Any]] = {}


@contextmanager
def named_groups(groups: Sequence[Group], rank: int) -> Iterator[None]:
    """Inside, each group's name resolves to the process group of the part that ``rank`` is in.

    All members of a part must come here in the same order of groups; the first time they make it together.
    """
    register, unregister = private(_C10D, "_register_process_group"), private(_C10D, "_unregister_process_group")
    shadowed: dict[str, Any] = {}
    named: list[str] = []
    try:
        for group in groups:
            part = next((part for part in group.parts if rank in part), None)
            if part is None:
                continue
            found = _process_group(part)
            holder = _resolved(group.name)
            if holder is found:
                continue
            if holder is not None:
                shadowed[group.name] = holder
                unregister(group.name)
            register(group.name, found)
            named.append(group.name)
        yield
    finally:
        for name in named:
            with suppress(RuntimeError):
                unregister(name)
        for name, holder in shadowed.items():
            register(name, holder)


def _process_group(part: tuple[int, ...]) -> Any:
    if part == tuple(range(dist.get_world_size())):
        return dist.group.WORLD
    if part not in _MADE:
        _MADE[part] = dist.new_group(list(part), use_local_synchronization=True)
    return _MADE[part]


def _resolved(name: str) -> Any:
    try:
        return private(_C10D, "_resolve_process_group")(name)
    except (RuntimeError, ValueError, KeyError):
        return None
