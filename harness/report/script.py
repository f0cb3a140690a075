"""A Program as the Python that a person would write: ``program``, ``inputs`` and the groups they need."""

from __future__ import annotations

import base64
import keyword
import math
import re
import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from harness.errors import Unsupported
from harness.ops import TABLE, infer_program
from harness.spec.dtypes import DTYPES
from harness.spec.meta import TensorMeta
from harness.spec.program import (
    DTypeArg,
    FloatArg,
    GroupArg,
    Op,
    PerRank,
    Program,
    Ref,
    TensorSpec,
    contiguous_stride,
    storage_numel,
)

__all__ = ["ScriptProgram", "collective_dtypes", "script_program"]

_INPUT_NAMES: Final = "abcdefghijkmnpqrstuvw"
_RESULTS: Final = {
    "all_gather": "gathered",
    "reduce_scatter": "scattered",
    "all_reduce": "reduced",
    "all_to_all": "exchanged",
    "broadcast": "received",
}
_NAMESPACES: Final = {"_c10d_functional": "c10d", "aten": "aten"}
_MEMORY_FORMATS: Final = ("contiguous_format", "preserve_format")
_TAKEN: Final = frozenset({"aten", "c10d", "dist", "rank", "torch", "program", "inputs"})
_INT_HIGH: Final = {"int64": 2**40, "int32": 2**26, "int16": 2**12, "int8": 2**6, "uint8": 2**8, "bool": 2}
_STRUCT: Final = {
    "float64": "d",
    "float32": "f",
    "float16": "e",
    "int64": "q",
    "int32": "i",
    "int16": "h",
    "int8": "b",
    "uint8": "B",
    "bool": "?",
}
_MAX_LITERALS: Final = 64
_MAX_DATA_BYTES: Final = 1 << 16


class ScriptProgram(NamedTuple):
    """The parts of a script that come from a Program.

    Attributes:
        program: the source of ``def program(...)``.
        inputs: the source of ``def inputs(rank)``.
        groups: the name of each process group used, and its parts.
        takes_rank: whether ``program`` has a keyword argument ``rank``.
        has_own_values: whether ``inputs`` gives the values of the finding's program, not values made up for the script.
    """

    program: str
    inputs: str
    groups: dict[str, tuple[tuple[int, ...], ...]]
    takes_rank: bool
    has_own_values: bool


def collective_dtypes(program: Program) -> frozenset[str]:
    """The dtypes that collectives of the program carry."""
    metas = infer_program(program)
    found: set[str] = set()
    for number, op in enumerate(program.ops, len(program.inputs)):
        if TABLE[op.target].collective is not None:
            result = metas[number]
            found.update(m.dtype for m in ((result,) if isinstance(result, TensorMeta) else result))
    return frozenset(found)


def script_program(program: Program) -> ScriptProgram:
    """Write ``program`` as Python.

    Raises:
        Unsupported: its inputs hold more data than a script should.
    """
    writer = _Writer(program)
    body = [writer.statement(i) for i in range(len(program.ops))]
    returned = ", ".join(writer.ref(ref) for ref in program.outputs) + ("," if len(program.outputs) == 1 else "")
    keywords = list(writer.groups) + (["rank"] if writer.takes_rank else [])
    parameters = ", ".join((*writer.names[: len(program.inputs)], *(["*", *keywords] if keywords else [])))
    lines = [f"def program({parameters}):", *(f"    {line}" for line in body), f"    return ({returned})"]
    values, own = _inputs(program, writer.names)
    groups = {name: program.group(original).parts for name, original in writer.groups.items()}
    return ScriptProgram("\n".join(lines), values, groups, writer.takes_rank, own)


