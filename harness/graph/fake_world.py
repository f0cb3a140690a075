"""A fake world: torch.distributed looks initialised as one rank of a program's world, so that passes can ask for groups
and ranks.

Nothing is communicated. Process groups are made once a (world size, rank, groups); entering a world puts a state of its
own in the place of c10d's, and its groups' names in the place of those registered. Leaving brings back whatever the
process had before, and forgets the groups that were made inside. c10d's state belongs to the process: a fake world is
not for several threads at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from harness.errors import Unsupported
from harness.graph.private import private
from harness.spec.program import Group

__all__ = ["WORLD_NAME", "fake_world", "group_ranks", "group_size"]

WORLD_NAME: Final = "world"

_C10D: Final = "torch.distributed.distributed_c10d"
_FAKE_PG: Final = "torch.testing._internal.distributed.fake_pg"
_DEVICES: Final = ("cpu", "cuda")
_MAPS: Final = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")
_MISSING: Final = (RuntimeError, ValueError, KeyError)


class _Made(NamedTuple):
    """A world's process groups, the default one first, and c10d's maps that know of them."""

    groups: tuple[tuple[str, Any], ...]
    maps: dict[str, dict[Any, Any]]
    group_count: int


@contextmanager
def fake_world(world_size: int, rank: int, groups: Sequence[Group] = ()) -> Iterator[None]:
    """Inside, ``torch.distributed`` answers as rank ``rank`` of ``world_size``, and the groups' names resolve.

    The default group is the first that covers all ranks in order, else one called ``world`` (or ``world_1``, ... where
    that name is taken). A group of which ``rank`` is no member is not registered. Worlds may stand inside each other.

    Raises:
        ValueError: ``rank`` is not a rank of the world.
        Unsupported: the installed torch has no fake process groups, or keeps its state elsewhere.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank}; must be from 0 to {world_size - 1}")
    made = _make_world(world_size, rank, tuple(groups))
    c10d = private("torch.distributed", "distributed_c10d")
    outer, state = _current_world(), _state(made)
    shadowed = {name: group for group, name in outer.pg_names.items() if _registered(name) is group}
    try:
        for name in shadowed:
            c10d._unregister_process_group(name)
        c10d._world = state
        for name, group in made.groups:
            _register(name, group, shadowed)
        yield
    finally:
        c10d._world = outer
        for name in {*shadowed, *(name for name, _ in made.groups), *state.pg_names.values()}:
            with suppress(*_MISSING):
                c10d._unregister_process_group(name)
        for name, group in shadowed.items():
            c10d._register_process_group(name, group)


def group_size(name: str) -> int | None:
    """The number of ranks in the process group of that name, as the process is now; None where there is none."""
    group = _registered(name)
    return None if group is None else int(group.size())


def group_ranks(name: str) -> tuple[int, ...] | None:
    """The ranks, counted in the default group, of the process group of that name; None where there is none."""
    group = _registered(name)
    return None if group is None else tuple(dist.get_process_group_ranks(group))


def _current_world() -> Any:
    c10d = private("torch.distributed", "distributed_c10d")
    if not hasattr(c10d, "_world"):
        raise Unsupported(f"{_C10D}._world", None, f"torch {torch.__version__} lacks it")
    return c10d._world


def _registered(name: str) -> Any:
    try:
        return private(_C10D, "_resolve_process_group")(name)
    except _MISSING:
        return None


def _register(name: str, group: Any, shadowed: dict[str, Any]) -> None:
    """Register a name; whoever held it, unknown to c10d's maps, gets it back later."""
    register = private(_C10D, "_register_process_group")
    holder = None
    try:
        register(name, group)
    except _MISSING:
        holder = _registered(name)
        if holder is None:
            raise
    if holder is not None:
        shadowed[name] = holder
        private(_C10D, "_unregister_process_group")(name)
        register(name, group)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise Unsupported(
        "a process group with a backend of its own", None, "a fake world has fake groups only; leave out backend="
    )


@lru_cache(maxsize=1)
def _store() -> Any:
    """What the members of a real group would meet at: nobody is there, so a real backend is refused and never waits."""
    methods = (
        "set",
        "get",
        "add",
        "wait",
        "check",
        "compare_set",
        "delete_key",
        "num_keys",
        "append",
        "multi_get",
        "multi_set",
    )
    return type("NoStore", (private("torch.distributed", "Store"),), dict.fromkeys(methods, _refuse))()


@lru_cache(maxsize=1)
def _state_class() -> type[Any]:
    """c10d's own class of states, its maps being the instance's and no longer the module's."""
    return type("FakeWorldState", (private(_C10D, "_World"),), dict.fromkeys((*_MAPS, "group_count")))


def _state(made: _Made) -> Any:
    state = _state_class()()
    for name in _MAPS:
        setattr(state, name, dict(made.maps[name]))
    state.tags_to_pg = {tag: list(groups) for tag, groups in state.tags_to_pg.items()}
    state.group_count = made.group_count
    state.default_pg = made.groups[0][1]
    return state


@lru_cache(maxsize=4096)
def _make_world(world_size: int, rank: int, groups: tuple[Group, ...]) -> _Made:
    if not dist.is_available():
        raise Unsupported("torch.distributed", None, "the installed torch was built without it")
    whole = tuple(range(world_size))
    default = next((g.name for g in groups if g.parts == (whole,)), None) or _unused({g.name for g in groups})
    parts = {default: whole, **{g.name: part for g in groups for part in g.parts if rank in part}}
    made = tuple((name, _make_group(name, part, rank, name == default)) for name, part in parts.items())
    store = _store()
    maps: dict[str, dict[Any, Any]] = {name: {} for name in _MAPS}
    for name, group in made:
        tag = f"ptd:{name}"
        maps["pg_map"][group] = ("fake", store)
        maps["pg_names"][group] = name
        maps["pg_group_ranks"][group] = {member: i for i, member in enumerate(parts[name])}
        maps["pg_backend_config"][group] = ",".join(f"{device}:fake" for device in _DEVICES)
        maps["pg_to_tag"][group] = tag
        maps["tags_to_pg"].setdefault("", []).append(group)
        maps["tags_to_pg"][tag] = [group]
    return _Made(made, maps, 1 + max((int(name) for name in parts if name.isdecimal()), default=-1))


def _unused(taken: set[str]) -> str:
    name, number = WORLD_NAME, 0
    while name in taken:
        number += 1
        name = f"{WORLD_NAME}_{number}"
    return name


def _make_group(name: str, part: tuple[int, ...], rank: int, is_default: bool) -> Any:
    """A process group of ``part`` that moves nothing, as its member ``rank`` has it."""
    index, size = part.index(rank), len(part)
    private(_FAKE_PG, "FakeProcessGroup")  # the module registers the backend
    fake = private("torch._C._distributed_c10d", "FakeProcessGroup")
    try:
        group: Any = dist.ProcessGroup(_store(), index, size)
        custom = dist.ProcessGroup.BackendType.CUSTOM
        group._set_default_backend(custom)
        backend = fake._create_internal(index, size, fake.Options())
        for device in _DEVICES:
            group._register_backend(torch.device(device), custom, backend)
        group._set_group_name(name)
        group._set_group_desc("default_pg" if is_default else name)
    except (AttributeError, TypeError) as error:
        raise Unsupported(
            "fake process groups", None, f"torch {torch.__version__} makes them in another way ({error})"
        ) from None
    return group
