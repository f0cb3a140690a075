"""Program: straight-line SPMD code as data.

Values are numbered: the inputs first, then one value an op. A value is a tensor, or a tuple of tensors for ops such as
``aten.split``; ``Ref.item`` selects from a tuple. A Program never holds Python code, so a stored one is opened safely and
means the same under every torch version. ``decode_program`` checks structure; ``harness.ops.read_program`` also checks
operators, preconditions and shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from harness.errors import InvalidProgram
from harness.spec.dtypes import DTYPES
from harness.spec.saved_hooks import SAVED_HOOKS

__all__ = [
    "LIMITS",
    "SCHEMA_VERSION",
    "Arg",
    "Autograd",
    "DTypeArg",
    "FloatArg",
    "Function",
    "Group",
    "GroupArg",
    "Hook",
    "Limits",
    "Op",
    "PerRank",
    "Program",
    "Ref",
    "Scalar",
    "TensorSpec",
    "contiguous_stride",
    "decode_program",
    "encode_program",
    "invalid_from",
    "storage_numel",
    "structural_faults",
]

SCHEMA_VERSION: Final = 1


class Ref(Struct, frozen=True, tag_field="t", tag="ref", omit_defaults=True):
    """A tensor: value number ``value``, and where that is a tuple its item number ``item``."""

    value: int
    item: int | None = None


class DTypeArg(Struct, frozen=True, tag_field="t", tag="dtype"):
    """An element type, by its torch name without ``torch.``."""

    name: str


class GroupArg(Struct, frozen=True, tag_field="t", tag="group"):
    """The part, of the group named ``name``, that the running rank belongs to."""

    name: str


class FloatArg(Struct, frozen=True, tag_field="t", tag="float"):
    """A float that JSON has no number for."""

    value: Literal["nan", "inf", "-inf"]


class PerRank(Struct, frozen=True, tag_field="t", tag="per_rank"):
    """A constant that differs from rank to rank: one number a rank, in rank order."""

    values: tuple[int | float, ...]


Scalar = int | float | bool | str | None | Ref | DTypeArg | GroupArg | FloatArg | PerRank
Arg = int | float | bool | str | None | Ref | DTypeArg | GroupArg | FloatArg | PerRank | tuple[Scalar, ...]


class TensorSpec(Struct, frozen=True, omit_defaults=True):
    """One input tensor.

    Attributes:
        shape: sizes; ``()`` is 0-d, a size may be 0.
        dtype: a name from ``DTYPES``.
        stride: in elements, or None for contiguous.
        storage_offset: in elements.
        requires_grad: whether gradients are asked for.
        view_of: the number of an earlier input, itself no view and of the same dtype, whose storage this one shares.
        high: for integer dtypes, values are drawn from ``[0, high)``, so that they can serve as indices.
        data: the values themselves, one entry a rank, each the raw little-endian bytes in row-major order.
        is_leaf: False makes an input that requires grad the result of an operator, so that it may be written in place.
        same_as: the number of an earlier input that is passed a second time here: the very same tensor.
        role: ``argument``; or held by the module that the program is the forward of, as its ``buffer`` or ``parameter``.
    """

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] | None = None
    storage_offset: int = 0
    requires_grad: bool = False
    view_of: int | None = None
    high: int | None = None
    data: tuple[bytes, ...] | None = None
    is_leaf: bool = True
    same_as: int | None = None
    role: Literal["argument", "buffer", "parameter"] = "argument"


class Group(Struct, frozen=True):
    """A partition of all ranks; a collective on it runs in each part by itself.

    Parts are of equal size and cover every rank once, except in a Program marked ``divergent``.
    """

    name: str
    parts: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """The number of ranks in a part (in the first, where they differ)."""
        return len(self.parts[0])


class Op(Struct, frozen=True, omit_defaults=True):
    """One statement: an overload by its full name, such as ``aten.add.Tensor``, with its arguments.

    Attributes:
        target, args, kwargs: of the call.
        ranks: None, or in a divergent Program the only ranks that run it.
        place: where it stands in the Python that it was traced from, as ``case.py:11``; only messages tell it.
        mode: the context that it runs in, where that is not the ordinary one.
    """

    target: str
    args: tuple[Arg, ...] = ()
    kwargs: dict[str, Arg] = {}
    ranks: tuple[int, ...] | None = None
    place: str | None = None
    mode: Literal["no_grad", "inference_mode"] | None = None


class Function(Struct, frozen=True, omit_defaults=True):
    """A ``torch.autograd.Function``; within it values are numbered anew.

    Attributes:
        num_inputs: how many tensors it takes.
        forward: ops over the inputs.
        outputs: what forward returns.
        saved: values of forward given to ``save_for_backward``.
        kept: values of forward kept as attributes of ``ctx``, past the check for later writes.
        dirty: inputs given to ``mark_dirty``.
        non_differentiable: the positions of outputs given to ``mark_non_differentiable``.
        backward: ops over the gradients of all outputs, then ``saved``, then ``kept``.
        grads: what backward returns, one an input; None for no gradient.
    """

    num_inputs: int
    forward: tuple[Op, ...]
    outputs: tuple[Ref, ...]
    saved: tuple[Ref, ...] = ()
    kept: tuple[Ref, ...] = ()
    dirty: tuple[int, ...] = ()
    non_differentiable: tuple[int, ...] = ()
    backward: tuple[Op, ...] = ()
    grads: tuple[Ref | None, ...] = ()

    @property
    def num_given(self) -> int:
        """How many values backward begins with."""
        return len(self.outputs) + len(self.saved) + len(self.kept)


class Hook(Struct, frozen=True, omit_defaults=True):
    """A hook that doubles a gradient, set before the program runs on an input, or after it on an output; a tensor without gradient gets none."""

    of: Literal["input", "output"]
    number: int


class Autograd(Struct, frozen=True, omit_defaults=True):
    """What a program with gradients has besides its statements.

    Attributes:
        functions: what ``autograd.apply`` names by number.
        num_backward: how often backward runs, with ``retain_graph`` but for the last time.
        is_double: whether the gradients are themselves differentiated, once.
        hooks: on gradients.
        saved_hooks: names of pairs of pack and unpack from ``harness.graph.saved_hooks``, the outermost first, set around the program.
    """

    functions: tuple[Function, ...] = ()
    num_backward: int = 1
    is_double: bool = False
    hooks: tuple[Hook, ...] = ()
    saved_hooks: tuple[str, ...] = ()


class Program(Struct, frozen=True):
    """A whole program; every rank runs all its ops in order and returns ``outputs``; with ``autograd`` it has a backward too."""

    world_size: int
    groups: tuple[Group, ...]
    inputs: tuple[TensorSpec, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Ref, ...]
    divergent: bool = False
    schema_version: int = SCHEMA_VERSION
    autograd: Autograd | None = None

    def group(self, name: str) -> Group:
        """The group called ``name``; KeyError where there is none."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(name)


