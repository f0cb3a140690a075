"""Views: results that share memory with their operand (``reshape`` where it can)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.ops.core import OpSpec, fresh, infer_size, require, view_stride, wrap_dim
from harness.spec.dtypes import DTYPES
from harness.spec.meta import TensorMeta
from harness.spec.program import storage_numel

__all__ = ["VIEWS"]


def view(self: TensorMeta, size: Sequence[int]) -> TensorMeta:
    shape = infer_size(size, self.numel)
    stride = view_stride(self, shape)
    require(stride is not None, f"view of shape {list(self.shape)}, stride {list(self.stride)} as {list(shape)} needs a copy; use reshape")
    assert stride is not None
    return self._replace(shape=shape, stride=stride)


def reshape(self: TensorMeta, shape: Sequence[int]) -> TensorMeta:
    sizes = infer_size(shape, self.numel)
    stride = view_stride(self, sizes)
    return fresh(sizes, self.dtype) if stride is None else self._replace(shape=sizes, stride=stride)


def flatten(self: TensorMeta, start_dim: int = 0, end_dim: int = -1) -> TensorMeta:
    first, last = wrap_dim(start_dim, len(self.shape)), wrap_dim(end_dim, len(self.shape))
    require(first <= last, f"flatten from {first} to {last}")
    if not self.shape:
        return reshape(self, (1,))
    if first == last:
        return self
    merged = 1
    for size in self.shape[first : last + 1]:
        merged *= size
    return reshape(self, (*self.shape[:first], merged, *self.shape[last + 1 :]))


def view_dtype(self: TensorMeta, dtype: str) -> TensorMeta:
    old, new = DTYPES[self.dtype].itemsize, DTYPES[dtype].itemsize
    if old == new:
        return self._replace(dtype=dtype)
    require(bool(self.shape), f"a 0-d tensor of {self.dtype} cannot be seen as {dtype}")
    require(self.stride[-1] == 1, f"stride of the last dimension is {self.stride[-1]}; must be 1 to see {self.dtype} as {dtype}")
    if new < old:
        factor = old // new
        stride = (*(s * factor for s in self.stride[:-1]), 1)
        return self._replace(shape=(*self.shape[:-1], self.shape[-1] * factor), stride=stride, offset=self.offset * factor, dtype=dtype)
    factor = new // old
    require(self.shape[-1] % factor == 0, f"last dimension is {self.shape[-1]}; must be divisible by {factor} to see {self.dtype} as {dtype}")
    require(self.offset % factor == 0, f"storage offset is {self.offset}; must be divisible by {factor} to see {self.dtype} as {dtype}")
    for i, step in enumerate(self.stride[:-1]):
        require(step % factor == 0, f"stride {i} is {step}; must be divisible by {factor} to see {self.dtype} as {dtype}")
    stride = (*(s // factor for s in self.stride[:-1]), 1)
    return self._replace(shape=(*self.shape[:-1], self.shape[-1] // factor), stride=stride, offset=self.offset // factor, dtype=dtype)


def transpose(self: TensorMeta, dim0: int, dim1: int) -> TensorMeta:
    a, b = wrap_dim(dim0, len(self.shape)), wrap_dim(dim1, len(self.shape))
    if not self.shape:
        return self
    order = list(range(len(self.shape)))
    order[a], order[b] = order[b], order[a]
    return permute(self, order)


def t(self: TensorMeta) -> TensorMeta:
    require(len(self.shape) <= 2, f"t() of {len(self.shape)} dimensions; at most 2")
    return transpose(self, 0, 1) if len(self.shape) == 2 else self


def permute(self: TensorMeta, dims: Sequence[int]) -> TensorMeta:
    order = [wrap_dim(d, len(self.shape)) for d in dims]
    require(sorted(order) == list(range(len(self.shape))), f"dims {list(dims)} are no permutation of {len(self.shape)} dimensions")
    return self._replace(shape=tuple(self.shape[d] for d in order), stride=tuple(self.stride[d] for d in order))


def slice_(self: TensorMeta, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> TensorMeta:
    require(bool(self.shape), "a 0-d tensor cannot be sliced")
    require(step > 0, f"step {step}; must be above 0")
    d = wrap_dim(dim, len(self.shape))
    size = self.shape[d]
    first = 0 if start is None else start
    last = size if end is None else end
    first = min(max(first + size if first < 0 else first, 0), size)
    last = min(max(last + size if last < 0 else last, first), size)
    length = (last - first + step - 1) // step
    shape = (*self.shape[:d], length, *self.shape[d + 1 :])
    stride = (*self.stride[:d], self.stride[d] * step, *self.stride[d + 1 :])
    return self._replace(shape=shape, stride=stride, offset=self.offset + first * self.stride[d])


def narrow(self: TensorMeta, dim: int, start: int, length: int) -> TensorMeta:
    require(bool(self.shape), "a 0-d tensor cannot be narrowed")
    d = wrap_dim(dim, len(self.shape))
    size = self.shape[d]
    first = start + size if start < 0 else start
    require(0 <= first <= size and 0 <= length <= size - first, f"narrow from {start} by {length} of {size}")
    return slice_(self, d, first, first + length)


def select(self: TensorMeta, dim: int, index: int) -> TensorMeta:
    require(bool(self.shape), "nothing can be selected from a 0-d tensor")
    d = wrap_dim(dim, len(self.shape))
    size = self.shape[d]
    require(-size <= index < size, f"index {index} of {size}")
    return self._replace(
        shape=self.shape[:d] + self.shape[d + 1 :],
        stride=self.stride[:d] + self.stride[d + 1 :],
        offset=self.offset + index % size * self.stride[d],
    )


def split(self: TensorMeta, split_size: int, dim: int = 0) -> tuple[TensorMeta, ...]:
    require(bool(self.shape), "a 0-d tensor cannot be split")
    d = wrap_dim(dim, len(self.shape))
    size = self.shape[d]
    require(split_size > 0 or (split_size == 0 and size == 0), f"split size {split_size} of {size}")
    count = max((size + split_size - 1) // split_size, 1) if split_size else 1
    return tuple(slice_(self, d, i * split_size, min((i + 1) * split_size, size)) for i in range(count))


def split_with_sizes(self: TensorMeta, split_sizes: Sequence[int], dim: int = 0) -> tuple[TensorMeta, ...]:
    require(bool(self.shape), "a 0-d tensor cannot be split")
    d = wrap_dim(dim, len(self.shape))
    require(min(split_sizes, default=0) >= 0 and sum(split_sizes) == self.shape[d], f"split sizes {list(split_sizes)} of {self.shape[d]}")
    parts, start = [], 0
    for size in split_sizes:
        parts.append(slice_(self, d, start, start + size))
        start += size
    return tuple(parts)


def unbind(self: TensorMeta, dim: int = 0) -> tuple[TensorMeta, ...]:
    require(bool(self.shape), "a 0-d tensor cannot be unbound")
    d = wrap_dim(dim, len(self.shape))
    return tuple(select(self, d, i) for i in range(self.shape[d]))


def unsqueeze(self: TensorMeta, dim: int) -> TensorMeta:
    d = wrap_dim(dim, len(self.shape) + 1)
    step = 1 if d == len(self.shape) else self.shape[d] * self.stride[d]
    return self._replace(shape=(*self.shape[:d], 1, *self.shape[d:]), stride=(*self.stride[:d], step, *self.stride[d:]))


def squeeze(self: TensorMeta) -> TensorMeta:
    return _without(self, [i for i, size in enumerate(self.shape) if size == 1])


def squeeze_dim(self: TensorMeta, dim: int) -> TensorMeta:
    d = wrap_dim(dim, len(self.shape))
    return _without(self, [d] if self.shape and self.shape[d] == 1 else [])


def _without(meta: TensorMeta, dims: Sequence[int]) -> TensorMeta:
    keep = [i for i in range(len(meta.shape)) if i not in dims]
    return meta._replace(shape=tuple(meta.shape[i] for i in keep), stride=tuple(meta.stride[i] for i in keep))


def expand(self: TensorMeta, size: Sequence[int], *, implicit: bool = False) -> TensorMeta:
    lead = len(size) - len(self.shape)
    require(lead >= 0, f"expand of {list(self.shape)} to {list(size)}: fewer dimensions")
    shape: list[int] = []
    stride: list[int] = []
    for i in range(len(size) - 1, -1, -1):
        own, step = (self.shape[i - lead], self.stride[i - lead]) if i >= lead else (1, None)
        wanted = size[i]
        if wanted == -1:
            require(i >= lead, "expand: -1 for a new dimension")
            wanted = own
        require(own in (1, wanted) and wanted >= 0, f"expand of {list(self.shape)} to {list(size)}")
        if step is None:
            step = shape[-1] * stride[-1] if shape else 1
        shape.append(wanted)
        stride.append(0 if own != wanted else step)
    return self._replace(shape=tuple(reversed(shape)), stride=tuple(reversed(stride)))


def as_strided(self: TensorMeta, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> TensorMeta:
    require(len(size) == len(stride), f"{len(size)} sizes and {len(stride)} strides")
    offset = self.offset if storage_offset is None else storage_offset
    held = storage_numel(self.shape, self.stride, self.offset)
    needed = storage_numel(tuple(size), tuple(stride), offset)
    require(min((*size, *stride, offset), default=0) >= 0 and needed <= max(held, needed if 0 in size else 0), f"as_strided needs {needed} elements of {held}")
    return self._replace(shape=tuple(size), stride=tuple(stride), offset=offset)


def diagonal(self: TensorMeta, offset: int = 0, dim1: int = 0, dim2: int = 1) -> TensorMeta:
    a, b = wrap_dim(dim1, len(self.shape)), wrap_dim(dim2, len(self.shape))
    require(len(self.shape) >= 2 and a != b, "a diagonal needs two dimensions")
    rows, columns = self.shape[a], self.shape[b]
    length = max(min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns), 0)
    skip = 0 if length == 0 else offset * self.stride[b] if offset >= 0 else -offset * self.stride[a]
    keep = [i for i in range(len(self.shape)) if i not in (a, b)]
    return self._replace(
        shape=(*(self.shape[i] for i in keep), length),
        stride=(*(self.stride[i] for i in keep), self.stride[a] + self.stride[b]),
        offset=self.offset + skip,
    )


def same(self: TensorMeta) -> TensorMeta:
    return self


def _declare(target: str, rule: Callable[..., object]) -> OpSpec:
    return OpSpec(f"aten.{target}", "view", rule)  # type: ignore[arg-type]


VIEWS = (
    _declare("view.default", view),
    _declare("_unsafe_view.default", view),
    _declare("reshape.default", reshape),
    _declare("flatten.using_ints", flatten),
    _declare("view.dtype", view_dtype),
    _declare("transpose.int", transpose),
    _declare("t.default", t),
    _declare("permute.default", permute),
    _declare("slice.Tensor", slice_),
    _declare("narrow.default", narrow),
    _declare("select.int", select),
    _declare("split.Tensor", split),
    _declare("split_with_sizes.default", split_with_sizes),
    _declare("unbind.int", unbind),
    _declare("unsqueeze.default", unsqueeze),
    _declare("squeeze.default", squeeze),
    _declare("squeeze.dim", squeeze_dim),
    _declare("expand.default", expand),
    _declare("as_strided.default", as_strided),
    _declare("diagonal.default", diagonal),
    _declare("detach.default", same),
    _declare("alias.default", same),
)
