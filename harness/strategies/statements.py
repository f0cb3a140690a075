"""What the statements of a tape mean: collectives alone and in runs, waits, ops between them, what is returned.

A statement is ``WIDTH`` bytes; zeros mean the simplest of its kind, so that lowering a byte gives a simpler program. The first byte
is the action; a statement for which the program has no operand, room or dtype adds nothing. Collectives share a *key* (kind, group,
reduce op, dtype) until a statement changes it, so that there is something to bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from harness.spec.meta import TensorMeta
from harness.spec.program import DTypeArg, Group, Program, TensorSpec
from harness.strategies.builder import Builder, Flight, Options, Value
from harness.strategies.operands import cast_targets, is_number, is_numeric, pick
from harness.strategies.operators import add_operator, add_write
from harness.strategies.starts import (
    DERIVATIONS,
    PREPARATIONS,
    ROOM,
    Key,
    derived,
    existing_operand,
    is_reducible,
    new_operand,
    settled,
    start,
    start_coalesced,
)
from harness.strategies.tensors import Table

__all__ = ["HEADER", "WIDTH", "read_tape"]

WIDTH: Final = 8
"""The bytes of a statement."""

HEADER: Final = 5 + WIDTH
"""The bytes of a header: kind, reduce op, dtype and group of the first key, whether what is in flight at the end stays so; and a
statement to open with, which is a collective or a run of them."""

_NEW: Final = 144
_SAME_KEY: Final = 160
_LOST: Final = 236


class _State:
    """The program so far, the key that collectives have, and the copies that are left for the end."""

    def __init__(self, builder: Builder, key: Key) -> None:
        self.builder = builder
        self.key = key
        self.epilogue: list[bytes] = []


class _Run(NamedTuple):
    """One run: how many collectives, what differs between them, when they are waited for."""

    num_starts: int
    mode: str
    order: str


_COUNTS: Final[Table[int]] = Table((1, 1), (2, 40), (3, 32), (4, 16))
_MODES: Final[Table[str]] = Table(
    ("same", 7),
    ("casts", 6),
    ("dtypes", 6),
    ("one_operand", 3),
    ("chain", 4),
    ("groups", 6),
    ("coalesced", 2),
    ("computed", 3),
)
_ORDERS: Final[Table[str]] = Table(("each", 6), ("all", 6), ("reversed", 2), ("later", 4))
_POSTS: Final[Table[str]] = Table(("return", 20), ("cast", 4), ("compute", 2), ("view", 2), ("fan", 3), ("clone", 1), ("nothing", 2))
"""What becomes of the result of a collective, once it was waited for."""


def _often(choices: Sequence[str], byte: int, least: int = 96) -> str:
    """A choice, the simplest for the lowest bytes; the first for ``least`` of 256 bytes at least."""
    return choices[0] if byte < least or len(choices) == 1 else choices[1 + (byte - least) * (len(choices) - 1) // (256 - least)]


def read_tape(world_size: int, groups: tuple[Group, ...], options: Options, header: bytes, tape: Sequence[bytes]) -> Program:
    """The program that a tape stands for.

    Args:
        world_size: the number of ranks.
        groups: for collectives; those that none uses are left out of the program.
        options: see ``collective_programs``.
        header: ``HEADER`` bytes.
        tape: statements of ``WIDTH`` bytes each.
    """
    builder = Builder(world_size, groups, options)
    kind, reduce_op, dtype = _often(options.kinds, header[0], 160), _often(options.reduce_ops, header[1]), _often(options.dtypes, header[2])
    key = Key(kind, groups[header[3] % len(groups)], reduce_op, dtype)
    state = _State(builder, key)
    _OPENINGS[header[5]](state, header[5:])
    for statement in tape:
        _ACTIONS[statement[0]](state, statement)
    if not builder.ops:
        _collective(state, bytes(WIDTH))
    if header[4] >= _LOST:
        for flight in builder.flights:
            flight.is_lost = True
    for flight in [f for f in builder.flights if not f.is_lost]:
        _wait(builder, flight)
    for statement in state.epilogue:
        _copy_into_input(builder, statement)
    return builder.program()


def _collective(state: _State, s: bytes) -> None:
    """Bytes: 1 operand (new, or a value), 2 shape, 3 another key, 4 preparation, 5 when to wait, 6 what becomes of it, 7 form."""
    b = state.builder
    key = settled(b, state.key if s[3] < _SAME_KEY else _other_key(b, state.key, s[3], s[7]))
    if key is None or b.num_collectives >= b.options.max_collectives or not b.has_room(ROOM):
        return
    x = None if s[1] < _NEW else existing_operand(b, key, s[1], _NEW, DERIVATIONS[s[4]])
    if x is None:
        x = new_operand(b, key, s[2], PREPARATIONS[s[4]], s[7])
    flight = start(b, key, x, s[7], post=_POSTS[s[6]], is_lost=s[5] >= _LOST)
    if s[5] < 128:
        _wait(b, flight)


def _other_key(b: Builder, key: Key, what: int, byte: int) -> Key:
    if what < 184:
        return key._replace(dtype=b.options.dtypes[byte % len(b.options.dtypes)])
    if what < 208:
        return key._replace(group=b.groups[byte % len(b.groups)])
    if what < 236:
        return key._replace(kind=b.options.kinds[byte % len(b.options.kinds)])
    return key._replace(reduce_op=b.options.reduce_ops[byte % len(b.options.reduce_ops)])


def _run(state: _State, s: bytes) -> None:
    """Bytes: 1 how many, 2 first shape, 3 step from shape to shape, 4 what differs, 5 when to wait, 6 what becomes of it, 7 form."""
    b = state.builder
    run = _Run(_COUNTS[s[1]], _MODES[s[4]], _ORDERS[s[5]])
    if run.mode == "coalesced" and state.key.kind in ("all_gather", "reduce_scatter", "all_reduce"):
        _coalesced(b, state.key, run.num_starts, s)
        return
    flights: list[Flight] = []
    x: Value | None = None
    for i in range(run.num_starts):
        key = settled(b, _key_in_run(b, state.key, run.mode, i, s[7]))
        if key is None or b.num_collectives >= b.options.max_collectives or not b.has_room(ROOM):
            break
        if x is not None and key.fits(x.meta):
            x = derived(b, key, x, DERIVATIONS[s[3]] if run.mode == "chain" else "none")
        else:
            is_narrowed = run.mode == "casts" and not key.reduces
            x = new_operand(b, key, (s[2] + i * s[3]) % 256, "narrowed" if is_narrowed else "plain", s[7])
        flight = start(b, key, x, s[7] if run.mode == "same" else 0, post=_post_in_run(key, run, i, s[6]))
        if run.mode != "one_operand":
            x = None
        if run.order == "each" or run.mode == "chain":
            results = _wait(b, flight)
            x = results[0] if run.mode == "chain" else x
        else:
            flights.append(flight)
        if run.mode == "computed" and b.has_room(ROOM):
            add_operator(b, bytes((0, 48, (s[7] + 37 * i) % 256, s[2], s[6], s[5], s[4], 0)))
    if run.order != "later":
        for flight in reversed(flights) if run.order == "reversed" else flights:
            _wait(b, flight)


def _post_in_run(key: Key, run: _Run, i: int, byte: int) -> str:
    if run.mode == "casts" and key.reduces:
        return "cast"
    return "return" if run.mode == "chain" and i + 1 < run.num_starts else _POSTS[byte]


def _key_in_run(b: Builder, key: Key, mode: str, i: int, byte: int) -> Key:
    """The key of collective ``i`` of a run; a chain goes from gather to scatter where it may."""
    options = b.options
    if mode == "dtypes":
        at = options.dtypes.index(key.dtype) + i * (1 + byte % 4)
        dtypes = [d for d in options.dtypes if not key.reduces or is_reducible(d, key.reduce_op)]
        return key._replace(dtype=dtypes[at % len(dtypes)]) if dtypes else key
    if mode == "groups":
        return key._replace(group=b.groups[(b.groups.index(key.group) + i) % len(b.groups)])
    if mode == "chain" and byte >= 128:
        return key._replace(kind=options.kinds[(options.kinds.index(key.kind) + i) % len(options.kinds)])
    return key


def _coalesced(b: Builder, key: Key, count: int, s: bytes) -> None:
    settled_key = settled(b, key)
    if settled_key is None or b.num_collectives >= b.options.max_collectives or not b.has_room(1 + count):
        return
    operands = [new_operand(b, settled_key, (s[2] + i * s[3]) % 256, "plain", s[7]) for i in range(count)]
    flight = start_coalesced(b, settled_key, operands, post=_POSTS[s[6]])
    if s[5] < 128:
        _wait(b, flight)


def _wait(b: Builder, flight: Flight) -> list[Value]:
    results = b.wait(flight)
    for result in results:
        _afterwards(b, result, flight.post)
    return results


def _afterwards(b: Builder, x: Value, post: str) -> None:
    """What becomes of a collective's result, where there is room."""
    if post == "nothing":
        x.is_dead = True
    if post in ("return", "nothing") or not b.has_room(3):
        return
    if post == "cast":
        dtypes = cast_targets(b, x.meta.dtype)
        widest = "float32" if "float32" in dtypes else dtypes[0] if dtypes else None
        if widest is not None:
            b.read("prims.convert_element_type.default", x, DTypeArg(widest))
    elif post == "compute" and is_numeric(x.meta):
        b.read("aten.add.Tensor", x, 1)
    elif post == "view":
        b.read("aten.reshape.default", x, (x.meta.numel,))
    elif post == "fan" and is_number(x.meta):
        b.read("aten.neg.default", x)
        b.read("aten.relu.default", x)
        b.read("aten.unsqueeze.default", x, 0)
    elif post == "clone":
        b.read("aten.clone.default", x)