class _Writer:
    """Gives names to values and writes statements."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.metas = infer_program(program)
        self.groups: dict[str, str] = {}
        self.takes_rank = False
        count = len(program.inputs)
        short = count <= len(_INPUT_NAMES)
        self.names = [_INPUT_NAMES[i] if short else f"in{i}" for i in range(count)]
        self.starts: dict[int, str] = {}
        self.num_plain = 0
        self._name_groups()
        for number, op in enumerate(program.ops, count):
            self.names.append(self._name(number, op))

    def _name_groups(self) -> None:
        for op in self.program.ops:
            spec = TABLE[op.target].collective
            arg = op.args[spec.group] if spec is not None else None
            if isinstance(arg, GroupArg) and arg.name not in self.groups.values():
                name = re.sub(r"\W", "_", arg.name)
                usable = name.isidentifier() and not keyword.iskeyword(name) and len(name) > 1 and name not in _TAKEN
                if not usable or name in self.groups or re.fullmatch(r"(x|in)\d+", name):
                    name = f"group_{len(self.groups)}"
                self.groups[name] = arg.name

    def _name(self, number: int, op: Op) -> str:
        spec = TABLE[op.target]
        if spec.collective is not None:
            name = self._unique(_RESULTS[spec.collective.kind])
            self.starts[number] = name
            return name
        source = op.args[0] if op.args else None
        if spec.kind == "wait" and isinstance(source, Ref) and source.value in self.starts:
            item = "" if source.item is None else f"_{source.item}"
            return self._unique(f"{self.starts[source.value]}{item}_done")
        self.num_plain += 1
        return f"x{self.num_plain - 1}"

    def _unique(self, name: str) -> str:
        taken = {*self.names, *self.groups}
        number = 1
        while (chosen := name if number == 1 else f"{name}_{number}") in taken:
            number += 1
        return chosen

    def ref(self, ref: Ref) -> str:
        return self.names[ref.value] + ("" if ref.item is None else f"[{ref.item}]")

    def statement(self, i: int) -> str:
        op = self.program.ops[i]
        namespace, name, overload = op.target.split(".")
        callee = f"{_NAMESPACES.get(namespace, f'torch.ops.{namespace}')}.{name}"
        if overload != "default":
            callee += f".{overload}"
        args = [self.argument(a) for a in op.args]
        args += [f"{key}={self.argument(value)}" for key, value in op.kwargs.items()]
        line = f"{self.names[len(self.program.inputs) + i]} = {callee}({', '.join(args)})"
        if op.ranks is None:
            return line
        self.takes_rank = True
        return f"if rank in {list(op.ranks)}:\n        {line}"

    def argument(self, arg: Any) -> str:
        if isinstance(arg, Ref):
            return self.ref(arg)
        if isinstance(arg, tuple):
            return f"[{', '.join(self.argument(a) for a in arg)}]"
        if isinstance(arg, DTypeArg):
            return f"torch.{arg.name}"
        if isinstance(arg, GroupArg):
            return next(name for name, original in self.groups.items() if original == arg.name)
        if isinstance(arg, FloatArg):
            return f'float("{arg.value}")'
        if isinstance(arg, PerRank):
            self.takes_rank = True
            return f"{list(arg.values)}[rank]"
        if isinstance(arg, str):
            return f"torch.{arg}" if arg in _MEMORY_FORMATS else f'"{arg}"'
        return repr(arg)


def _inputs(program: Program, names: list[str]) -> tuple[str, bool]:
    lines = ["def inputs(rank):"]
    drawn = [spec for spec in program.inputs if spec.data is None and spec.view_of is None]
    if drawn:
        lines = ["def inputs(rank, seed=0):", "    torch.manual_seed(1000 * seed + rank)"]
    for i, spec in enumerate(program.inputs):
        if spec.view_of is not None:
            value = f"{names[spec.view_of]}.{_strided(spec)}"
        elif spec.data is not None:
            value = _stored(spec, f"input {i}")
        else:
            value = _made_up(spec)
        lines.append(f"    {names[i]} = {value}")
    count = len(program.inputs)
    lines.append(f"    return ({', '.join(names[:count])}{',' if count == 1 else ''})")
    return "\n".join(lines), not drawn


def _strided(spec: TensorSpec) -> str:
    stride = contiguous_stride(spec.shape) if spec.stride is None else spec.stride
    return f"as_strided({_shape(spec.shape)}, {_shape(stride)}, {spec.storage_offset})"


def _shape(sizes: tuple[int, ...]) -> str:
    return repr(tuple(sizes))


def _is_plain(spec: TensorSpec) -> bool:
    return spec.stride is None and not spec.storage_offset


def _made_up(spec: TensorSpec) -> str:
    """Ordinary floats, and integers that a float32 cannot hold."""
    stride = contiguous_stride(spec.shape) if spec.stride is None else spec.stride
    plain = _is_plain(spec)
    shape = spec.shape if plain else (storage_numel(spec.shape, stride, spec.storage_offset),)
    sizes = ", ".join(str(size) for size in shape) if shape else "()"
    if DTYPES[spec.dtype].kind == "float":
        cast = "" if spec.dtype == "float32" else f".to(torch.{spec.dtype})"
        value = f"torch.randn({sizes}){cast}"
    else:
        high = spec.high or _INT_HIGH[spec.dtype]
        low = 0 if spec.high or DTYPES[spec.dtype].kind != "int" else -high
        dtype = "" if spec.dtype == "int64" else f".to(torch.{spec.dtype})"
        value = f"torch.randint({low}, {high}, {_shape(shape)}){dtype}"
    return value if plain else f"{value}.{_strided(spec)}"


def _stored(spec: TensorSpec, what: str) -> str:
    """The stored values, written out where they are few, as one number where they are all the same."""
    data = spec.data or ()
    per_rank = [_ranks_value(spec, entry, what) for entry in data]
    value = per_rank[0] if len(set(per_rank)) == 1 else f"[{', '.join(per_rank)}][rank]"
    if _is_plain(spec):
        return value
    stride = contiguous_stride(spec.shape) if spec.stride is None else spec.stride
    held = storage_numel(spec.shape, stride, spec.storage_offset)
    return f"torch.zeros({held}, dtype=torch.{spec.dtype}).{_strided(spec)}.copy_({value})"


def _ranks_value(spec: TensorSpec, data: bytes, what: str) -> str:
    dtype = f"dtype=torch.{spec.dtype}"
    numel = math.prod(spec.shape)
    if not numel:
        return f"torch.empty({_shape(spec.shape)}, {dtype})"
    size = DTYPES[spec.dtype].itemsize
    if data == data[:size] * numel:
        return f"torch.full({_shape(spec.shape)}, {next(_elements(spec, data[:size]), None)!r}, {dtype})"
    if numel <= _MAX_LITERALS and spec.dtype in _READABLE:
        elements = ", ".join(_literal(value) for value in _elements(spec, data))
        reshaped = "" if len(spec.shape) == 1 else f".reshape({_shape(spec.shape)})"
        return f"torch.tensor([{elements}], {dtype}){reshaped}"
    if len(data) > _MAX_DATA_BYTES:
        raise Unsupported(what, None, f"{len(data)} bytes of values; a script holds at most {_MAX_DATA_BYTES}")
    encoded = base64.b64encode(data).decode()
    return f'torch.frombuffer(bytearray(base64.b64decode("{encoded}")), {dtype}).reshape({_shape(spec.shape)})'


_READABLE: Final = (*_STRUCT, "bfloat16")


def _literal(value: float | int | bool) -> str:
    return repr(value) if not isinstance(value, float) or math.isfinite(value) else f'float("{value}")'


def _elements(spec: TensorSpec, data: bytes) -> Iterator[float | int | bool]:
    if spec.dtype == "bfloat16":
        for (half,) in struct.iter_unpack("<H", data):
            yield struct.unpack("<f", struct.pack("<I", half << 16))[0]
        return
    yield from (value for (value,) in struct.iter_unpack("<" + _STRUCT[spec.dtype], data))
