"""The operators that a Program may use: declared as data, with pure rules for shapes and dtypes; no torch, no implementations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import count
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from harness.errors import InvalidProgram, Unsupported
from harness.ops.autograd import APPLY, AUTOGRAD, gradient_of, rebound
from harness.ops.collectives import COLLECTIVES
from harness.ops.compute import COMPUTE
from harness.ops.core import CollectiveSpec, OpError, OpSpec, Part
from harness.ops.moves import MOVES
from harness.ops.views import VIEWS
from harness.spec.meta import TensorMeta
from harness.spec.program import Autograd, DTypeArg, FloatArg, GroupArg, Op, PerRank, Program, Ref, contiguous_stride, decode_program
from harness.spec.verdict import Finding, decode_finding

__all__ = ["APPLY", "AUTOGRAD", "REGISTERED_BY", "TABLE", "CollectiveSpec", "OpError", "OpSpec", "infer", "infer_program", "read_finding", "read_program"]

TABLE: Final[Mapping[str, OpSpec]] = MappingProxyType({spec.target: spec for spec in (*VIEWS, *MOVES, *COMPUTE, *COLLECTIVES)})

REGISTERED_BY: Final[Mapping[str, str]] = {
    "_c10d_functional": "torch.distributed._functional_collectives",
    "bucketing": "torch._inductor.fx_passes.bucketing",
    "fsdp": "torch.distributed.fsdp._fully_shard._fsdp_collectives",
}
"""The module of torch whose import registers the operators of a namespace, where ``import torch`` does not."""

Value = TensorMeta | tuple[TensorMeta, ...]


def infer(target: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], group_sizes: Mapping[str, int]) -> Value:
    """The metadata of an operator's result: what torch's eager CPU kernel gives.

    Args:
        target: the overload by its full name.
        args, kwargs: with ``TensorMeta`` in place of tensors and tuples in place of lists; ``DTypeArg``, ``GroupArg`` and
            ``FloatArg`` as in a Program.
        group_sizes: the ranks in a part of each group.

    Returns:
        One meta, or a tuple for an operator with several results. ``storage`` is that of the operand whose memory the result
        shares, or -1 where it has its own.

    Raises:
        Unsupported: the operator is not in the table.
        OpError: a precondition is broken.
    """
    if target not in TABLE and target not in AUTOGRAD:
        raise Unsupported(target)
    storages: dict[int, int] = {}
    plain = tuple(_plain(a, storages, group_sizes) for a in args)
    named = tuple([_plain(v, storages, group_sizes) for v in kwargs.values()])
    result = _infer(target, tuple(kwargs), *plain, *named)
    back = list(storages)
    if isinstance(result, TensorMeta):
        return result if result.storage < 0 else result._replace(storage=back[result.storage])
    return tuple(m if m.storage < 0 else m._replace(storage=back[m.storage]) for m in result)


def _plain(arg: Any, storages: dict[int, int], group_sizes: Mapping[str, int]) -> Any:
    """An argument as a rule takes it; storages numbered by appearance, so that equal calls are found again."""
    if isinstance(arg, TensorMeta):
        shape, stride, dtype, offset, storage = arg
        return TensorMeta(shape, stride, dtype, offset, storages.setdefault(storage, len(storages)))
    if type(arg) is tuple or type(arg) is list:
        return tuple(_plain(a, storages, group_sizes) for a in arg)
    if isinstance(arg, DTypeArg):
        return arg.name
    if isinstance(arg, GroupArg):
        if arg.name not in group_sizes:
            raise OpError(f"no group {arg.name!r}")
        return Part(arg.name, group_sizes[arg.name])
    return float(arg.value) if isinstance(arg, FloatArg) else arg


@lru_cache(maxsize=65536, typed=True)
def _infer(target: str, names: tuple[str, ...], *values: Any) -> Value:
    """``values`` end with those of the keywords ``names``; each is a cache key of its own, so that 1, 1.0 and True are told apart."""
    num_args = len(values) - len(names)
    try:
        result = (TABLE.get(target) or AUTOGRAD[target]).rule(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))
    except OpError:
        raise
    except Exception as error:  # a rule is a pure function of these arguments: whatever it stumbles over is theirs
        raise OpError(f"does not take these arguments ({type(error).__name__}: {error})") from None
    if not isinstance(result, TensorMeta) and not (isinstance(result, tuple) and all(isinstance(m, TensorMeta) for m in result)):
        raise OpError("does not take these arguments (a tensor is missing)")
    return result


def infer_program(program: Program) -> tuple[Value, ...]:
    """The metadata of every value of ``program``: inputs, then ops; storages are numbered.

    Raises:
        InvalidProgram: with the path of the op or output that is wrong, and why.
    """
    group_sizes = {group.name: group.size for group in program.groups}
    values: list[Value] = []
    storages = count()
    for spec in program.inputs:
        shared = spec.view_of if spec.same_as is None else spec.same_as
        base = None if shared is None else values[shared]
        storage = base.storage if isinstance(base, TensorMeta) else next(storages)
        stride = contiguous_stride(spec.shape) if spec.stride is None else spec.stride
        values.append(TensorMeta(spec.shape, stride, spec.dtype, spec.storage_offset, storage))
    scope = _Scope(group_sizes, program.autograd, storages)
    _infer_ops(program.ops, values, scope, "$.ops")
    for i, ref in enumerate(program.outputs):
        _resolved(ref, values, f"$.outputs[{i}]")
    return tuple(values)


class _Scope(NamedTuple):
    group_sizes: Mapping[str, int]
    autograd: Autograd | None
    storages: Iterator[int]


def _infer_ops(ops: tuple[Op, ...], values: list[Value], scope: _Scope, where: str) -> None:
    """Add the metadata of every op's result to ``values``."""
    for i, op in enumerate(ops):
        path = f"{where}[{i}]"
        if scope.autograd is None and (op.target == APPLY or op.target in AUTOGRAD or op.mode is not None):
            raise InvalidProgram(f"{path}.target" if op.mode is None else f"{path}.mode", f"{op.target}: only a program with autograd has it")
        args = tuple(_resolved(a, values, f"{path}.args[{j}]") for j, a in enumerate(op.args))
        kwargs = {k: _resolved(a, values, f"{path}.kwargs.{k}") for k, a in op.kwargs.items()}
        if op.target == APPLY:
            values.append(_infer_call(args, kwargs, scope, path))
            continue
        result = _inferred(op, args, kwargs, scope.group_sizes, path)
        new = [m._replace(storage=next(scope.storages)) if m.storage < 0 else m for m in ((result,) if isinstance(result, TensorMeta) else result)]
        values.append(new[0] if isinstance(result, TensorMeta) else tuple(new))
        meta = rebound(op.target, args, result)
        if meta is not None and isinstance(op.args[0], Ref):
            values[op.args[0].value] = meta


