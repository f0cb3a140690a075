"""A Program as one of its ranks sees it, where ranks differ in constants, sizes of groups, or statements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from harness.errors import InvalidProgram, Unsupported
from harness.ops import infer_program
from harness.spec.program import Group, GroupArg, Op, PerRank, Program, Ref

__all__ = ["arguments", "is_uniform", "rank_metas"]

_OP_PATH: Final = re.compile(r"^\$\.ops\[(\d+)\]")


def arguments(op: Op) -> Iterator[Any]:
    """Every argument of ``op``, those in lists one by one."""
    for arg in (*op.args, *op.kwargs.values()) if op.kwargs else op.args:
        if isinstance(arg, tuple):
            yield from arg
        else:
            yield arg


def is_uniform(program: Program) -> bool:
    """Whether all ranks run the same statements with the same constants and sizes of groups."""
    return not program.divergent and not any(isinstance(arg, PerRank) for op in program.ops for arg in arguments(op))


def rank_metas(program: Program, rank: int) -> list[Any]:
    """The metadata of every value as ``rank`` has it; None for those it does not compute.

    Storages are numbered as ``infer_program`` numbers them, by rank.

    Raises:
        InvalidProgram: a precondition is broken on this rank, with the path of the op.
        Unsupported: the rank uses a value that it does not compute, or a group that it is no member of.
    """
    own = {g.name: Group(g.name, (part,)) for g in program.groups for part in g.parts if rank in part}
    numbers = {i: i for i in range(len(program.inputs))}
    kept: list[int] = []
    ops: list[Op] = []
    for i, op in enumerate(program.ops):
        if op.ranks is not None and rank not in op.ranks:
            continue
        path = f"$.ops[{i}]"
        args = tuple(_seen(arg, rank, numbers, own, path) for arg in op.args)
        ops.append(Op(op.target, args, {k: _seen(v, rank, numbers, own, path) for k, v in op.kwargs.items()}, place=op.place))
        numbers[len(program.inputs) + i] = len(program.inputs) + len(kept)
        kept.append(i)
    try:
        metas: Sequence[Any] = infer_program(
            Program(program.world_size, tuple(own.values()), program.inputs, tuple(ops), ())
        )
    except InvalidProgram as error:
        path = _OP_PATH.sub(lambda m: f"$.ops[{kept[int(m.group(1))]}]", error.path)
        raise InvalidProgram(path, f"{error.reason} (on rank {rank})") from None
    values = range(len(program.inputs) + len(program.ops))
    return [metas[numbers[v]] if v in numbers else None for v in values]


def _seen(arg: Any, rank: int, numbers: Mapping[int, int], own: Mapping[str, Group], path: str) -> Any:
    if isinstance(arg, tuple):
        return tuple(_seen(a, rank, numbers, own, path) for a in arg)
    if isinstance(arg, PerRank):
        return arg.values[rank]
    if isinstance(arg, Ref):
        if arg.value not in numbers:
            raise Unsupported(f"value {arg.value}", path, f"rank {rank} does not compute it, yet uses it")
        return Ref(numbers[arg.value], arg.item)
    if isinstance(arg, GroupArg) and arg.name not in own:
        raise Unsupported(f"group {arg.name!r}", path, f"rank {rank} is no member, yet uses it")
    return arg