class Limits(Struct, frozen=True):
    """What a stored Program may hold at most; larger ones are refused before anything is allocated."""

    file_bytes: int = 64 * 2**20
    world_size: int = 1024
    ops: int = 100_000
    inputs: int = 10_000
    dims: int = 8
    input_bytes: int = 2**30


LIMITS: Final = Limits()

_MOST_PLACE: Final = 256
_MOST_BACKWARD: Final = 4

_GROUP_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DECODER = msgspec.json.Decoder(Program)
_ENCODER = msgspec.json.Encoder()
_PATH = re.compile(r" - at `(.*)`$")


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements, as torch gives them (a size of 0 counts as 1)."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def storage_numel(shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> int:
    """The number of elements a storage must have to hold such a tensor."""
    if 0 in shape:
        return offset
    return offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def encode_program(program: Program) -> bytes:
    """JSON; ``decode_program`` of it is equal to ``program``."""
    return _ENCODER.encode(program)


def decode_program(data: bytes | str) -> Program:
    """Read a Program from JSON and check its structure (not its operators: see ``harness.ops.read_program``).

    Raises:
        InvalidProgram: with the path of the field, what stood there and what may stand there.
    """
    if len(data) > LIMITS.file_bytes:
        raise InvalidProgram("$", f"{len(data)} bytes; at most {LIMITS.file_bytes} are read")
    try:
        program = _DECODER.decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_from(error) from None
    for path, reason in structural_faults(program):
        raise InvalidProgram(path, reason)
    return program


