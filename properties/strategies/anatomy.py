"""What the tests of strategies look at in a Program: its collectives with their waits, who uses what, and what is in flight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from harness.ops import TABLE, infer_program
from harness.spec.meta import TensorMeta
from harness.spec.program import Arg, GroupArg, Op, Program, Ref

WAIT = "_c10d_functional.wait_tensor.default"


@dataclass
class Start:
    """A collective: where it starts (an op's number), what it reads, and the ops that wait for it."""

    at: int
    op: Op
    kind: str
    group: str
    reduce_op: str | None
    operands: list[Ref]
    waits: list[int] = field(default_factory=list)


def refs(args: object) -> Iterator[Ref]:
    """All references in an argument, or a tuple of arguments."""
    if isinstance(args, Ref):
        yield args
    elif isinstance(args, tuple):
        for arg in args:
            yield from refs(arg)


def operands(op: Op) -> list[Ref]:
    """All that an op refers to."""
    return [*refs(op.args), *refs(tuple(op.kwargs.values()))]


class Anatomy:
    """A valid Program taken apart; ``metas`` has a value's metadata by reference."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.num_inputs = len(program.inputs)
        self.values = infer_program(program)
        self.users: dict[int, list[int]] = {}
        for i, op in enumerate(program.ops):
            for ref in operands(op):
                self.users.setdefault(ref.value, []).append(i)
        self.starts = [self._start(i, op) for i, op in enumerate(program.ops) if TABLE[op.target].collective is not None]
        self.returned = {ref.value for ref in program.outputs}

    def _start(self, at: int, op: Op) -> Start:
        spec = TABLE[op.target].collective
        assert spec is not None
        group, reduce_op = op.args[spec.group], None if spec.reduce_op is None else op.args[spec.reduce_op]
        assert isinstance(group, GroupArg)
        waits = [i for i in self.users.get(self.num_inputs + at, []) if self.program.ops[i].target == WAIT]
        return Start(at, op, spec.kind, group.name, None if reduce_op is None else str(reduce_op), list(refs(op.args[0])), waits)

    def meta(self, ref: Ref) -> TensorMeta:
        """The metadata of what ``ref`` refers to."""
        value = self.values[ref.value]
        return value if isinstance(value, TensorMeta) else value[ref.item or 0]

    def op_of(self, ref: Ref) -> Op | None:
        """The op that makes a value; None for an input."""
        return None if ref.value < self.num_inputs else self.program.ops[ref.value - self.num_inputs]

    def number(self, op_index: int) -> int:
        """The value number of an op."""
        return self.num_inputs + op_index

    def ancestors(self, ref: Ref) -> set[int]:
        """The indices of all ops that a value depends on through references, its own included."""
        found: set[int] = set()
        todo = [ref.value - self.num_inputs]
        while todo:
            i = todo.pop()
            if i >= 0 and i not in found:
                found.add(i)
                todo += [r.value - self.num_inputs for r in operands(self.program.ops[i])]
        return found


def flight_violations(program: Program) -> list[str]:
    """Every read or write of memory in flight, by the metadata's storages alone."""
    values = infer_program(program)
    num_inputs = len(program.inputs)

    def storages(arg: Arg | tuple[Arg, ...]) -> set[int]:
        found = set()
        for ref in refs(arg):
            value = values[ref.value]
            found.add((value if isinstance(value, TensorMeta) else value[ref.item or 0]).storage)
        return found

    arriving: dict[int, int] = {}
    reading: dict[int, set[int]] = {}
    faults = []
    for i, op in enumerate(program.ops):
        spec, result = TABLE[op.target], values[num_inputs + i]
        touched = storages(op.args) | storages(tuple(op.kwargs.values()))
        if spec.kind == "wait":
            for storage in touched:
                start = arriving.pop(storage, None)
                if start is not None and start not in arriving.values():
                    reading.pop(start, None)
            continue
        faults += [f"op {i} ({op.target}) touches storage {s}, in flight since op {arriving[s]}" for s in touched & arriving.keys()]
        written = {s for position in spec.writes for s in storages(op.args[position])}
        made = {m.storage for m in ((result,) if isinstance(result, TensorMeta) else result)}
        if spec.collective is not None:
            written |= storages(op.kwargs.get("out"))
        for start, sources in reading.items():
            faults += [f"op {i} ({op.target}) writes storage {s}, read since op {start}" for s in written & sources]
        if spec.collective is not None:
            arriving.update(dict.fromkeys(made, i))
            reading[i] = storages(op.args[0])
    ends = {s for ref in program.outputs for s in storages(ref)}
    return faults + [f"output in storage {s}, in flight since op {arriving[s]}" for s in ends & arriving.keys()]
