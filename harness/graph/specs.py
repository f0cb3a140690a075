"""The inputs of a function, one list of tensors a rank, as TensorSpecs: geometry, shared memory, values."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.errors import Unsupported
from harness.graph.analysis import storage_key
from harness.graph.private import private
from harness.spec.dtypes import DTYPES
from harness.spec.program import TensorSpec, contiguous_stride, storage_numel

__all__ = ["Inputs", "input_specs", "require_strided"]


class Inputs(NamedTuple):
    """The specs, and for each tensor given the number of its spec.

    There are more specs than tensors where tensors share memory that none of them covers: then an unused input, before
        the first
    of them, stands for all of it.
    """

    specs: tuple[TensorSpec, ...]
    numbers: tuple[int, ...]


def input_specs(per_rank: Sequence[Sequence[Tensor]]) -> Inputs:
    """What the inputs look like, which must be the same on all ranks, and the values of each rank.

    Fake tensors have no values; their specs have no ``data``.

    Args:
        per_rank: the tensors of each rank.

    Raises:
        Unsupported: ranks differ in number, shape, dtype, strides or sharing; a dtype outside the table; a tensor with
            another layout than strided; tensors of different dtypes that share memory.
    """
    first = per_rank[0]
    sharing = _sharing(first)
    expected = _described(first, sharing)
    for rank, values in enumerate(per_rank):
        _require_same(_described(values, _sharing(values)), expected, rank)
    specs: list[TensorSpec] = []
    numbers: list[int] = []
    base_of: dict[int, int] = {}
    for i, value in enumerate(first):
        together = [j for j, other in enumerate(sharing) if other == sharing[i]]
        if together[0] == i and not _covers(first, i, together):
            base_of[i] = len(specs)
            specs.append(_whole(per_rank, together))
        base = base_of.get(sharing[i])
        numbers.append(len(specs))
        if base is None:
            base_of[i] = len(specs)
        specs.append(_spec(value, base, None if base is not None else _data([values[i] for values in per_rank])))
    return Inputs(tuple(specs), tuple(numbers))


def _sharing(values: Sequence[Tensor]) -> list[int]:
    """For each tensor the first one that shares its storage."""
    seen: dict[int, int] = {}
    return [seen.setdefault(storage_key(v), i) for i, v in enumerate(require_strided(values))]


def require_strided(values: Sequence[Tensor]) -> Sequence[Tensor]:
    """The values, which a TensorSpec can describe.

    Raises:
        Unsupported: one has another layout than strided, or a dtype outside the table.
    """
    for i, value in enumerate(values):
        if value.layout is not torch.strided:
            raise Unsupported(str(value.layout)[6:], f"input {i}", "inputs must be strided")
        if str(value.dtype)[6:] not in DTYPES:
            raise Unsupported(str(value.dtype)[6:], f"input {i}", f"inputs must be of {', '.join(DTYPES)}")
    return values


def _described(values: Sequence[Tensor], sharing: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {
            "shape": tuple(v.shape),
            "dtype": str(v.dtype)[6:],
            "stride": tuple(v.stride()),
            "storage_offset": int(v.storage_offset()),
            "requires_grad": v.requires_grad,
            "first input of the same memory": share,
        }
        for v, share in zip(values, sharing, strict=True)
    ]


def _require_same(seen: list[dict[str, Any]], expected: list[dict[str, Any]], rank: int) -> None:
    if len(seen) != len(expected):
        raise Unsupported("inputs", f"rank {rank}", f"{len(seen)} tensors; rank 0 has {len(expected)}")
    for i, (mine, first) in enumerate(zip(seen, expected, strict=True)):
        for what, value in mine.items():
            if value != first[what]:
                raise Unsupported(
                    "inputs", f"input {i} of rank {rank}", f"{what} {value}; on rank 0 it is {first[what]}"
                )


def _covers(values: Sequence[Tensor], i: int, together: Sequence[int]) -> bool:
    """Whether the spec of tensor ``i`` can be the base of those that share its memory.

    Its storage must reach as far as theirs. Where there are values it must also hold each element that they see, and
    each once, since a base alone has data.
    """
    value = values[i]
    low, high = _extent(value)
    for j in together:
        if values[j].dtype != value.dtype:
            raise Unsupported("inputs", f"input {j}", f"it shares memory with input {i}, which has another dtype")
    if any(_extent(values[j])[1] > high for j in together):
        return False
    if _is_fake(value):
        return True
    if not _is_distinct(value):
        return False
    others = [_extent(values[j]) for j in together if j != i and values[j].numel()]
    return not others or (high - low == value.numel() and all(low <= first for first, _ in others))


def _extent(value: Tensor) -> tuple[int, int]:
    """The first element of the storage that ``value`` has, and the one after its last."""
    offset = int(value.storage_offset())
    return offset, storage_numel(tuple(value.shape), tuple(value.stride()), offset)


def _is_distinct(value: Tensor) -> bool:
    """Whether every element surely has a place of its own: each stride passes over all that smaller strides reach."""
    if value.numel() == 0:
        return True
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(value.stride(), value.shape, strict=True) if size > 1):
        if step <= reach:
            return False
        reach += (size - 1) * step
    return True


def _whole(per_rank: Sequence[Sequence[Tensor]], together: Sequence[int]) -> TensorSpec:
    """All of the memory that the tensors ``together`` see, as one flat tensor."""
    held = max(_extent(per_rank[0][j])[1] for j in together)
    flat = [values[together[0]].detach().as_strided((held,), (1,), 0) for values in per_rank]
    return TensorSpec((held,), str(flat[0].dtype)[6:], data=_data(flat))


def _spec(value: Tensor, base: int | None, data: tuple[bytes, ...] | None) -> TensorSpec:
    shape, stride = tuple(value.shape), tuple(value.stride())
    return TensorSpec(
        shape,
        str(value.dtype)[6:],
        None if stride == contiguous_stride(shape) else stride,
        int(value.storage_offset()),
        value.requires_grad,
        base,
        data=data,
    )


def _data(values: Sequence[Tensor]) -> tuple[bytes, ...] | None:
    return None if any(map(_is_fake, values)) else tuple(_bytes(value) for value in values)


def _is_fake(value: Tensor) -> bool:
    return isinstance(value, private("torch._subclasses.fake_tensor", "FakeTensor"))


def _bytes(value: Tensor) -> bytes:
    flat = value.detach().cpu().contiguous()
    size = flat.numel() * flat.element_size()
    return ctypes.string_at(flat.data_ptr(), size) if size else b""
