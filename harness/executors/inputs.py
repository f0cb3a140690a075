"""The inputs of one trial: for every rank and input of a Program a concrete half and a field half, shared storages shared."""

from __future__ import annotations

import zlib
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from harness.executors.algebra import Field
from harness.spec.dtypes import DTYPES
from harness.spec.program import Program, TensorSpec, contiguous_stride, storage_numel

__all__ = ["RankInputs", "TrialKind", "clone", "draw_concrete", "draw_inputs", "fresh", "trial_seed"]

TrialKind = Literal["small", "normal"]

_SMALL: Final = 4
_INT_LIMIT: Final = {"int64": 2**40, "int32": 2**26, "int16": 2**12, "int8": 2**6, "uint8": 2**8, "bool": 2}


class RankInputs(NamedTuple):
    """One rank's inputs, in the Program's order: concrete tensors, and int64 field tensors of the same geometry."""

    concrete: list[Tensor]
    field: list[Tensor]


def trial_seed(seed: int, number: int) -> int:
    """The seed of a check's trial ``number``, for its field and its inputs."""
    return zlib.crc32(f"{seed}/{number}".encode())


def draw_inputs(program: Program, kind: TrialKind, field: Field, seed: int) -> list[RankInputs]:
    """Draw all inputs of one trial, one entry a rank.

    ``small`` gives small integers in every dtype, so that sums over ranks are exact; ``normal`` gives ordinary floats and
    integers that a float32 cannot hold. An input with ``data`` has that data in both. The same arguments give the same values.
    """
    concrete = [draw_concrete(program, kind, seed, rank) for rank in range(program.world_size)]
    generator = torch.Generator().manual_seed(seed)
    return [RankInputs(own, _draw_field(program, own, field, generator)) for own in concrete]


def draw_concrete(program: Program, kind: TrialKind, seed: int, rank: int) -> list[Tensor]:
    """The concrete half alone of one rank's inputs, as ``draw_inputs`` gives it."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{rank}".encode()))
    drawn: list[Tensor] = []
    for spec in program.inputs:
        geometry = (spec.shape, _strides(spec), spec.storage_offset)
        if spec.view_of is not None:
            drawn.append(drawn[spec.view_of].as_strided(*geometry))
            continue
        value = _values(_held(spec), spec, kind, generator).as_strided(*geometry)
        if spec.data is not None:
            value.copy_(_stored(spec, rank))
        drawn.append(value)
    return drawn


def fresh(inputs: RankInputs, program: Program) -> RankInputs:
    """A copy that may be written to: storages are cloned, inputs that share one still do."""
    return RankInputs(clone(inputs.concrete, program), clone(inputs.field, program))


def clone(tensors: list[Tensor], program: Program, device: str | None = None) -> list[Tensor]:
    """A copy of one half, of the same geometry and aliasing, on ``device``."""

    def copied(tensor: Tensor) -> Tensor:
        return tensor.clone() if device is None else tensor.to(device, copy=True)

    result: list[Tensor] = []
    for spec, tensor in zip(program.inputs, tensors, strict=True):
        if spec.view_of is not None:
            base = result[spec.view_of]
            result.append(base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
        elif spec.stride is None and spec.storage_offset == 0:
            result.append(copied(tensor))
        else:
            flat = tensor.as_strided((_held(spec),), (1,), 0)
            result.append(copied(flat).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    return result


def _held(spec: TensorSpec) -> int:
    return storage_numel(spec.shape, _strides(spec), spec.storage_offset)


def _draw_field(program: Program, concrete: list[Tensor], field: Field, generator: torch.Generator) -> list[Tensor]:
    halves: list[Tensor] = []
    for spec, own in zip(program.inputs, concrete, strict=True):
        geometry = (own.shape, own.stride(), own.storage_offset())
        if spec.view_of is not None:
            halves.append(halves[spec.view_of].as_strided(*geometry))
        else:
            halves.append(field.random((_held(spec),), (1,), spec.dtype, generator).as_strided(*geometry))
    return halves


def _strides(spec: TensorSpec) -> tuple[int, ...]:
    return contiguous_stride(spec.shape) if spec.stride is None else spec.stride


def _stored(spec: TensorSpec, rank: int) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    data = (spec.data or ())[rank]
    if not data:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(spec.shape)


def _values(numel: int, spec: TensorSpec, kind: TrialKind, generator: torch.Generator) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    if DTYPES[spec.dtype].kind != "float":
        limit = spec.high or (_SMALL if kind == "small" and spec.dtype != "bool" else _INT_LIMIT[spec.dtype])
        low = 0 if spec.high or DTYPES[spec.dtype].kind != "int" else 1 - limit
        return torch.randint(low, limit, (numel,), generator=generator, dtype=torch.int64).to(dtype)
    if kind == "small":
        return torch.randint(1 - _SMALL, _SMALL, (numel,), generator=generator, dtype=torch.int64).to(dtype)
    return torch.randn(numel, generator=generator).to(dtype)