def _wait_now(state: _State, s: bytes) -> None:
    b = state.builder
    flight = pick([f for f in b.flights if not f.is_lost], s[1])
    if flight is not None:
        _wait(b, flight)


def _wait_again(state: _State, s: bytes) -> None:
    b = state.builder
    finished = pick(b.finished(), s[1])
    if finished is not None and b.has_room():
        again = b.wait_again(finished[0])
        again.is_dead = s[2] >= 208


def _nothing(state: _State, s: bytes) -> None:
    """What a statement shrinks to."""


def _operator(state: _State, s: bytes) -> None:
    add_operator(state.builder, s)


def _write(state: _State, s: bytes) -> None:
    if state.builder.options.writes:
        add_write(state.builder, s)
    else:
        state.epilogue.append(s)


def _give_back(state: _State, s: bytes) -> None:
    """Return a start beside its wait, or any value once more."""
    b = state.builder
    start_and_wait = pick(b.waited, s[1]) if s[2] < 112 else None
    value = pick(b.readable(), s[1])
    if start_and_wait is not None:
        b.returned += start_and_wait
    elif value is not None:
        b.returned.append(value)


def _change_key(state: _State, s: bytes) -> None:
    options, groups = state.builder.options, state.builder.groups
    state.key = Key(_often(options.kinds, s[1]), groups[s[4] % len(groups)], _often(options.reduce_ops, s[2]), _often(options.dtypes, s[3]))


def _copy_into_input(b: Builder, s: bytes) -> None:
    """A copy of a value into an input, the way a functional graph puts a mutation back at its end; a new input where none is like it."""
    source = pick([v for v in b.readable() if v.op >= 0], s[1]) if b.has_room() else None
    if source is None:
        return
    meta = source.meta

    def takes(target: TensorMeta) -> bool:
        return target.shape == meta.shape and target.dtype == meta.dtype and target.storage != meta.storage

    target = pick([v for v in b.writable(takes) if v.op < 0 and v.item is None], s[2])
    b.write("aten.copy_.default", target if target is not None else b.add_input(TensorSpec(meta.shape, meta.dtype)), source)


_Action = Callable[[_State, bytes], None]
_ACTIONS: Final[Table[_Action]] = Table(
    (_nothing, 1),
    (_collective, 80),
    (_run, 55),
    (_operator, 50),
    (_wait_now, 18),
    (_wait_again, 9),
    (_write, 16),
    (_give_back, 9),
    (_change_key, 14),
)

_OPENINGS: Final[Table[_Action]] = Table((_nothing, 1), (_collective, 10), (_run, 30))
