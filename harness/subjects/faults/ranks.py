"""Seeded faults that show on real ranks only: passes by which one rank dies, hangs, raises, runs out of memory, or leaves a collective out.

Each does so on the last rank and changes nothing elsewhere. Name one as ``harness.subjects.faults.ranks:die``.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from typing import Final

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from harness.graph import collectives, waits

__all__ = ["die", "die_in_graph", "exhaust_memory", "hang", "leave_out", "raise_on_all", "raise_on_one", "spin", "wrong_on_one"]

_SPARE_BYTES: Final = 64 * 2**20


def _is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def die(gm: GraphModule) -> None:
    """End the last rank's process by SIGKILL while the pass runs."""
    if _is_last():
        os.kill(os.getpid(), signal.SIGKILL)


def die_in_graph(gm: GraphModule) -> None:
    """End the last rank's process with exit status 3 when its graph comes to the first collective."""
    if _is_last():
        start = collectives(gm.graph)[0]
        with gm.graph.inserting_before(start):
            gm.graph.call_function(_exit).meta["val"] = None


def _exit() -> None:
    os.write(2, b"giving up\n")
    os._exit(3)


def hang(gm: GraphModule) -> None:
    """Sleep in the pass on the last rank, for longer than any deadline."""
    if _is_last():
        time.sleep(3600)


def spin(gm: GraphModule) -> None:
    """Compute in the pass on the last rank without end."""
    while _is_last():
        pass


def raise_on_one(gm: GraphModule) -> None:
    """Raise in the pass on the last rank."""
    if _is_last():
        raise RuntimeError("the last rank gives up")


def raise_on_all(gm: GraphModule) -> None:
    """Raise in the pass on every rank."""
    raise RuntimeError("every rank gives up")


def exhaust_memory(gm: GraphModule) -> None:
    """Ask for more memory than a limit of the last rank's own allows."""
    if _is_last():
        before = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _SPARE_BYTES, before[1]))
        try:
            torch.ones(2 * _SPARE_BYTES, dtype=torch.uint8)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)


def leave_out(gm: GraphModule) -> None:
    """Take the input of the last all_reduce for its result on the last rank, so that the others wait for it in vain."""
    for start in reversed(collectives(gm.graph)) if _is_last() else ():
        if start.meta["val"].shape == start.args[0].meta["val"].shape:  # type: ignore[union-attr]
            for wait in waits(start):
                wait.replace_all_uses_with(start.args[0])  # type: ignore[arg-type]
                gm.graph.erase_node(wait)
            gm.graph.erase_node(start)
            return


def wrong_on_one(gm: GraphModule) -> None:
    """Return the first two outputs in the other order on the last rank."""
    output = next(reversed(gm.graph.nodes))
    values = list(output.args[0])
    if _is_last() and len(values) > 1:
        values[0], values[1] = values[1], values[0]
        output.args = (tuple(values),)
