"""Starting collectives: what a key asks for, operands that fit, and every form in which torch has the collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from harness.spec.dtypes import DTYPES
from harness.spec.meta import TensorMeta
from harness.spec.program import DTypeArg, Group, GroupArg, PerRank, TensorSpec, contiguous_stride, storage_numel
from harness.strategies.builder import MAX_NUMEL, Builder, Flight, Value
from harness.strategies.operands import cast_targets, is_number, pick
from harness.strategies.tensors import Table, laid_out, shape_from

__all__ = [
    "DERIVATIONS",
    "KINDS",
    "PREPARATIONS",
    "REDUCE_OPS",
    "ROOM",
    "Key",
    "derived",
    "existing_operand",
    "is_reducible",
    "new_operand",
    "settled",
    "start",
    "start_coalesced",
]

KINDS: Final = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
"""The kinds of collectives, in the order in which programs prefer them."""

REDUCE_OPS: Final = ("sum", "avg", "max", "min", "product")
"""The reduce ops, the simplest first."""

ROOM: Final = 5
"""The ops that one collective may take: two for its operand, memory for its result, itself, its wait."""

_C10D: Final = "_c10d_functional."
_NARROW: Final = ("bfloat16", "float16")
_WIDE: Final = ("float32", "float64")
_OFTEN: Final = 224

PREPARATIONS: Final[Table[str]] = Table(
    ("plain", 30),
    ("narrow", 1),
    ("narrowed", 9),
    ("flat", 3),
    ("clone", 2),
    ("rows", 3),
    ("offset", 3),
    ("transposed", 3),
    ("gaps", 2),
    ("part", 3),
    ("twin", 4),
)
"""How a new operand comes about."""

DERIVATIONS: Final[Table[str]] = Table(("none", 12), ("view", 4), ("transpose", 4), ("cast", 4), ("compute", 4), ("clone", 3))
"""What is done to a value before a collective reads it."""


class Key(NamedTuple):
    """What collectives must agree on to share a bucket; ``reduce_op`` counts only where the kind reduces."""

    kind: str
    group: Group
    reduce_op: str
    dtype: str

    @property
    def reduces(self) -> bool:
        """Whether the collective computes."""
        return self.kind in ("all_reduce", "reduce_scatter")

    @property
    def has_rows(self) -> bool:
        """Whether it needs a first dimension."""
        return self.kind in ("all_gather", "reduce_scatter", "all_to_all")

    @property
    def divides_rows(self) -> bool:
        """Whether it divides the first dimension among the ranks of a part."""
        return self.kind in ("reduce_scatter", "all_to_all")

    def fits(self, meta: TensorMeta) -> bool:
        """Whether a tensor can be its operand, once it is contiguous."""
        if self.has_rows and not meta.shape or meta.numel * self.group.size > MAX_NUMEL * 4:
            return False
        if self.divides_rows and meta.shape[0] % self.group.size:
            return False
        return not self.reduces or is_reducible(meta.dtype, self.reduce_op)


def is_reducible(dtype: str, reduce_op: str) -> bool:
    """Whether a collective may reduce this dtype with this op."""
    kind = DTYPES[dtype].kind
    return not dtype.startswith("float8") and kind != "bool" and (reduce_op != "avg" or kind == "float")


def settled(b: Builder, key: Key) -> Key | None:
    """The key, with another reduce op or dtype where its own do not go together; None where the options have none that do."""
    if not key.reduces or is_reducible(key.dtype, key.reduce_op):
        return key
    for reduce_op in b.options.reduce_ops:
        if is_reducible(key.dtype, reduce_op):
            return key._replace(reduce_op=reduce_op)
    for dtype in b.options.dtypes:
        if is_reducible(dtype, key.reduce_op):
            return key._replace(dtype=dtype)
    return None


def existing_operand(b: Builder, key: Key, byte: int, least: int, derivation: str) -> Value | None:
    """A value that fits, the newest for byte ``least``, or what ``derivation`` makes of it, contiguous; None where there is none.

    Adds two ops at most.
    """
    found = pick(b.readable(key.fits), byte, least)
    return None if found is None else derived(b, key, found, derivation)


def derived(b: Builder, key: Key, x: Value, derivation: str) -> Value:
    """What one of ``DERIVATIONS`` makes of a value that fits, contiguous; the value itself where the result would not fit."""
    meta = x.meta
    if derivation == "view":
        x = b.read("aten.reshape.default", x, (meta.shape[0], meta.numel // meta.shape[0]) if meta.shape and meta.numel else (*meta.shape, 1))
    elif derivation == "transpose" and len(meta.shape) >= 2:
        first = 1 if len(meta.shape) > 2 else 0
        turned = meta._replace(shape=(*meta.shape[:first], *reversed(meta.shape[first : first + 2]), *meta.shape[first + 2 :]))
        x = b.read("aten.transpose.int", x, first, first + 1) if key.fits(turned) else x
    elif derivation == "cast":
        dtypes = [d for d in cast_targets(b, meta.dtype) if not key.reduces or is_reducible(d, key.reduce_op)]
        x = b.read("prims.convert_element_type.default", x, DTypeArg(dtypes[0])) if dtypes else x
    elif derivation == "compute" and is_number(meta):
        x = b.read("aten.mul.Tensor", x, 2)
    elif derivation == "clone":
        x = b.read("aten.clone.default", x)
    return _contiguous(b, x)


def _contiguous(b: Builder, value: Value) -> Value:
    return value if value.meta.is_contiguous else b.read("aten.clone.default", value, memory_format="contiguous_format")


def new_operand(b: Builder, key: Key, shape_byte: int, preparation: str, choice: int) -> Value:
    """A new input, or something made of one with at most two ops, that fits and is contiguous.

    Args:
        b: the program so far.
        key: what it must fit.
        shape_byte: see ``shape_from``; for a scatter, the shape of a result.
        preparation: one of ``PREPARATIONS``.
        choice: a byte, chooses offsets and bases.
    """
    shape = shape_from(shape_byte, least_ndim=int(key.has_rows))
    if key.divides_rows:
        shape = (shape[0] * key.group.size, *shape[1:])
    if preparation in ("narrow", "narrowed"):
        return _narrowed(b, key, shape, is_cast=preparation == "narrowed")
    if preparation == "flat":
        x = b.add_input(TensorSpec(shape, key.dtype))
        return b.read("aten.reshape.default", x, (x.meta.numel,))
    if preparation == "clone":
        return b.read("aten.clone.default", b.add_input(TensorSpec(shape, key.dtype)))
    if preparation == "rows" and shape:
        x = b.add_input(TensorSpec((shape[0] + 1, *shape[1:]), key.dtype))
        return _contiguous(b, b.read("aten.slice.Tensor", x, 0, 1, shape[0] + 1))
    if preparation in ("part", "twin"):
        return b.add_input(_shared(b, key, shape, choice, is_twin=preparation == "twin"))
    if preparation in ("offset", "transposed", "gaps"):
        return _contiguous(b, b.add_input(laid_out(shape, key.dtype, preparation, choice)))  # type: ignore[arg-type]
    return b.add_input(TensorSpec(shape, key.dtype))


def _narrowed(b: Builder, key: Key, shape: tuple[int, ...], *, is_cast: bool) -> Value:
    """An input cast to a narrower float, as FSDP does before it gathers parameters, or an input of that dtype.

    A plain input where the options have no two floats.
    """
    dtypes = b.options.dtypes
    wide = key.dtype if key.dtype in _WIDE else next((d for d in _WIDE if d in dtypes), None)
    narrow = key.dtype if key.dtype in _NARROW else next((d for d in _NARROW if d in dtypes), None)
    if wide is None or narrow is None or key.dtype not in (wide, narrow):
        return b.add_input(TensorSpec(shape, key.dtype))
    if not is_cast:
        return b.add_input(TensorSpec(shape, narrow))
    return b.read("prims.convert_element_type.default", b.add_input(TensorSpec(shape, wide)), DTypeArg(narrow))


def _shared(b: Builder, key: Key, shape: tuple[int, ...], choice: int, *, is_twin: bool) -> TensorSpec:
    """An input in the storage of another: all of it (a twin), or a contiguous part; one of its own where none will do."""
    if is_twin:
        twins = b.bases(lambda _, meta: meta.is_contiguous and key.fits(meta))
        if twins:
            at = twins[-1 - choice * len(twins) // 256]
            spec = b.inputs[at]
            return TensorSpec(spec.shape, spec.dtype, spec.stride, spec.storage_offset, view_of=at)
    needed = storage_numel(shape, contiguous_stride(shape))
    bases = b.bases(lambda spec, meta: spec.dtype == key.dtype and _held(meta) >= needed)
    if not bases:
        return TensorSpec(shape, key.dtype)
    base = bases[-1 - choice * len(bases) // 256]
    free = _held(b.input_values[base].meta) - needed
    return TensorSpec(shape, key.dtype, storage_offset=choice % (free + 1), view_of=base)


def _held(meta: TensorMeta) -> int:
    """The elements that the storage of an input has."""
    return storage_numel(meta.shape, meta.stride, meta.offset)


def start(b: Builder, key: Key, x: Value, variant: int, *, post: str = "return", is_lost: bool = False) -> Flight:
    """Start a collective of kind, group and reduce op ``key`` on ``x``.

    Args:
        b: the program so far.
        key: for which ``x`` fits.
        x: readable and contiguous.
        variant: a byte; high ones ask for forms with splits, in place or into given memory. It also chooses a broadcast's source.
        post, is_lost: see ``Flight``.
    """
    size, group = key.group.size, GroupArg(key.group.name)
    rest: tuple[Any, ...]
    if key.kind == "all_gather":
        target, rest = "all_gather_into_tensor", (size, group)
    elif key.kind == "reduce_scatter":
        target, rest = "reduce_scatter_tensor", (key.reduce_op, size, group)
    elif key.kind == "all_reduce":
        target, rest = "all_reduce", (key.reduce_op, group)
    elif key.kind == "broadcast":
        target, rest = "broadcast", (variant % size, group)
    else:
        target, rest = "all_to_all_single", (*_splits(b, key.group, x.meta.shape[0], variant), group)
    wanted = b.options.writes and variant >= _OFTEN
    if wanted and key.kind == "all_gather" and variant >= 240 and len(x.meta.shape) == 1:
        return _gather_in_place(b, key, x, post, is_lost)
    if wanted and key.kind in ("all_gather", "reduce_scatter"):
        rows = x.meta.shape[0] * size if key.kind == "all_gather" else x.meta.shape[0] // size
        out = b.add_hidden("aten.empty.memory_format", (rows, *x.meta.shape[1:]), dtype=DTypeArg(x.meta.dtype))[0]
        x.num_users += 1
        return b.start(f"{_C10D}{target}_out.default", [x], x, *rest, post=post, is_lost=is_lost, out=out)
    if wanted and key.kind in ("all_reduce", "broadcast") and x in b.writable():
        return b.start(f"{_C10D}{target}_.default", [x], x, *rest, post=post, is_lost=is_lost)
    return b.start(f"{_C10D}{target}.default", [x], x, *rest, post=post, is_lost=is_lost)


def _positions(b: Builder, group: Group) -> tuple[int, ...]:
    """Each rank's position within its part."""
    at = {rank: position for part in group.parts for position, rank in enumerate(part)}
    return tuple(at[rank] for rank in range(b.world_size))


