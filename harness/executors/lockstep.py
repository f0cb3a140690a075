"""Lockstep: all ranks of a program in one process, collectives being operations on the list of ranks' values.

Graph r runs on rank r. A started collective is queued on its group's part; when every member has started its k-th, it is
carried out on all of them, in rank order. A rank that waits for one that is not complete gives way to the others; when none
can go on, that is a deadlock. The model is that of gloo and NCCL: collectives on one communicator match in order of issue, and a
start does not block.

Between start and wait the storages of a collective's input and output are in flight: reading or writing the output, or writing
the input, is recorded (``Flight``). What nobody has written holds poison, see ``algebra.Field.poison``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from harness.errors import Unsupported
from harness.executors.algebra import Field
from harness.executors.field_rules import dtype_name, uninitialised
from harness.executors.inputs import RankInputs
from harness.executors.plan import GET, OP, START, Instruction, Plan, compile_plan
from harness.executors.record import record
from harness.executors.watch import Watch
from harness.ops import CollectiveSpec
from harness.spec.outcome import CollectiveRecord, ErrorRecord, Outcome, RankOutcome
from harness.spec.program import Group

__all__ = ["Lockstep"]

_FLOAT_POISON: Final = float("nan")
_INT_POISON: Final = 0x5A


class Lockstep:
    """One graph a rank, compiled once and run for many trials.

    Args:
        graphs: one a rank, or a single one that all ranks run.
        groups: the program's groups; a graph names them in its collectives.
        world_size: the number of ranks.
        views_may_copy: run ``aten.view`` as ``aten.reshape``, which is how Inductor lowers it.

    Raises:
        Unsupported: an operator is not in the table; it is never guessed at.
    """

    def __init__(
        self, graphs: Sequence[GraphModule], groups: Sequence[Group], world_size: int, *, views_may_copy: bool = False
    ) -> None:
        plans: dict[int, Plan] = {}
        for gm in graphs:
            if id(gm) not in plans:
                plans[id(gm)] = compile_plan(gm, views_may_copy=views_may_copy)
        per_rank = [plans[id(gm)] for gm in graphs]
        self.plans = per_rank * world_size if len(per_rank) == 1 else per_rank
        if len(self.plans) != world_size:
            raise ValueError(f"{len(graphs)} graphs for {world_size} ranks; one, or one a rank, is needed")
        self.world_size = world_size
        self._places = {
            (group.name, rank): _Place(part, tuple(group.parts[part]), position)
            for group in groups
            for part, members in enumerate(group.parts)
            for position, rank in enumerate(members)
        }

    @property
    def degree(self) -> int:
        """An upper bound on the degree of any value, for the error bound."""
        return max(plan.degree for plan in self.plans)

    @property
    def num_hashes(self) -> int:
        """The number of operators that may hash, for the error bound."""
        return sum(plan.num_hashes for plan in {id(p): p for p in self.plans}.values())

    @property
    def dtypes(self) -> frozenset[str]:
        """The dtypes of all values on any rank, by name."""
        return frozenset().union(*(plan.dtypes for plan in self.plans))

    @property
    def narrows(self) -> bool:
        """Whether any value is cast to a dtype that does not represent it."""
        return any(plan.narrows for plan in self.plans)

    @property
    def is_opaque(self) -> bool:
        """Whether any operator is opaque to the field arithmetic."""
        return any(plan.is_opaque for plan in self.plans)

    def run(
        self, inputs: Sequence[RankInputs], field: Field, *, trial: str, poison_seed: int, watch: bool = True, keep: bool = False
    ) -> Outcome:
        """Run one trial; ``inputs`` are written to where the graphs do.

        Args:
            inputs: one entry a rank.
            field: the arithmetic of the field halves.
            trial: the name of the trial, for the Outcome.
            poison_seed: what unwritten memory holds; two runs to be compared are given different ones.
            watch: look for memory touched in flight (the answer is the same in every trial).
            keep: put the tensors' bytes into the Outcome.
        """
        field.poison.manual_seed(poison_seed)
        with torch.no_grad():
            ranks = [_Rank(r, plan, inputs[r], field, watch) for r, plan in enumerate(self.plans)]
            self._run_all(ranks, field)
            return Outcome(ranks=tuple(_record(rank, keep) for rank in ranks), trial=trial)

    def _run_all(self, ranks: list[_Rank], field: Field) -> None:
        queues: dict[tuple[str, int], list[list[_Started]]] = {}
        progress = True
        while progress:
            progress = False
            for rank in ranks:
                while not rank.done:
                    before = rank.at
                    started = rank.advance()
                    progress = progress or rank.at != before
                    if started is None:
                        break
                    self._enqueue(started, queues, ranks, field)
        self._report_stuck(ranks, queues)

    def _enqueue(
        self, started: _Started, queues: dict[tuple[str, int], list[list[_Started]]], ranks: list[_Rank], field: Field
    ) -> None:
        rank = ranks[started.rank]
        place = self._places.get((started.group, started.rank))
        if place is None:
            rank.fail(ErrorRecord("Divergence", f"rank {started.rank} is in no part of group {started.group!r}", started.node))
            return
        started.place = place
        queue = queues.setdefault((started.group, place.part), [])
        number = rank.num_started.get(started.group, 0)
        rank.num_started[started.group] = number + 1
        if number == len(queue):
            queue.append([])
        slot = queue[number]
        slot.append(started)
        if len(slot) < len(place.members):
            return
        slot.sort(key=lambda one: one.place.position)
        disagreement = _disagreement(slot)
        if disagreement:
            for one in slot:
                ranks[one.rank].fail(ErrorRecord("Divergence", disagreement, one.node))
            return
        try:
            _carry_out(slot, ranks, field)
        except (RuntimeError, ValueError, IndexError) as error:
            for one in slot:
                ranks[one.rank].fail(ErrorRecord(type(error).__name__, str(error), one.node))
            return
        for one in slot:
            one.complete = True

    def _report_stuck(self, ranks: list[_Rank], queues: dict[tuple[str, int], list[list[_Started]]]) -> None:
        stuck = [rank for rank in ranks if not rank.done]
        missing = [slot for queue in queues.values() for slot in queue if len(slot) < len(slot[0].place.members)]
        if stuck:
            waits = [f"rank {r.number} waits at {r.waiting_where} for {r.waiting_for}" for r in stuck]
            lacking = [
                f"{slot[0].describe()} lacks ranks {sorted(set(slot[0].place.members) - {s.rank for s in slot})}" for slot in missing
            ]
            message = "; ".join(waits + lacking)
            for rank in stuck:
                rank.fail(ErrorRecord("Deadlock", message, rank.waiting_at))
            return
        if any(rank.error for rank in ranks):
            return
        for slot in missing:
            absent = sorted(set(slot[0].place.members) - {s.rank for s in slot})
            for one in slot:
                message = f"{one.describe()} was started by ranks {[s.rank for s in slot]} but never by ranks {absent}"
                ranks[one.rank].fail(ErrorRecord("Divergence", message, one.node))


class _Place(NamedTuple):
    part: int
    members: tuple[int, ...]
    position: int


_NOWHERE: Final = _Place(-1, (), -1)


@dataclass(slots=True)
class _Started:
    """A collective as one rank started it; inputs and outputs as lists of tensors and of their field halves."""

    rank: int
    node: str
    where: str
    kind: str
    group: str
    reduce_op: str | None
    inputs: list[Tensor]
    halves: list[Tensor | None]
    outputs: list[Tensor]
    output_halves: list[Tensor | None]
    extra: tuple[Any, ...]
    place: _Place = _NOWHERE
    complete: bool = False

    def describe(self) -> str:
        op = f" {self.reduce_op}" if self.reduce_op else ""
        sizes = ", ".join(f"{dtype_name(t.dtype)}{list(t.shape)}" for t in self.inputs)
        return f"{self.kind}{op} of {sizes} on group {self.group!r} ({self.where})"


class _Rank:
    """One rank's registers and place in its plan."""

    def __init__(self, number: int, plan: Plan, inputs: RankInputs, field: Field, watch: bool) -> None:
        self.number = number
        self.plan = plan
        self.field = field
        self.at = 0
        self.done = False
        self.error: ErrorRecord | None = None
        self.c: list[Any] = [*inputs.concrete, *[None] * (plan.num_slots - plan.num_inputs)]
        self.f: list[Any] = [*inputs.field, *[None] * (plan.num_slots - plan.num_inputs)]
        self.versions = [t._version for t in inputs.concrete]
        self.num_started: dict[str, int] = {}
        self.pending: dict[int, _Started] = {}
        self.collectives: list[CollectiveRecord] = []
        self.watch: Watch | None = Watch() if watch else None
        self.has_void = False
        self.waiting_at: str | None = None
        self.waiting_where = ""
        self.waiting_for = ""

    def fail(self, error: ErrorRecord) -> None:
        if self.error is None:
            self.error = error
        self.done = True

    def advance(self) -> _Started | None:
        """Run until a collective starts (it is returned) or this rank is done or must wait (None)."""
        instructions, at = self.plan.instructions, self.at
        try:
            while at < len(instructions):
                instruction = instructions[at]
                code = instruction.code
                if code == OP:
                    self._op(instruction)
                elif code == GET:
                    self._get(instruction)
                elif code == START:
                    started = self._start(instruction)
                    at += 1
                    return started
                elif not self._wait(instruction):
                    return None
                at += 1
        except Unsupported:
            raise
        except Exception as error:  # the program's own failure is an outcome
            self.fail(ErrorRecord(type(error).__name__, str(error), instructions[at].name))
            return None
        finally:
            self.at = at
        if self.watch is not None:
            self.watch.at_end([self.c[s] for s in self.plan.output_slots if s is not None])
        self.done = True
        return None

    def _arguments(self, instruction: Instruction) -> tuple[list[Any], list[Any]]:
        c, f = self.c, self.f
        args = instruction.args.copy()
        halves = args.copy()
        for i, slot in instruction.fills:
            args[i] = c[slot]
            halves[i] = f[slot]
        for i, inner in instruction.list_fills:
            args[i] = args[i].copy()
            halves[i] = halves[i].copy()
            for j, slot in inner:
                args[i][j] = c[slot]
                halves[i][j] = f[slot]
        return args, halves

    def _is_void(self, instruction: Instruction) -> bool:
        f = self.f
        return any(f[slot] is None for _, slot in instruction.fills) or any(
            f[slot] is None for _, inner in instruction.list_fills for _, slot in inner
        )

    def _op(self, instruction: Instruction) -> None:
        args, halves = self._arguments(instruction)
        watch, slot = self.watch, instruction.slot
        if watch is not None:
            watch.touch(instruction, args)
        out = self.c[slot] = instruction.fn(*args, **instruction.kwargs)
        if instruction.poisons:
            out.fill_(_FLOAT_POISON if out.dtype.is_floating_point else _INT_POISON)
        if watch is not None:
            watch.metadata(instruction, out)
        if self.has_void and self._is_void(instruction):
            for position in instruction.writes:
                self.void(args[position])
            if instruction.is_view:
                self.void(out)
            return
        rule = instruction.rule
        if rule is None:
            self.f[slot] = instruction.fn(*halves, **_without_dtype(instruction.kwargs))
            return
        half = rule(self.field, args, halves, instruction.kwargs, out)
        if half is None:
            self.void(out)
        elif type(half) is Tensor and instruction.is_new and (half.stride() != out.stride() or half.shape != out.shape):
            half = torch.empty_strided(out.shape, out.stride(), dtype=torch.int64).copy_(half)
        self.f[slot] = half

    def void(self, tensors: Any) -> None:
        """Memory was reinterpreted: nothing that shares it has a field half any more."""
        self.has_void = True
        for tensor in tensors if isinstance(tensors, (list, tuple)) else (tensors,):
            storage = tensor.untyped_storage()._cdata
            for slot, value in enumerate(self.c):
                if isinstance(value, Tensor):
                    if value.untyped_storage()._cdata == storage:
                        self.f[slot] = None
                elif isinstance(value, (list, tuple)) and self.f[slot] is not None:
                    self.f[slot] = [
                        None if v.untyped_storage()._cdata == storage else h for v, h in zip(value, self.f[slot], strict=True)
                    ]

    def _get(self, instruction: Instruction) -> None:
        source, index = instruction.fills[0][1], instruction.args[1]
        self.c[instruction.slot] = self.c[source][index]
        if self.watch is not None:
            self.watch.metadata(instruction, self.c[instruction.slot])
        halves = self.f[source]
        self.f[instruction.slot] = None if halves is None else halves[index]

    def _start(self, instruction: Instruction) -> _Started:
        spec = instruction.collective
        assert spec is not None
        args, halves = self._arguments(instruction)
        inputs = args[0] if spec.coalesced else [args[0]]
        input_halves = halves[0] if spec.coalesced else [halves[0]]
        group = args[spec.group]
        reduce_op = None if spec.reduce_op is None else args[spec.reduce_op]
        size = args[spec.group_size] if spec.group_size is not None else None
        extra = _extra(spec, args)
        if spec.out is not None:
            slot = dict(instruction.kw_fills)[spec.out]
            outputs, output_halves = [self.c[slot]], [self.f[slot]]
            torch._C._increment_version(outputs)
        elif instruction.writes:
            outputs, output_halves = list(inputs), list(input_halves)
        else:
            outputs = [_allocate(spec.kind, t, size, extra) for t in inputs]
            output_halves = [None if h is None else torch.empty_like(o, dtype=torch.int64) for h, o in zip(input_halves, outputs, strict=True)]
            if self.watch is not None:
                self._poison(outputs, output_halves)
        started = _Started(
            self.number, instruction.name, instruction.where, spec.kind, group, reduce_op, inputs, input_halves, outputs, output_halves, extra
        )
        for output in outputs:
            self.pending[output.untyped_storage()._cdata] = started
        if self.watch is not None:
            self.watch.start(instruction, inputs, outputs)
        if spec.coalesced:
            self.c[instruction.slot], self.f[instruction.slot] = outputs, output_halves
        else:
            self.c[instruction.slot], self.f[instruction.slot] = outputs[0], output_halves[0]
        if self.watch is not None:
            self.watch.metadata(instruction, self.c[instruction.slot])
            self.collectives.append(
                CollectiveRecord(
                    spec.kind,
                    group,
                    reduce_op,
                    tuple(dtype_name(t.dtype) for t in inputs),
                    sum(t.numel() * t.element_size() for t in inputs),
                    instruction.name,
                )
            )
        return started

    def _poison(self, outputs: list[Tensor], halves: list[Tensor | None]) -> None:
        """Until a wait a result holds poison; only where touching it is watched for, since completion overwrites all of it."""
        for output, half in zip(outputs, halves, strict=True):
            output.fill_(_FLOAT_POISON if output.dtype.is_floating_point else _INT_POISON)
            if half is not None:
                half.copy_(uninitialised(self.field, output))

    def _wait(self, instruction: Instruction) -> bool:
        source = instruction.fills[0][1]
        value = self.c[source]
        storage = value.untyped_storage()._cdata
        started = self.pending.get(storage)
        if started is not None and not started.complete:
            self.waiting_at, self.waiting_where = instruction.name, instruction.where
            self.waiting_for = f"{started.kind} on group {started.group!r} ({started.where})"
            return False
        if self.watch is not None:
            self.watch.wait(storage)
            self.watch.metadata(instruction, value)
        self.c[instruction.slot] = value
        self.f[instruction.slot] = self.f[source]
        return True


