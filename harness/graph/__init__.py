"""Programs as ``fx`` graphs and back, questions about such graphs, and the fake worlds that passes run in."""

from __future__ import annotations

from harness.graph.analysis import (
    Ancestors,
    collectives,
    is_collective,
    is_wait,
    node_place,
    resolve,
    start_of,
    target_name,
    tensor_meta,
    waits,
)
from harness.graph.build import build, build_all, emit, emit_item, fake_mode, module_of
from harness.graph.fake_world import fake_world
from harness.graph.private import bucket_dtypes, group_rank
from harness.graph.read import program_from_graphs
from harness.graph.tracing import trace

__all__ = [
    "Ancestors",
    "bucket_dtypes",
    "build",
    "build_all",
    "collectives",
    "emit",
    "emit_item",
    "fake_mode",
    "fake_world",
    "group_rank",
    "is_collective",
    "is_wait",
    "module_of",
    "node_place",
    "program_from_graphs",
    "resolve",
    "start_of",
    "target_name",
    "tensor_meta",
    "trace",
    "waits",
]
