"""Laws on the transformed graphs themselves."""

from __future__ import annotations

from harness.oracles.evidence import Evidence
from harness.spec.verdict import Reason, normalise_message

__all__ = ["deterministic", "graph_valid", "idempotent", "metadata_true"]


def graph_valid(e: Evidence) -> list[Reason]:
    """The transformed graph lints: no cycle, topologically sorted, no node used that is not there."""
    for rank, gm in enumerate(e.graphs):
        try:
            gm.graph.lint()
        except Exception as error:
            message = f"rank {rank}: graph.lint() says: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            return [Reason("graph_valid", "FAIL", "lint", message, rank=rank, seen=normalise_message(str(error)))]
    return []


def metadata_true(e: Evidence) -> list[Reason]:
    """``meta["val"]`` of every node has the shape, strides and dtype that execute, wherever that was so before."""
    if not e.before:
        return []
    for rank, (old, new) in enumerate(zip(e.before[0].ranks, e.after[0].ranks, strict=True)):
        known = {fault.node for fault in old.untrue}
        for fault in new.untrue:
            if fault.node not in known:
                message = f"{fault.node} ({fault.target}) on rank {rank}: meta says {fault.expected}, executes as {fault.seen}"
                return [Reason("metadata_true", "FAIL", fault.target, message, rank=rank, node=fault.node, expected=fault.expected, seen=fault.seen)]
    return []


def idempotent(e: Evidence) -> list[Reason]:
    """Applying the pass a second time changes nothing more."""
    if not e.was_again:
        return []
    message = f"a second application changes {e.was_again} collectives more"
    return [Reason("idempotent", "FAIL", "changed_again", message, seen=str(e.was_again), allowed="0")]


def deterministic(e: Evidence) -> list[Reason]:
    """The pass makes the same graph in processes of different hash seeds."""
    if len(set(e.outlines)) < 2:
        return []
    message = "the transformed graph of rank 0 depends on PYTHONHASHSEED, so that ranks may get different ones"
    return [Reason("deterministic", "FAIL", "hash_seed", message, rank=0, expected=e.outlines[0], seen=e.outlines[1])]