def invalid_from(error: Exception) -> InvalidProgram:
    """msgspec's error as ours, its path taken apart from its reason."""
    text = str(error)
    match = _PATH.search(text)
    return InvalidProgram(match.group(1), text[: match.start()]) if match else InvalidProgram("$", text)


def structural_faults(program: Program) -> Iterator[tuple[str, str]]:
    """Every way in which ``program`` breaks the schema, the gravest first."""
    if program.schema_version != SCHEMA_VERSION:
        yield "$.schema_version", f"{program.schema_version}; this harness reads {SCHEMA_VERSION}"
    if not 1 <= program.world_size <= LIMITS.world_size:
        yield "$.world_size", f"{program.world_size}; must be from 1 to {LIMITS.world_size}"
        return
    if len(program.ops) > LIMITS.ops:
        yield "$.ops", f"{len(program.ops)} ops; at most {LIMITS.ops}"
        return
    if len(program.inputs) > LIMITS.inputs:
        yield "$.inputs", f"{len(program.inputs)} inputs; at most {LIMITS.inputs}"
        return
    names: set[str] = set()
    for i, group in enumerate(program.groups):
        yield from _group_faults(program, group, f"$.groups[{i}]", names)
    total_bytes = 0
    for i, spec in enumerate(program.inputs):
        path = f"$.inputs[{i}]"
        faults = list(_input_faults(program, i, spec, path))
        yield from faults
        if not faults and spec.view_of is None:
            stride = spec.stride or contiguous_stride(spec.shape)
            total_bytes += storage_numel(spec.shape, stride, spec.storage_offset) * DTYPES[spec.dtype].itemsize
    if total_bytes * program.world_size > LIMITS.input_bytes:
        needed = total_bytes * program.world_size
        yield "$.inputs", f"{needed} bytes over {program.world_size} ranks; at most {LIMITS.input_bytes}"
    num_inputs = len(program.inputs)
    for i, op in enumerate(program.ops):
        yield from _op_faults(program, op, num_inputs + i, names, f"$.ops[{i}]")
    for i, ref in enumerate(program.outputs):
        yield from _ref_faults(ref, num_inputs + len(program.ops), f"$.outputs[{i}]")
    if program.autograd is not None:
        yield from _autograd_faults(program, program.autograd, names)


