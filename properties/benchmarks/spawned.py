"""The same program on real gloo ranks by torch's own test classes, as modules that their processes can import."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import unittest
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest, MultiProcessTestCase

from harness.graph import build
from harness.spec.program import Group, GroupArg, Op, Program, Ref, TensorSpec

WORLD_SIZE = int(os.environ.get("SPAWNED_WORLD_SIZE", "4"))
NUM_CONTINUOUS = 40
C10D = "_c10d_functional."


@lru_cache(maxsize=None)
def seconds_of(name: str, world_size: int = 4) -> float:
    """The wall time of one run of a class of this module, in a process of its own."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "properties.benchmarks.spawned", name]
    subprocess.run(command, cwd=Path(__file__).parents[2], env={**os.environ, "SPAWNED_WORLD_SIZE": str(world_size)}, check=True, capture_output=True, timeout=300)
    return time.perf_counter() - start


def twenty_nodes() -> Program:
    """Four times: multiply, collective, wait, add, view; 20 ops on 4 ranks."""
    ops: list[Op] = []
    value = 4
    for i in range(4):
        call = (C10D + "all_gather_into_tensor.default", (Ref(value), WORLD_SIZE, GroupArg("world"))) if i % 2 else (C10D + "all_reduce.default", (Ref(value), "sum", GroupArg("world")))
        ops += [
            Op("aten.mul.Tensor", (Ref(i), 2.0)),
            Op(*call),
            Op(C10D + "wait_tensor.default", (Ref(value + 1),)),
            Op("aten.add.Tensor", (Ref(value + 2), 1.0)),
            Op("aten.view.default", (Ref(value + 3), (-1,))),
        ]
        value += 5
    specs = tuple(TensorSpec((8,), "float32") for _ in range(4))
    return Program(WORLD_SIZE, (Group("world", (tuple(range(WORLD_SIZE)),)),), specs, tuple(ops), (Ref(8), Ref(13), Ref(18), Ref(23)))


def gathers(count: int) -> Program:
    """Five nodes a time: an input is doubled, gathered, waited for, added to and returned, on 2 ranks."""
    ops: list[Op] = []
    for i in range(count):
        value = count + 4 * i
        ops += [
            Op("aten.mul.Tensor", (Ref(i), 2.0)),
            Op(C10D + "all_gather_into_tensor.default", (Ref(value), 2, GroupArg("world"))),
            Op(C10D + "wait_tensor.default", (Ref(value + 1),)),
            Op("aten.add.Tensor", (Ref(value + 2), 1.0)),
        ]
    specs = tuple(TensorSpec((2 + i % 3,), "float32") for i in range(count))
    outputs = tuple(Ref(count + 4 * i + 3) for i in range(count))
    return Program(2, (Group("world", ((0, 1),)),), specs, tuple(ops), outputs)


def run_case(rank: int) -> None:
    """Run the graph once on this rank, on the default group."""
    gm = build(twenty_nodes(), rank)
    name = dist.group.WORLD.group_name
    for node in gm.graph.nodes:
        node.args = tuple(name if isinstance(a, str) and a == "world" else a for a in node.args)
    gm.recompile()
    results = gm(*[torch.full((8,), float(rank + i)) for i in range(4)])
    assert results[0].tolist() == [sum(2.0 * r for r in range(WORLD_SIZE)) + 1.0] * 8


class Spawned(MultiProcessTestCase):
    """A process a rank for every case."""

    @property
    def world_size(self) -> int:
        return WORLD_SIZE

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def test_case(self) -> None:
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        run_case(self.rank)
        dist.destroy_process_group()


class Continuous(MultiProcContinuousTest):
    """Processes that live for the class."""

    world_size = WORLD_SIZE

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"


for _number in range(NUM_CONTINUOUS):
    setattr(Continuous, f"test_case_{_number}", lambda self: run_case(self.rank))

if __name__ == "__main__":
    chosen = unittest.defaultTestLoader.loadTestsFromTestCase({"Spawned": Spawned, "Continuous": Continuous}[sys.argv[1]])
    sys.exit(not unittest.TextTestRunner(verbosity=0).run(chosen).wasSuccessful())
