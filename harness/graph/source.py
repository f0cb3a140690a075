"""A Program with ``autograd`` as Python: its functions are classes, it itself a function or, where it holds buffers or parameters, a module.

What is executed, compiled and shown to people is this one text. It is executed anew for every run, so that each has code objects of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final

from harness.errors import Unsupported
from harness.ops import APPLY, infer_program
from harness.spec.program import DTypeArg, FloatArg, Function, Op, Program, Ref

__all__ = ["source"]

_MEMORY_FORMATS: Final = ("contiguous_format", "preserve_format")
_INDENT: Final = "    "


def source(program: Program) -> str:
    """The text of a module with ``program``: a callable on the inputs whose role is ``argument``, in order.

    Where an input is held, ``Held`` is a module class that is made of the held inputs, in order, and there is no ``program``.

    Raises:
        Unsupported: the program has collectives, constants that differ by rank, or several ranks.
        InvalidProgram: it is not valid.
    """
    if program.world_size != 1 or program.groups:
        raise Unsupported(f"{program.world_size} ranks", None, "a program with a backward runs on one rank, without groups")
    infer_program(program)
    functions = () if program.autograd is None else program.autograd.functions
    parts = ["import torch\n\naten = torch.ops.aten"]
    parts += ["\n".join(_class(i, function)) for i, function in enumerate(functions)]
    names = _names(program)
    given = [f"in{i}" for i, spec in enumerate(program.inputs) if spec.role == "argument"]
    held = [(i, spec.role) for i, spec in enumerate(program.inputs) if spec.role != "argument"]
    body = [*(f"in{i} = self.in{i}" for i, _ in held), *_statements(program.ops, names, len(program.inputs))]
    returned = ", ".join(_ref(ref, names) for ref in program.outputs)
    body.append(f"return ({returned}{',' if len(program.outputs) == 1 else ''})")
    if not held:
        parts.append("\n".join([f"def program({', '.join(given)}):", *(_INDENT + line for line in body)]))
        return "\n\n\n".join(parts) + "\n"
    lines = ["class Held(torch.nn.Module):", f"    def __init__(self, {', '.join(f'in{i}' for i, _ in held)}):", "        super().__init__()"]
    lines += [f'        self.register_{role}("in{i}", in{i})' for i, role in held]
    lines += ["", f"    def forward({', '.join(['self', *given])}):", *(_INDENT * 2 + line for line in body)]
    parts.append("\n".join(lines))
    return "\n\n\n".join(parts) + "\n"


def _names(program: Program) -> list[str]:
    return [f"in{i}" for i in range(len(program.inputs))] + [f"x{i}" for i in range(len(program.ops))]


def _class(number: int, function: Function) -> Iterator[str]:
    """The lines of a ``torch.autograd.Function``."""
    names = [f"in{i}" for i in range(function.num_inputs)] + [f"x{i}" for i in range(len(function.forward))]

    def listed(refs: Sequence[Ref], within: Sequence[str]) -> str:
        return ", ".join(_ref(ref, within) for ref in refs)

    yield f"class Function{number}(torch.autograd.Function):"
    yield "    @staticmethod"
    yield f"    def forward(ctx{''.join(f', in{i}' for i in range(function.num_inputs))}):"
    lines = [*_statements(function.forward, names, function.num_inputs)]
    if function.dirty:
        lines.append(f"ctx.mark_dirty({', '.join(f'in{i}' for i in function.dirty)})")
    if function.saved:
        lines.append(f"ctx.save_for_backward({listed(function.saved, names)})")
    lines += [f"ctx.kept{i} = {_ref(ref, names)}" for i, ref in enumerate(function.kept)]
    if function.non_differentiable:
        lines.append(f"ctx.mark_non_differentiable({listed([function.outputs[i] for i in function.non_differentiable], names)})")
    single = len(function.outputs) == 1
    lines.append(f"return ({listed(function.outputs, names)}{',' if single else ''})")
    yield from (_INDENT * 2 + line for line in lines)
    yield ""
    grads = [f"grad{i}" for i in range(len(function.outputs))]
    saved = [f"saved{i}" for i in range(len(function.saved))]
    kept = [f"kept{i}" for i in range(len(function.kept))]
    within = [*grads, *saved, *kept, *(f"y{i}" for i in range(len(function.backward)))]
    yield "    @staticmethod"
    yield f"    def backward({', '.join(['ctx', *grads])}):"
    lines = [f"({', '.join(saved)},) = ctx.saved_tensors"] if saved else []
    lines += [f"{name} = ctx.{name}" for name in kept]
    lines += _statements(function.backward, within, function.num_given)
    lines.append(f"return ({', '.join('None' if ref is None else _ref(ref, within) for ref in function.grads)}{',' if len(function.grads) == 1 else ''})")
    yield from (_INDENT * 2 + line for line in lines)


def _statements(ops: Sequence[Op], names: Sequence[str], first: int) -> Iterator[str]:
    numbered = list(enumerate(ops, first))
    for mode, run in groupby(numbered, key=lambda pair: pair[1].mode):
        lines = [_statement(op, names, number) for number, op in run]
        if mode is None:
            yield from lines
        else:
            yield f"with torch.{mode}():"
            yield from (_INDENT + line for line in lines)


def _statement(op: Op, names: Sequence[str], number: int) -> str:
    name = names[number]
    args = [_argument(arg, names) for arg in op.args]
    if op.target == APPLY:
        return f"{name} = Function{op.args[0]}.apply({', '.join(args[1:])})"
    if op.target == "autograd.data":
        return f"{name} = {args[0]}.data"
    if op.target == "autograd.set_":
        return f"{name} = {args[0]}.set_({args[1]})"
    if op.target == "autograd.resize_storage_":
        return f"{name} = {args[0]}; {name}.untyped_storage().resize_({args[1]})"
    namespace, base, overload = op.target.split(".")
    callee = f"aten.{base}" if namespace == "aten" else f"torch.ops.{namespace}.{base}"
    args += [f"{key}={_argument(value, names)}" for key, value in op.kwargs.items()]
    return f"{name} = {callee}.{overload}({', '.join(args)})"


def _ref(ref: Ref, names: Sequence[str]) -> str:
    return names[ref.value] + ("" if ref.item is None else f"[{ref.item}]")


def _argument(arg: Any, names: Sequence[str]) -> str:
    if isinstance(arg, Ref):
        return _ref(arg, names)
    if isinstance(arg, tuple):
        return f"[{', '.join(_argument(a, names) for a in arg)}]"
    if isinstance(arg, DTypeArg):
        return f"torch.{arg.name}"
    if isinstance(arg, FloatArg):
        return f'float("{arg.value}")'
    if isinstance(arg, str):
        return f"torch.{arg}" if arg in _MEMORY_FORMATS else repr(arg)
    if arg is None or isinstance(arg, (bool, int, float)):
        return repr(arg)
    raise Unsupported(type(arg).__name__, None, "a program with a backward runs on one rank")