def _autograd_faults(program: Program, autograd: Autograd, names: set[str]) -> Iterator[tuple[str, str]]:
    if not 0 <= autograd.num_backward <= _MOST_BACKWARD:
        yield "$.autograd.num_backward", f"{autograd.num_backward}; must be from 0 to {_MOST_BACKWARD}"
    for i, hook in enumerate(autograd.hooks):
        count = len(program.inputs if hook.of == "input" else program.outputs)
        if not 0 <= hook.number < count:
            yield f"$.autograd.hooks[{i}].number", f"{hook.number}; there are {count} {hook.of}s"
    for i, name in enumerate(autograd.saved_hooks):
        if name not in SAVED_HOOKS:
            yield f"$.autograd.saved_hooks[{i}]", f"{name!r}; must be one of {', '.join(SAVED_HOOKS)}"
    for i, function in enumerate(autograd.functions):
        path = f"$.autograd.functions[{i}]"
        count = function.num_inputs
        if not 0 <= count <= LIMITS.inputs:
            yield f"{path}.num_inputs", f"{count}; must be from 0 to {LIMITS.inputs}"
            continue
        for j, op in enumerate(function.forward):
            yield from _op_faults(program, op, count + j, names, f"{path}.forward[{j}]")
        for field in ("outputs", "saved", "kept"):
            for j, ref in enumerate(getattr(function, field)):
                yield from _ref_faults(ref, count + len(function.forward), f"{path}.{field}[{j}]")
        for j, number in enumerate(function.dirty):
            if not 0 <= number < count:
                yield f"{path}.dirty[{j}]", f"{number}; it has {count} inputs"
        for j, number in enumerate(function.non_differentiable):
            if not 0 <= number < len(function.outputs):
                yield f"{path}.non_differentiable[{j}]", f"{number}; it has {len(function.outputs)} outputs"
        for j, op in enumerate(function.backward):
            yield from _op_faults(program, op, function.num_given + j, names, f"{path}.backward[{j}]")
        if len(function.grads) != count:
            yield f"{path}.grads", f"{len(function.grads)} gradients for {count} inputs"
        for j, grad in enumerate(function.grads):
            if grad is not None:
                yield from _ref_faults(grad, function.num_given + len(function.backward), f"{path}.grads[{j}]")


def _group_faults(program: Program, group: Group, path: str, names: set[str]) -> Iterator[tuple[str, str]]:
    if not _GROUP_NAME.fullmatch(group.name):
        yield f"{path}.name", f"{group.name!r}; must match {_GROUP_NAME.pattern}"
    if group.name in names:
        yield f"{path}.name", f"{group.name!r} stands twice"
    names.add(group.name)
    members = [rank for part in group.parts for rank in part]
    if not group.parts or not all(group.parts):
        yield f"{path}.parts", "a group has at least one part, and a part at least one rank"
    elif len(set(members)) != len(members) or not set(members) <= set(range(program.world_size)):
        yield f"{path}.parts", f"ranks must be from 0 to {program.world_size - 1}, each at most once"
    elif not program.divergent and len(members) != program.world_size:
        yield f"{path}.parts", f"covers {len(members)} of {program.world_size} ranks; only a divergent program may leave some out"
    elif not program.divergent and len({len(part) for part in group.parts}) > 1:
        yield f"{path}.parts", "parts of unequal size; only a divergent program may have them"


