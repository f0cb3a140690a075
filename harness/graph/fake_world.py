"""A fake world: torch.distributed looks initialised as one rank of a program's world, so that passes can ask for groups and ranks.

Nothing is communicated. Process groups are made once a (world size, rank, groups); switching sets c10d's default group and its
registry of names. Whatever the process had before comes back on leaving.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from harness.errors import Unsupported
from harness.spec.program import Group

__all__ = ["WORLD_NAME", "fake_world"]

WORLD_NAME = "world"


@lru_cache(maxsize=None)
def _probe() -> type[Any]:
    """The class of fake process groups, and a look at every private name that is used here."""
    missing = [name for name in ("_world", "_register_process_group", "_unregister_process_group", "_resolve_process_group") if not hasattr(c10d, name)]
    if not dist.is_available() or missing:
        raise Unsupported("torch.distributed", None, f"the installed torch lacks {', '.join(missing) or 'it'}")
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend

    return dist.ProcessGroup


@lru_cache(maxsize=4096)
def _groups(world_size: int, rank: int, groups: tuple[Group, ...]) -> tuple[tuple[str, Any], ...]:
    """This rank's process group of each name, the default group first."""
    whole = tuple(range(world_size))
    named = {g.name: next((p for p in g.parts if rank in p), None) for g in groups}
    default = next((g.name for g in groups if g.parts == (whole,)), WORLD_NAME)
    named = {default: whole, **named}
    return tuple((name, _make(name, part, rank)) for name, part in named.items() if part is not None)


def _make(name: str, part: tuple[int, ...], rank: int) -> Any:
    store = dist.HashStore()
    group = dist.ProcessGroup(store, part.index(rank), len(part))
    backend = _fake_backend(part.index(rank), len(part))
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_group_name(name)
    c10d._world.pg_map[group] = ("fake", store)
    c10d._world.pg_names[group] = name  # type: ignore[assignment]
    c10d._world.pg_group_ranks[group] = {r: i for i, r in enumerate(part)}
    c10d._world.pg_backend_config[group] = "cpu:fake"
    c10d._world.pg_to_tag[group] = f"ptd:{name}"
    return group


def _fake_backend(rank: int, size: int) -> Any:
    from torch._C._distributed_c10d import FakeProcessGroup

    return FakeProcessGroup._create_internal(rank, size, FakeProcessGroup.Options())


@contextmanager
def fake_world(world_size: int, rank: int, groups: Sequence[Group] = ()) -> Iterator[None]:
    """Inside, ``torch.distributed`` answers as rank ``rank`` of ``world_size``, and the groups' names resolve.

    The default group is the first that covers all ranks in order, else one called ``world``.

    Raises:
        Unsupported: the installed torch has no fake process groups, or keeps its state elsewhere.
    """
    _probe()
    ours = _groups(world_size, rank, tuple(groups))
    before = c10d._world.default_pg
    shadowed: list[tuple[str, Any]] = []
    for name, group in ours:
        try:
            shadowed.append((name, c10d._resolve_process_group(name)))  # type: ignore[arg-type]
            c10d._unregister_process_group(name)  # type: ignore[arg-type]
        except (RuntimeError, ValueError):
            pass
        c10d._register_process_group(name, group)  # type: ignore[arg-type]
    c10d._world.default_pg = ours[0][1]
    try:
        yield
    finally:
        c10d._world.default_pg = before
        for name, _ in ours:
            c10d._unregister_process_group(name)  # type: ignore[arg-type]
        for name, group in shadowed:
            c10d._register_process_group(name, group)  # type: ignore[arg-type]
