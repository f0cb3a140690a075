"""A Program in the making, valid at every step.

The builder knows the metadata of every value, which storages are in flight, and which values may be read or written now. What it
offers (``readable``, ``writable``) is right by construction; whoever adds an op sees to the op's own preconditions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from harness.ops import infer
from harness.spec.meta import TensorMeta
from harness.spec.program import Arg, Group, GroupArg, Op, PerRank, Program, Ref, TensorSpec, contiguous_stride

__all__ = ["MAX_NUMEL", "Builder", "Flight", "Options", "Value", "is_injective"]

MAX_NUMEL: Final = 1024
"""The elements that a value may have at most where an op would make more of them."""

_WAIT: Final = "_c10d_functional.wait_tensor.default"


class Options(NamedTuple):
    """What programs are drawn from; see ``collective_programs``."""

    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    reduce_ops: tuple[str, ...]
    max_collectives: int
    max_ops: int
    writes: bool


class Value:
    """One tensor: an input (``op`` below 0: input ``-1 - op``), or item ``item`` of the result of op ``op``.

    ``num_users`` counts ops that read it; ``is_dead`` keeps it from being returned for want of users.
    """

    __slots__ = ("is_dead", "item", "meta", "num_users", "op")

    def __init__(self, op: int, item: int | None, meta: TensorMeta) -> None:
        self.op = op
        self.item = item
        self.meta = meta
        self.num_users = 0
        self.is_dead = False


class Flight:
    """A started collective: what it writes and nobody has waited for, and the storages that it reads.

    ``post`` says what becomes of the result once it is there; ``is_lost``: nobody will ever wait.
    """

    __slots__ = ("inputs", "is_lost", "outputs", "post")

    def __init__(self, outputs: list[Value], inputs: list[int], post: str, is_lost: bool) -> None:
        self.outputs = outputs
        self.inputs = inputs
        self.post = post
        self.is_lost = is_lost


class Builder:
    """Collects inputs, ops and outputs of one program for ``world_size`` ranks with ``groups``."""

    def __init__(self, world_size: int, groups: tuple[Group, ...], options: Options) -> None:
        self.world_size = world_size
        self.groups = groups
        self.options = options
        self.sizes = {group.name: group.size for group in groups}
        self.inputs: list[TensorSpec] = []
        self.input_values: list[Value] = []
        self.ops: list[tuple[str, tuple[Any, ...], dict[str, Arg]]] = []
        self.values: list[Value] = []
        self.flights: list[Flight] = []
        self.waited: list[tuple[Value, Value]] = []
        self.returned: list[Value] = []
        self.num_collectives = 0
        self._num_storages = 0
        self._reading: dict[int, int] = {}
        self._arriving: set[int] = set()

    def has_room(self, num_ops: int = 1) -> bool:
        """Whether ``num_ops`` more ops fit beside the waits that are still to come."""
        num_waits = sum(len(f.outputs) for f in self.flights if not f.is_lost)
        return len(self.ops) + num_waits + num_ops <= self.options.max_ops

    def add_input(self, spec: TensorSpec) -> Value:
        """A new input; one that is a view shares the storage of its base."""
        if spec.view_of is None:
            storage, self._num_storages = self._num_storages, self._num_storages + 1
        else:
            storage = self.input_values[spec.view_of].meta.storage
        stride = contiguous_stride(spec.shape) if spec.stride is None else spec.stride
        meta = TensorMeta(spec.shape, stride, spec.dtype, spec.storage_offset, storage)
        self.inputs.append(spec)
        value = Value(-len(self.inputs), None, meta)
        self.input_values.append(value)
        self.values.append(value)
        return value

    def bases(self, fits: Callable[[TensorSpec, TensorMeta], bool]) -> list[int]:
        """The inputs that a new input may be a view of: readable now, no views themselves, no indices, and as ``fits`` wants."""
        return [
            i
            for i, (spec, value) in enumerate(zip(self.inputs, self.input_values, strict=True))
            if spec.view_of is None and spec.high is None and value.meta.storage not in self._arriving and fits(spec, value.meta)
        ]

    def add_all(self, target: str, *args: Any, **kwargs: Arg) -> list[Value]:
        """Add an op; its results, ready to be used.

        Args:
            target: the overload by its full name.
            args: as in a Program, with ``Value`` in place of ``Ref``; one whose op is in place must be writable.
            kwargs: as in a Program.

        Raises:
            harness.ops.OpError: a precondition is broken.
        """
        results = self.add_hidden(target, *args, **kwargs)
        self.values += results
        return results

    def add(self, target: str, *args: Any, **kwargs: Arg) -> Value:
        """Like ``add_all``, for an op with one result."""
        return self.add_all(target, *args, **kwargs)[0]

    def add_hidden(self, target: str, *args: Any, **kwargs: Any) -> list[Value]:
        """Like ``add_all``, for results that no later op may use."""
        named = {k: v.meta if isinstance(v, Value) else v for k, v in kwargs.items()}
        result = infer(target, tuple([_metas(a) for a in args]), named, self.sizes)
        number = len(self.ops)
        self.ops.append((target, args, kwargs))
        if isinstance(result, TensorMeta):
            return [Value(number, None, self._numbered(result))]
        return [Value(number, k, self._numbered(meta)) for k, meta in enumerate(result)]

    def _numbered(self, meta: TensorMeta) -> TensorMeta:
        if meta.storage >= 0:
            return meta
        self._num_storages += 1
        return meta._replace(storage=self._num_storages - 1)

    def write(self, target: str, *args: Any, returns: bool = False) -> None:
        """Add an op that writes its first argument; ``returns``: what it returns is a value of its own, another name of that."""
        results = self.add_hidden(target, *args)
        if returns and results:
            _use(args)
            self.values += results
        else:
            _use(args[1:])

    def read(self, target: str, *args: Any, **kwargs: Arg) -> Value:
        """Add an op that reads all its arguments; its one result."""
        return self.read_all(target, *args, **kwargs)[0]

    def read_all(self, target: str, *args: Any, **kwargs: Arg) -> list[Value]:
        """Add an op that reads all its arguments; its results."""
        _use(args)
        return self.add_all(target, *args, **kwargs)

    def start(self, target: str, operands: Sequence[Value], *args: Any, post: str = "return", is_lost: bool = False, **kwargs: Any) -> Flight:
        """Start a collective on ``operands``; what it reads and writes is in flight until it is waited for.

        Args:
            target: the overload by its full name.
            operands: readable and contiguous; writable too, for an op in place.
            args, kwargs: those of the op.
            post, is_lost: see ``Flight``.
        """
        _use(args)
        outputs = self.add_hidden(target, *args, **kwargs)
        inputs = [v.meta.storage for v in operands]
        for storage in inputs:
            self._reading[storage] = self._reading.get(storage, 0) + 1
        self._arriving.update(v.meta.storage for v in outputs)
        self.num_collectives += 1
        flight = Flight(outputs, inputs, post, is_lost)
        self.flights.append(flight)
        return flight

    def wait(self, flight: Flight) -> list[Value]:
        """Wait for all that a collective writes; the results."""
        results = []
        for output in flight.outputs:
            self._arriving.discard(output.meta.storage)
            results.append(self.add(_WAIT, output))
            self.waited.append((output, results[-1]))
        for storage in flight.inputs:
            self._reading[storage] -= 1
        self.flights.remove(flight)
        return results

    def finished(self) -> list[tuple[Value, Value]]:
        """What collectives started and the results of the waits for it, where nothing is in flight to that memory now."""
        return [pair for pair in self.waited if pair[0].meta.storage not in self._arriving]

    def wait_again(self, start: Value) -> Value:
        """One more wait for a collective that is ``finished``."""
        return self.add(_WAIT, start)

    def readable(self, fits: Callable[[TensorMeta], bool] | None = None) -> list[Value]:
        """The values that may be read now and whose metadata ``fits``, in order of appearance."""
        arriving = self._arriving
        if fits is None:
            return [v for v in self.values if v.meta.storage not in arriving]
        return [v for v in self.values if v.meta.storage not in arriving and fits(v.meta)]

    def writable(self, fits: Callable[[TensorMeta], bool] | None = None) -> list[Value]:
        """The values that may be written in place now: read by no collective in flight, no two elements in one place."""
        return [v for v in self.readable(fits) if not self._reading.get(v.meta.storage) and is_injective(v.meta)]

    def can_return(self, value: Value) -> bool:
        """Whether a value may be an output."""
        return value.meta.storage not in self._arriving

    def program(self) -> Program:
        """The program: what has no user is returned, and then what was asked for; groups that nothing uses are left out."""
        outputs = [v for v in self.values if v.op >= 0 and not v.num_users and not v.is_dead and self.can_return(v)]
        outputs += [v for v in self.returned if self.can_return(v)]
        num_inputs = len(self.inputs)

        def resolved(arg: Any) -> Any:
            if isinstance(arg, Value):
                return Ref(-1 - arg.op if arg.op < 0 else num_inputs + arg.op, arg.item)
            return tuple([resolved(a) for a in arg]) if type(arg) is tuple else arg

        ops = tuple(
            [Op(target, resolved(args), {k: resolved(v) for k, v in kwargs.items()}) for target, args, kwargs in self.ops]
        )
        named = {arg.name for _, args, _ in self.ops for arg in args if isinstance(arg, GroupArg)}
        groups = tuple([g for g in self.groups if g.name in named]) or self.groups[:1]
        return Program(self.world_size, groups, tuple(self.inputs), ops, tuple([resolved(v) for v in outputs]))


def _metas(arg: Any) -> Any:
    if isinstance(arg, Value):
        return arg.meta
    if type(arg) is tuple:
        return tuple([_metas(a) for a in arg])
    return arg.values[0] if isinstance(arg, PerRank) else arg


def _use(args: tuple[Any, ...]) -> None:
    for arg in args:
        if isinstance(arg, Value):
            arg.num_users += 1
        elif type(arg) is tuple:
            _use(arg)


def is_injective(meta: TensorMeta) -> bool:
    """Whether no two elements share a place in memory (a sufficient condition: each stride steps over all that lies below it)."""
    if 0 in meta.shape:
        return True
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(meta.stride, meta.shape, strict=True) if size > 1):
        if step <= reach:
            return False
        reach += (size - 1) * step
    return True
