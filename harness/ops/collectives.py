"""Functional collectives, their waits, and the operators that torch's bucketing passes pack and unpack buckets with.

Inputs must be contiguous, as gloo and NCCL want them; results are new contiguous tensors; a wait's result is its operand. Source:
``torch/csrc/distributed/c10d/Functional.cpp`` of torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.ops.core import CollectiveSpec, OpSpec, Part, fresh, require, tensors
from harness.spec.dtypes import DTYPES
from harness.spec.meta import TensorMeta

__all__ = ["COLLECTIVES", "REDUCE_OPS"]

REDUCE_OPS = ("sum", "avg", "max", "min", "product")


def _input(meta: TensorMeta, group: Part, size: int | None, *, dim: bool) -> TensorMeta:
    require(meta.is_contiguous, f"a collective's input has stride {list(meta.stride)}; must be contiguous")
    require(bool(meta.shape) or not dim, "a 0-d tensor cannot be gathered or scattered")
    require(size is None or size == group.size, f"group size {size}; parts of {group.name!r} have {group.size} ranks")
    return meta


def _reduce_op(meta: TensorMeta, op: str) -> None:
    require(op in REDUCE_OPS, f"reduce op {op!r}; must be one of {', '.join(REDUCE_OPS)}")
    require(not meta.dtype.startswith("float8") and meta.dtype != "bool", f"{meta.dtype} is not reduced")
    require(op != "avg" or DTYPES[meta.dtype].kind == "float", f"avg of {meta.dtype}; must be a float")


def _gathered(meta: TensorMeta, group: Part) -> TensorMeta:
    return fresh((meta.shape[0] * group.size, *meta.shape[1:]), meta.dtype)


def _scattered(meta: TensorMeta, group: Part) -> TensorMeta:
    require(meta.shape[0] % group.size == 0, f"first dimension {meta.shape[0]}; must be divisible by the {group.size} ranks of {group.name!r}")
    return fresh((meta.shape[0] // group.size, *meta.shape[1:]), meta.dtype)


def all_gather(input: TensorMeta, group_size: int, group_name: Part) -> TensorMeta:
    return _gathered(_input(input, group_name, group_size, dim=True), group_name)


def all_gather_out(input: TensorMeta, group_size: int, group_name: Part, *, out: TensorMeta) -> TensorMeta:
    result = _gathered(_input(input, group_name, group_size, dim=True), group_name)
    require(out.is_contiguous and out.dtype == result.dtype and out.numel == result.numel, f"out is {out.dtype}{list(out.shape)}; must hold {list(result.shape)} of {result.dtype}")
    return out


def all_gather_coalesced(inputs: Sequence[TensorMeta], group_size: int, group_name: Part) -> tuple[TensorMeta, ...]:
    return tuple(all_gather(m, group_size, group_name) for m in tensors(inputs, "inputs"))


def reduce_scatter(input: TensorMeta, reduce_op: str, group_size: int, group_name: Part) -> TensorMeta:
    _reduce_op(input, reduce_op)
    return _scattered(_input(input, group_name, group_size, dim=True), group_name)


def reduce_scatter_out(input: TensorMeta, reduce_op: str, group_size: int, group_name: Part, *, out: TensorMeta) -> TensorMeta:
    result = reduce_scatter(input, reduce_op, group_size, group_name)
    require(out.is_contiguous and out.dtype == result.dtype and out.numel == result.numel, f"out is {out.dtype}{list(out.shape)}; must hold {list(result.shape)} of {result.dtype}")
    return out


def reduce_scatter_coalesced(inputs: Sequence[TensorMeta], reduce_op: str, group_size: int, group_name: Part) -> tuple[TensorMeta, ...]:
    return tuple(reduce_scatter(m, reduce_op, group_size, group_name) for m in tensors(inputs, "inputs"))


def all_reduce(input: TensorMeta, reduce_op: str, group_name: Part) -> TensorMeta:
    _reduce_op(input, reduce_op)
    return fresh(_input(input, group_name, None, dim=False).shape, input.dtype)


def all_reduce_(input: TensorMeta, reduce_op: str, group_name: Part) -> TensorMeta:
    _reduce_op(input, reduce_op)
    return _input(input, group_name, None, dim=False)


def all_reduce_coalesced(inputs: Sequence[TensorMeta], reduce_op: str, group_name: Part) -> tuple[TensorMeta, ...]:
    return tuple(all_reduce(m, reduce_op, group_name) for m in tensors(inputs, "inputs"))


def all_to_all(input: TensorMeta, output_split_sizes: Sequence[int] | None, input_split_sizes: Sequence[int] | None, group_name: Part) -> TensorMeta:
    meta = _input(input, group_name, None, dim=True)
    for sizes in (output_split_sizes, input_split_sizes):
        require(not sizes or (len(sizes) == group_name.size and min(sizes) >= 0), f"split sizes {sizes} for {group_name.size} ranks")
    require(bool(output_split_sizes) and bool(input_split_sizes), "split sizes must be stated on both sides: torch takes empty ones for no rows")
    assert input_split_sizes is not None
    require(sum(input_split_sizes) == meta.shape[0], f"input split sizes {list(input_split_sizes)} of {meta.shape[0]} rows")
    assert output_split_sizes is not None
    return fresh((sum(output_split_sizes), *meta.shape[1:]), meta.dtype)


def broadcast(input: TensorMeta, src: int, group_name: Part) -> TensorMeta:
    require(0 <= src < group_name.size, f"source {src}; must be from 0 to {group_name.size - 1}")
    return fresh(_input(input, group_name, None, dim=False).shape, input.dtype)


def broadcast_(input: TensorMeta, src: int, group_name: Part) -> TensorMeta:
    require(0 <= src < group_name.size, f"source {src}; must be from 0 to {group_name.size - 1}")
    return _input(input, group_name, None, dim=False)


def wait_tensor(tensor: TensorMeta) -> TensorMeta:
    return tensor


def pre_bucket_all_gather(
    ag_ins: Sequence[TensorMeta], group_size: int, dtype: str, out_dtype_ints: Sequence[int], rank: int, foreach_group_indices: Sequence[int] | None = None
) -> TensorMeta:
    """The bucket's dtype is known, the members' dtypes are numbers of a table of the installed torch: members must share the bucket's."""
    inputs = tensors(ag_ins, "ag_ins")
    require(len(set(out_dtype_ints)) == 1 and len(out_dtype_ints) == len(inputs), "members of several dtypes are modelled only as they execute")
    return fresh((sum(m.numel for m in inputs) * group_size,), dtype)


