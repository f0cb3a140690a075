"""From a program on which all ranks agree to one on which they do not."""

from __future__ import annotations

from typing import Any, Final

from harness.ops import TABLE, CollectiveSpec
from harness.spec.program import Arg, Group, GroupArg, Op, Program, Ref
from harness.strategies.tensors import Table

__all__ = ["DIVERGENCE", "SIZELESS_KINDS", "diverge", "needs_sizeless"]

DIVERGENCE: Final = 4
"""The bytes that choose a divergence: which, at which collective, which rank, which alternative."""

SIZELESS_KINDS: Final = ("all_reduce", "broadcast")
"""The collectives whose results do not depend on how many ranks a part has; those that uneven groups can have."""

_WAIT: Final = "_c10d_functional.wait_tensor.default"
_WAYS: Final[Table[str]] = Table(("left_out", 4), ("swapped", 4), ("other_op", 3), ("partial", 3), ("unequal", 3))
_REDUCE_OPS: Final = ("sum", "max", "min", "product")


def needs_sizeless(tape: bytes) -> bool:
    """Whether these bytes ask for an uneven group, so that the program should have ``SIZELESS_KINDS`` alone."""
    return _WAYS[tape[0]] in ("partial", "unequal")


def diverge(program: Program, tape: bytes) -> Program:
    """``program``, marked divergent, with the divergence that ``tape`` asks for where the program has a collective for it.

    Args:
        program: on which all ranks agree; with ``SIZELESS_KINDS`` alone where ``needs_sizeless``.
        tape: ``DIVERGENCE`` bytes.
    """
    starts = [i for i, op in enumerate(program.ops) if TABLE[op.target].collective is not None]
    if not starts:
        return _changed(program, program.ops, program.outputs)
    at = starts[-1 - tape[1] % len(starts)]
    way = _WAYS[tape[0]]
    if way in ("partial", "unequal"):
        return _with_uneven_group(program, _group_of(program, program.ops[at]), tape[2], unequal=way == "unequal")
    absent = program.world_size - 1 - tape[2] % program.world_size
    others = tuple(r for r in range(program.world_size) if r != absent)
    left = _only_on(program, [at], others)
    if way == "left_out" or not _stands_alone(program.ops[at]):
        return left
    if way == "swapped":
        later = [i for i in starts if i > at]
        place = at + 1 if not later else later[0] + (not TABLE[program.ops[later[0]].target].writes)
        return _inserted(left, place, _on(program.ops[at], (absent,)))
    return _inserted(left, at + 1, _on(_altered(program.ops[at], tape[3]), (absent,)))


def _changed(program: Program, ops: tuple[Op, ...], outputs: tuple[Ref, ...], groups: tuple[Group, ...] | None = None) -> Program:
    return Program(program.world_size, program.groups if groups is None else groups, program.inputs, ops, outputs, True)


def _collective(op: Op) -> CollectiveSpec:
    spec = TABLE[op.target].collective
    assert spec is not None
    return spec


def _group_of(program: Program, op: Op) -> Group:
    group = op.args[_collective(op).group]
    assert isinstance(group, GroupArg)
    return program.group(group.name)


def _stands_alone(op: Op) -> bool:
    """Whether the collective has one operand and a result of its own, so that it can be issued once more."""
    spec = _collective(op)
    return not spec.coalesced and spec.out is None and not TABLE[op.target].writes


def _only_on(program: Program, roots: list[int], ranks: tuple[int, ...]) -> Program:
    """The program with the ops ``roots`` and all that depends on them run by ``ranks`` alone, and no output for them."""
    if not ranks:
        return _changed(program, program.ops, program.outputs)
    missing: set[int] = set()
    ops = list(program.ops)
    for i, op in enumerate(ops):
        if i in roots or any(ref.value in missing for ref in _refs(op)):
            missing.add(len(program.inputs) + i)
            ops[i] = _on(op, ranks)
    return _changed(program, tuple(ops), tuple(r for r in program.outputs if r.value not in missing))


def _on(op: Op, ranks: tuple[int, ...]) -> Op:
    return Op(op.target, op.args, op.kwargs, ranks)


def _refs(op: Op) -> list[Ref]:
    found = []
    for arg in (*op.args, *op.kwargs.values()):
        found += [item for item in (arg if isinstance(arg, tuple) else (arg,)) if isinstance(item, Ref)]
    return found


def _inserted(program: Program, place: int, op: Op) -> Program:
    """The program with a collective, and its wait, put in at ``place``."""
    first = len(program.inputs) + place

    def moved(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return Ref(arg.value + 2, arg.item) if arg.value >= first else arg
        return tuple(moved(a) for a in arg) if isinstance(arg, tuple) else arg

    later = [
        Op(o.target, tuple(moved(a) for a in o.args), {k: moved(v) for k, v in o.kwargs.items()}, o.ranks) for o in program.ops[place:]
    ]
    wait = Op(_WAIT, (Ref(first),), ranks=op.ranks)
    outputs = tuple(moved(r) for r in program.outputs)
    return _changed(program, (*program.ops[:place], op, wait, *later), outputs)


def _altered(op: Op, byte: int) -> Op:
    """The collective with another reduce op, or a broadcast where it reduces nothing, or one from another source."""
    spec = _collective(op)
    args: list[Arg] = list(op.args)
    if spec.reduce_op is not None:
        choices = [o for o in _REDUCE_OPS if o != args[spec.reduce_op]]
        args[spec.reduce_op] = choices[byte % len(choices)]
        return Op(op.target, tuple(args))
    group = args[spec.group]
    if spec.kind == "broadcast":
        return Op("aten.clone.default", (args[0],))
    return Op("_c10d_functional.broadcast.default", (args[0], 0, group))


def _with_uneven_group(program: Program, group: Group, byte: int, *, unequal: bool) -> Program:
    """The program with another partition in place of ``group``: parts of unequal size, or without one rank.

    Broadcasts on it come from the first rank of a part; the rank that is left out runs nothing that depends on the group.
    """
    on_group = [i for i, op in enumerate(program.ops) if TABLE[op.target].collective is not None and _group_of(program, op) == group]
    if any(_collective(program.ops[i]).kind not in SIZELESS_KINDS for i in on_group):
        return _changed(program, program.ops, program.outputs)
    parts = _unequal_parts(group) if unequal else _parts_without(group, byte % program.world_size)
    members = tuple(sorted(rank for part in parts for rank in part))
    ops = list(program.ops)
    for i in on_group:
        if _collective(ops[i]).kind == "broadcast":
            ops[i] = Op(ops[i].target, (ops[i].args[0], 0, *ops[i].args[2:]), ops[i].kwargs)
    groups = tuple(Group(g.name, parts) if g == group else g for g in program.groups)
    whole = _changed(program, tuple(ops), program.outputs, groups)
    return whole if len(members) == program.world_size else _only_on(whole, on_group, members)


def _unequal_parts(group: Group) -> tuple[tuple[int, ...], ...]:
    """The last rank of the last part moves to the first part; where there is one part alone, into a part of its own."""
    *others, last = group.parts
    moved, rest = last[-1], last[:-1]
    parts = (tuple(sorted((*others[0], moved))), *others[1:], rest) if others else (rest, (moved,))
    return tuple(part for part in parts if part)


def _parts_without(group: Group, rank: int) -> tuple[tuple[int, ...], ...]:
    parts = tuple(tuple(r for r in part if r != rank) for part in group.parts)
    return tuple(part for part in parts if part) or group.parts
