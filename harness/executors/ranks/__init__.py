"""Real ranks: a pool of warm processes over gloo or NCCL that survives whatever a case does to it.

``pool`` is the controller's side, ``server`` the process that imports torch once and forks the ranks, ``rank`` what each of them does.
``remote`` is the controller's side for ranks that torchrun started on this or other machines, ``worker`` one of those, ``mailbox`` what lies between.
The pool carries bytes and calls tasks by name; it knows neither programs nor subjects.
"""

from __future__ import annotations

from harness.executors.ranks.pool import CaseResult, Fault, Pool, RankPool, RankState

__all__ = ["CaseResult", "Fault", "Pool", "RankPool", "RankState"]