def pre_bucket_reduce_scatter(rs_ins: Sequence[TensorMeta], group_size: int) -> TensorMeta:
    inputs = tensors(rs_ins, "rs_ins")
    require(all(m.numel % group_size == 0 and m.shape for m in inputs), f"every member must be divisible by {group_size}")
    return fresh((sum(m.numel for m in inputs),), inputs[0].dtype)


def all_gather_copy_in(
    all_gather_inputs: Sequence[TensorMeta], all_gather_output: TensorMeta, inp_split_sizes: Sequence[int], all_gather_input_numel: int, rank: int
) -> tuple[TensorMeta, TensorMeta]:
    inputs = tensors(all_gather_inputs, "all_gather_inputs")
    require(all(len(m.shape) == 1 for m in inputs), "inputs must be flat")
    require([m.numel for m in inputs] == list(inp_split_sizes) and sum(inp_split_sizes) == all_gather_input_numel, "split sizes do not fit the inputs")
    chunk = all_gather_output._replace(shape=(all_gather_input_numel,), offset=all_gather_output.offset + all_gather_input_numel * rank)
    return chunk, all_gather_output


_C10D = "_c10d_functional."

COLLECTIVES = (
    OpSpec(_C10D + "all_gather_into_tensor.default", "collective", all_gather, (), CollectiveSpec("all_gather", 2, 1)),
    OpSpec(_C10D + "all_gather_into_tensor_out.default", "collective", all_gather_out, (), CollectiveSpec("all_gather", 2, 1, out="out")),
    OpSpec(_C10D + "all_gather_into_tensor_coalesced.default", "collective", all_gather_coalesced, (), CollectiveSpec("all_gather", 2, 1, coalesced=True)),
    OpSpec(_C10D + "reduce_scatter_tensor.default", "collective", reduce_scatter, (), CollectiveSpec("reduce_scatter", 3, 2, 1)),
    OpSpec(_C10D + "reduce_scatter_tensor_out.default", "collective", reduce_scatter_out, (), CollectiveSpec("reduce_scatter", 3, 2, 1, out="out")),
    OpSpec(_C10D + "reduce_scatter_tensor_coalesced.default", "collective", reduce_scatter_coalesced, (), CollectiveSpec("reduce_scatter", 3, 2, 1, coalesced=True)),
    OpSpec(_C10D + "all_reduce.default", "collective", all_reduce, (), CollectiveSpec("all_reduce", 2, None, 1)),
    OpSpec(_C10D + "all_reduce_.default", "collective", all_reduce_, (0,), CollectiveSpec("all_reduce", 2, None, 1)),
    OpSpec(_C10D + "all_reduce_coalesced.default", "collective", all_reduce_coalesced, (), CollectiveSpec("all_reduce", 2, None, 1, coalesced=True)),
    OpSpec(_C10D + "all_to_all_single.default", "collective", all_to_all, (), CollectiveSpec("all_to_all", 3)),
    OpSpec(_C10D + "broadcast.default", "collective", broadcast, (), CollectiveSpec("broadcast", 2)),
    OpSpec(_C10D + "broadcast_.default", "collective", broadcast_, (0,), CollectiveSpec("broadcast", 2)),
    OpSpec(_C10D + "wait_tensor.default", "wait", wait_tensor),
    OpSpec("bucketing._pre_bucket_all_gather.default", "move", pre_bucket_all_gather),
    OpSpec("bucketing._pre_bucket_reduce_scatter.default", "move", pre_bucket_reduce_scatter),
    OpSpec("fsdp.all_gather_copy_in.default", "inplace", all_gather_copy_in, (1,)),
)