def _splits(b: Builder, group: Group, rows: int, variant: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Output and input split sizes of an all_to_all: equal ones, or uneven ones that differ from rank to rank.

    Always stated, as ``torch.distributed._functional_collectives.all_to_all_single`` of torch 2.13.0 states them; torch's own fake
    kernel takes an empty list for no rows at all.

    Uneven: position p sends ``sizes[(q - p) % size]`` rows to position q, so that every rank sends and receives ``rows`` in all.
    """
    size = group.size
    sizes = [rows // size] * size
    if variant < 160 or size == 1 or not sizes[0]:
        return tuple(sizes), tuple(sizes)
    sizes[0] -= 1
    sizes[1] += 1
    places = _positions(b, group)
    sent = tuple(PerRank(tuple(sizes[(q - p) % size] for p in places)) for q in range(size))
    received = tuple(PerRank(tuple(sizes[(p - q) % size] for p in places)) for q in range(size))
    return received, sent


def _gather_in_place(b: Builder, key: Key, x: Value, post: str, is_lost: bool) -> Flight:
    """A gather whose operand is this rank's part of its result, as FSDP lays it out; ``x`` must be flat."""
    numel, size, group = x.meta.numel, key.group.size, GroupArg(key.group.name)
    x.num_users += 1
    full = b.add_hidden("aten.empty.memory_format", (numel * size,), dtype=DTypeArg(x.meta.dtype))[0]
    place = PerRank(_positions(b, key.group))
    chunk, full = b.add_hidden("fsdp.all_gather_copy_in.default", (x,), full, (numel,), numel, place)
    return b.start(f"{_C10D}all_gather_into_tensor_out.default", [chunk], chunk, size, group, post=post, is_lost=is_lost, out=full)


def start_coalesced(b: Builder, key: Key, operands: Sequence[Value], *, post: str = "return") -> Flight:
    """Start one collective on several tensors of one dtype; the kind must be one that has such a form."""
    size, group = key.group.size, GroupArg(key.group.name)
    listed = tuple(operands)
    for x in operands:
        x.num_users += 1
    if key.kind == "all_gather":
        return b.start(f"{_C10D}all_gather_into_tensor_coalesced.default", operands, listed, size, group, post=post)
    if key.kind == "reduce_scatter":
        return b.start(f"{_C10D}reduce_scatter_tensor_coalesced.default", operands, listed, key.reduce_op, size, group, post=post)
    return b.start(f"{_C10D}all_reduce_coalesced.default", operands, listed, key.reduce_op, group, post=post)