def _infer_call(args: tuple[Any, ...], kwargs: Mapping[str, Any], scope: _Scope, path: str) -> tuple[TensorMeta, ...]:
    """The results of a function of the program; its backward is checked as well, on gradients that are contiguous."""
    functions = () if scope.autograd is None else scope.autograd.functions
    number, *operands = args or (None,)
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(functions):
        raise InvalidProgram(f"{path}.args[0]", f"{number!r}; must be the number of a function, of which there are {len(functions)}")
    function = functions[number]
    if kwargs or len(operands) != function.num_inputs or not all(isinstance(m, TensorMeta) for m in operands):
        raise InvalidProgram(f"{path}.args", f"function {number} takes {function.num_inputs} tensors")
    where = f"$.autograd.functions[{number}]"
    scope = scope._replace(autograd=Autograd())
    values: list[Value] = list(operands)
    _infer_ops(function.forward, values, scope, f"{where}.forward")
    given = {field: [_tensor(ref, values, f"{where}.{field}[{j}]") for j, ref in enumerate(getattr(function, field))] for field in ("outputs", "saved", "kept")}
    within: list[Value] = [gradient_of(m)._replace(storage=next(scope.storages)) for m in given["outputs"]]
    within += [*given["saved"], *given["kept"]]
    _infer_ops(function.backward, within, scope, f"{where}.backward")
    for j, ref in enumerate(function.grads):
        grad = None if ref is None else _tensor(ref, within, f"{where}.grads[{j}]")
        if grad is not None and grad.shape != operands[j].shape:
            raise InvalidProgram(f"{where}.grads[{j}]", f"shape {list(grad.shape)}; its input has {list(operands[j].shape)}")
    return tuple(given["outputs"])


def _tensor(ref: Ref, values: list[Value], path: str) -> TensorMeta:
    meta = _resolved(ref, values, path)
    assert isinstance(meta, TensorMeta)
    return meta


def _inferred(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any], group_sizes: Mapping[str, int], path: str) -> Value:
    try:
        return infer(op.target, args, kwargs, group_sizes)
    except Unsupported:
        raise InvalidProgram(f"{path}.target", f"operator {op.target!r} is not in the table") from None
    except OpError as error:
        raise InvalidProgram(path, f"{op.target}: {error}") from None


def _resolved(arg: Any, values: list[Value], path: str) -> Any:
    if isinstance(arg, Ref):
        value = values[arg.value]
        if isinstance(value, TensorMeta):
            if arg.item is not None:
                raise InvalidProgram(path, f"item {arg.item} of value {arg.value}, which is one tensor")
            return value
        if arg.item is None or arg.item >= len(value):
            raise InvalidProgram(path, f"value {arg.value} has {len(value)} items; one must be named, not {arg.item}")
        return value[arg.item]
    if isinstance(arg, tuple):
        return tuple(_resolved(a, values, f"{path}[{k}]") for k, a in enumerate(arg))
    return arg.values[0] if isinstance(arg, PerRank) else arg


def read_program(data: bytes | str) -> Program:
    """Read a Program from JSON and check all of it: structure, operators, preconditions, shapes.

    Raises:
        InvalidProgram: with the path of the field, what stood there and what may stand there.
    """
    program = decode_program(data)
    infer_program(program)
    return program


def read_finding(data: bytes | str) -> Finding:
    """Read a Finding from JSON and check all of it, its Program too.

    Raises:
        InvalidProgram: with the path of the field, what stood there and what may stand there.
    """
    finding = decode_finding(data)
    try:
        infer_program(finding.program)
    except InvalidProgram as error:
        raise InvalidProgram(error.path.replace("$", "$.program", 1), error.reason) from None
    return finding
