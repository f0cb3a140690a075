"""What lockstep watches one rank for: memory touched while a collective has it in flight, and metadata that is not what executes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.executors.field_rules import dtype_name
from harness.executors.plan import Instruction
from harness.spec.outcome import Flight, MetaFault

__all__ = ["Watch"]


class Watch:
    """Which storages are in flight on one rank, who touched them (``flights``), and which metadata was untrue (``untrue``)."""

    def __init__(self) -> None:
        self.outputs: dict[int, str] = {}
        self.inputs: dict[int, list[str]] = {}
        self.input_of: dict[str, list[int]] = {}
        self.flights: list[Flight] = []
        self.untrue: list[MetaFault] = []

    def touch(self, instruction: Instruction, args: list[Any]) -> None:
        """An instruction is about to read and write these arguments."""
        if not self.outputs and not self.inputs:
            return
        for position in instruction.reads:
            for storage in _storages(args[position]):
                if storage in self.outputs:
                    self._add(self.outputs[storage], instruction.name, "read_output")
        for position in instruction.writes:
            for storage in _storages(args[position]):
                if storage in self.outputs:
                    self._add(self.outputs[storage], instruction.name, "write_output")
                for collective in self.inputs.get(storage, ()):
                    self._add(collective, instruction.name, "write_input")

    def metadata(self, instruction: Instruction, out: Any) -> None:
        """Compare what executed with what the graph's metadata said of it."""
        if instruction.expected is None or not isinstance(out, Tensor):
            return
        shape, stride, dtype = instruction.expected
        seen = (tuple(out.shape), out.stride(), out.dtype)
        if seen != (tuple(shape), stride, dtype) and (
            seen[0] != tuple(shape) or seen[2] is not dtype or not _same_layout(seen[0], stride, seen[1])
        ):
            self.untrue.append(
                MetaFault(instruction.name, instruction.target, _geometry(tuple(shape), stride, dtype), _geometry(*seen))
            )

    def start(self, instruction: Instruction, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """A collective starts: its inputs and outputs are in flight from now on."""
        name = instruction.name
        ins, outs = _storages(inputs), _storages(outputs)
        for storage in ins:
            if storage in self.outputs:
                self._add(self.outputs[storage], name, "read_output")
        for storage in outs:
            if storage in self.outputs and storage not in ins:
                self._add(self.outputs[storage], name, "write_output")
            for collective in self.inputs.get(storage, ()):
                self._add(collective, name, "write_input")
        for storage in ins:
            self.inputs.setdefault(storage, []).append(name)
        for storage in outs:
            self.outputs[storage] = name
        self.input_of[name] = ins

    def wait(self, storage: int) -> None:
        """The result in ``storage`` was waited for: neither it nor what it was made of is in flight any more."""
        name = self.outputs.pop(storage, None)
        if name is None or name in self.outputs.values():
            return
        for source in self.input_of.pop(name, ()):
            users = self.inputs[source]
            users.remove(name)
            if not users:
                del self.inputs[source]

    def at_end(self, outputs: list[Any]) -> None:
        """These are returned: none may be in flight."""
        for value in outputs:
            for storage in _storages(value):
                if storage in self.outputs:
                    self._add(self.outputs[storage], "output", "read_output")

    def _add(self, collective: str, node: str, access: str) -> None:
        flight = Flight(collective, node, access)
        if flight not in self.flights:
            self.flights.append(flight)


def _same_layout(shape: tuple[int, ...], expected: tuple[int, ...], seen: tuple[int, ...]) -> bool:
    """Whether two strides place the elements alike: a dimension of size 1 may have any, an empty tensor has none."""
    return 0 in shape or all(size == 1 or a == b for size, a, b in zip(shape, expected, seen, strict=True))


def _geometry(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{dtype_name(dtype)}{list(shape)} stride {tuple(stride)}"


def _storages(value: Any) -> list[int]:
    """The storages that hold at least one element of a tensor, or of a list of them."""
    tensors = value if isinstance(value, (list, tuple)) else (value,)
    return [t.untyped_storage()._cdata for t in tensors if isinstance(t, Tensor) and t.numel()]