def _without_dtype(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if k not in ("dtype", "device", "layout", "pin_memory")} if kwargs else kwargs


def _extra(spec: CollectiveSpec, args: list[Any]) -> tuple[Any, ...]:
    """What besides the operands must agree: split sizes of an all_to_all, the source of a broadcast."""
    if spec.kind == "all_to_all":
        return tuple(tuple(a) if a else None for a in args[1:3])
    return (args[1],) if spec.kind == "broadcast" else ()


def _allocate(kind: str, x: Tensor, size: int | None, extra: tuple[Any, ...]) -> Tensor:
    if kind == "all_gather":
        rows = x.shape[0] * (size or 1)
    elif kind == "reduce_scatter":
        rows = x.shape[0] // (size or 1)
    elif kind == "all_to_all" and extra[0] is not None:
        rows = sum(extra[0])
    else:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return x.new_empty((rows, *x.shape[1:]))


def _disagreement(slot: list[_Started]) -> str | None:
    """Why the members' k-th collectives do not match, or None where they do."""
    first = slot[0]
    for other in slot[1:]:
        same = (
            other.kind == first.kind
            and other.reduce_op == first.reduce_op
            and len(other.inputs) == len(first.inputs)
            and all(a.dtype is b.dtype for a, b in zip(other.inputs, first.inputs, strict=True))
            and (first.kind == "all_to_all" or [t.numel() for t in other.inputs] == [t.numel() for t in first.inputs])
            and (first.kind == "all_to_all" or other.extra == first.extra)
        )
        if not same:
            return f"rank {first.rank} starts {first.describe()} where rank {other.rank} starts {other.describe()}"
    if first.kind == "all_to_all":
        for i, sender in enumerate(slot):
            for j, receiver in enumerate(slot):
                sent, received = _splits(sender, 1)[j], _splits(receiver, 0)[i]
                if sent != received:
                    return f"rank {sender.rank} sends {sent} rows to rank {receiver.rank}, which expects {received}"
    return None