def _input_faults(program: Program, i: int, spec: TensorSpec, path: str) -> Iterator[tuple[str, str]]:
    if spec.dtype not in DTYPES:
        yield f"{path}.dtype", f"{spec.dtype!r}; must be one of {', '.join(DTYPES)}"
        return
    if len(spec.shape) > LIMITS.dims:
        yield f"{path}.shape", f"{len(spec.shape)} dimensions; at most {LIMITS.dims}"
        return
    if any(not 0 <= size <= LIMITS.input_bytes for size in spec.shape):
        yield f"{path}.shape", f"{list(spec.shape)}; sizes must be from 0 to {LIMITS.input_bytes}"
        return
    stride = contiguous_stride(spec.shape) if spec.stride is None else spec.stride
    if len(stride) != len(spec.shape):
        yield f"{path}.stride", f"{len(stride)} strides for {len(spec.shape)} dimensions"
        return
    if any(not 0 <= step <= LIMITS.input_bytes for step in stride):
        yield f"{path}.stride", f"{list(stride)}; strides must be from 0 to {LIMITS.input_bytes}"
        return
    if not 0 <= spec.storage_offset <= LIMITS.input_bytes:
        yield f"{path}.storage_offset", f"{spec.storage_offset}; must be from 0 to {LIMITS.input_bytes}"
        return
    if spec.view_of is not None:
        if not 0 <= spec.view_of < i or program.inputs[spec.view_of].view_of is not None:
            yield f"{path}.view_of", f"{spec.view_of}; must be the number of an earlier input that is no view itself"
            return
        base = program.inputs[spec.view_of]
        if base.dtype != spec.dtype:
            yield f"{path}.dtype", f"{spec.dtype!r}; a view has the dtype of its base, {base.dtype!r}"
        base_stride = base.stride or contiguous_stride(base.shape)
        if len(base_stride) == len(base.shape):
            held = storage_numel(base.shape, base_stride, base.storage_offset)
            needed = storage_numel(spec.shape, stride, spec.storage_offset)
            if needed > held:
                yield path, f"needs {needed} elements of the storage of input {spec.view_of}, which has {held}"
    if spec.same_as is not None and (not 0 <= spec.same_as < i or program.inputs[spec.same_as] != replace(spec, same_as=None)):
        yield f"{path}.same_as", f"{spec.same_as}; must be the number of an earlier input that is declared alike"
    if spec.role == "parameter" and not (spec.is_leaf and spec.view_of is None):
        yield f"{path}.role", "parameter; must be a leaf, and no view"
    if spec.high is not None and (DTYPES[spec.dtype].kind not in ("int", "uint") or spec.high < 1):
        yield f"{path}.high", f"{spec.high}; must be 1 or more, and only for integer dtypes"
    if spec.requires_grad and DTYPES[spec.dtype].kind != "float":
        yield f"{path}.requires_grad", f"true; only floats have gradients, not {spec.dtype}"
    if spec.data is not None:
        expected = math.prod(spec.shape) * DTYPES[spec.dtype].itemsize
        if spec.view_of is not None:
            yield f"{path}.data", "a view has the data of its base"
        elif len(spec.data) != program.world_size:
            yield f"{path}.data", f"{len(spec.data)} entries for {program.world_size} ranks"
        elif any(len(entry) != expected for entry in spec.data):
            yield f"{path}.data", f"entries of {[len(e) for e in spec.data]} bytes; must be of {expected}"


def _op_faults(program: Program, op: Op, number: int, names: set[str], path: str) -> Iterator[tuple[str, str]]:
    if op.ranks is not None:
        if not program.divergent:
            yield f"{path}.ranks", "only a divergent program has ops that only some ranks run"
        elif not op.ranks or not set(op.ranks) <= set(range(program.world_size)):
            yield f"{path}.ranks", f"{list(op.ranks)}; must be ranks from 0 to {program.world_size - 1}"
    if op.place is not None and not (len(op.place) <= _MOST_PLACE and op.place.isprintable()):
        yield f"{path}.place", f"{op.place[:40]!r}; must be one line of at most {_MOST_PLACE} characters"
    places = [(f"{path}.args[{j}]", arg) for j, arg in enumerate(op.args)]
    places += [(f"{path}.kwargs.{key}", arg) for key, arg in op.kwargs.items()]
    for place, arg in places:
        items = [(f"{place}[{k}]", item) for k, item in enumerate(arg)] if isinstance(arg, tuple) else [(place, arg)]
        for where, item in items:
            if isinstance(item, Ref):
                yield from _ref_faults(item, number, where)
            elif isinstance(item, DTypeArg) and item.name not in DTYPES:
                yield where, f"dtype {item.name!r}; must be one of {', '.join(DTYPES)}"
            elif isinstance(item, GroupArg) and item.name not in names:
                yield where, f"group {item.name!r}; must be one of {', '.join(sorted(names)) or '(none)'}"
            elif isinstance(item, PerRank) and len(item.values) != program.world_size:
                yield where, f"{len(item.values)} values for {program.world_size} ranks"


def _ref_faults(ref: Ref, number: int, path: str) -> Iterator[tuple[str, str]]:
    if not 0 <= ref.value < number:
        yield path, f"value {ref.value}; only values 0 to {number - 1} exist here"
    if ref.item is not None and ref.item < 0:
        yield path, f"item {ref.item}; must be 0 or more"