def _splits(started: _Started, which: int) -> list[int]:
    sizes = started.extra[which]
    if sizes is not None:
        return list(sizes)
    count = len(started.place.members)
    return [started.inputs[0].shape[0] // count] * count


def _carry_out(slot: list[_Started], ranks: list[_Rank], field: Field) -> None:
    """Do a matched collective: on concrete halves in rank order, and on field halves where every member has one.

    Where a member has none, no result has one, nor has any memory that a result was written to.
    """
    first = slot[0]
    for k in range(len(first.inputs)):
        inputs = [_flat(s.inputs[k]) for s in slot]
        outputs = [s.outputs[k].data for s in slot]  # a backend writes memory past the version counters
        halves = [s.halves[k] for s in slot]
        output_halves = [s.output_halves[k] for s in slot]
        _exchange(slot, inputs, outputs, None)
        if first.reduce_op == "avg":  # gloo has no such op: torch sums, then divides in place
            torch._C._increment_version([s.outputs[k] for s in slot])
        if all(h is not None for h in halves) and all(h is not None for h in output_halves):
            _exchange(slot, [_flat(h) for h in halves if h is not None], output_halves, field)
        else:
            for one in slot:
                ranks[one.rank].void(one.outputs[k])


def _exchange(slot: list[_Started], inputs: list[Tensor], outputs: list[Any], field: Field | None) -> None:
    """One tensor's part of a collective, on flattened inputs; ``field`` is None for the concrete halves.

    Bools move as bytes, as on a real backend: memory that holds something else than 0 and 1 comes through unchanged.
    """
    first = slot[0]
    kind = first.kind
    if inputs[0].dtype is torch.bool:
        inputs, outputs = [x.view(torch.uint8) for x in inputs], [x.view(torch.uint8) for x in outputs]
    if kind == "all_gather":
        _copy_to_all(outputs, torch.cat(inputs))
    elif kind in ("all_reduce", "reduce_scatter"):
        assert first.reduce_op is not None
        total = _reduce(inputs, first.reduce_op) if field is None else field.reduce(inputs, first.reduce_op)
        if kind == "all_reduce" or not total.numel():
            _copy_to_all(outputs, total)
        else:
            for output, chunk in zip(outputs, total.chunk(len(slot)), strict=True):
                output.copy_(chunk.view_as(output))
    elif kind == "broadcast":
        _copy_to_all(outputs, inputs[first.extra[0]].clone())
    else:
        sent = [_rows(x, s).split(_splits(s, 1)) for x, s in zip(inputs, slot, strict=True)]
        for j, output in enumerate(outputs):
            output.copy_(torch.cat([parts[j] for parts in sent]).view_as(output))


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x.reshape(-1)


def _copy_to_all(outputs: list[Any], flat: Tensor) -> None:
    """Every member gets the same elements, each in its own shape."""
    for output in outputs:
        if output.shape != flat.shape:
            flat = flat.view_as(output)
        output.copy_(flat)


def _rows(flat: Tensor, started: _Started) -> Tensor:
    return flat.view(started.inputs[0].shape)


def _reduce(values: list[Tensor], op: str) -> Tensor:
    result = values[0].clone()
    for value in values[1:]:
        if op in ("sum", "avg"):
            result += value
        elif op == "product":
            result *= value
        else:
            result = torch.maximum(result, value) if op == "max" else torch.minimum(result, value)
    return result.div_(len(values)) if op == "avg" else result


def _record(rank: _Rank, keep: bool) -> RankOutcome:
    count = rank.plan.num_inputs
    slots = [] if rank.error else [s for s in rank.plan.output_slots if s is not None]
    inputs, outputs = record(
        rank.c[:count], [rank.c[s] for s in slots], rank.versions, halves=[*rank.f[:count], *(rank.f[s] for s in slots)], keep=keep
    )
    return RankOutcome(
        outputs=outputs,
        inputs=inputs,
        collectives=tuple(rank.collectives),
        in_flight=tuple(rank.watch.flights) if rank.watch is not None else (),
        untrue=tuple(rank.watch.untrue) if rank.watch is not None else (),
        error=rank.error,
    )
