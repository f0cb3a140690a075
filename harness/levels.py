"""Where a case is executed: in lockstep within this process, or on real ranks. ``check`` judges at every level."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Final, Literal, Protocol

from harness.check import check
from harness.executors.autograd import Case
from harness.executors.ranks.pool import DEADLINE_S, Pool, RankPool
from harness.on_ranks import undecided
from harness.spec.program import Program
from harness.spec.protocols import Clock, Compiler, Subject
from harness.spec.verdict import Verdict
from harness.twin import Twin
from harness.worker import PRELOAD

__all__ = ["Judge", "Level", "Levels", "default_deadline"]

Level = Literal["lockstep", "passes", "compiled"]
"""``lockstep``; ``passes``: the transformed graph interpreted on real ranks over gloo; or ``compiled``: through ``torch.compile`` on them."""

_COMPILED_DEADLINE_S: Final = 120.0


def default_deadline(level: Level) -> float:
    """How many seconds a case may take on real ranks where nobody says it."""
    return _COMPILED_DEADLINE_S if level == "compiled" else DEADLINE_S


class Judge(Protocol):
    """Judges one program, as ``check`` does."""

    def __call__(self, program: Program | Case, subject: Subject | Compiler, *, seed: int = 0, clock: Clock | None = None) -> Verdict: ...


class Levels:
    """``check`` at one level; a context manager that ends the ranks it started.

    Args:
        level: see ``Level``.
        deadline_s: how long a case may take on real ranks; by default longer where it is compiled.
        ranks: run on these instead of on ranks of its own; then ``world_size`` is theirs.
        twin: for the law ``deterministic`` in lockstep; ended with the level.
    """

    def __init__(self, level: Level, *, deadline_s: float | None = None, ranks: Pool | None = None, twin: Twin | None = None) -> None:
        self.level = level
        self.deadline_s = deadline_s or default_deadline(level)
        self._pools: dict[int, Pool] = {} if ranks is None else {ranks.world_size: ranks}
        self._is_remote = ranks is not None
        self._stack = ExitStack()
        self.twin = None if twin is None else self._stack.enter_context(twin)

    @property
    def world_size(self) -> int | None:
        """The number of ranks that every program must have; None where any will do."""
        return next(iter(self._pools)) if self._is_remote else None

    def __enter__(self) -> Levels:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        self._pools.clear()

    def check(self, program: Program | Case, subject: Subject | Compiler, *, seed: int = 0, clock: Clock | None = None) -> Verdict:
        """Judge one program; the ranks of its world size are started once."""
        if self.level == "lockstep":
            return check(program, subject, seed=seed, clock=clock, twin=self.twin)
        if isinstance(subject, Compiler) or not isinstance(program, Program):
            return undecided("unsupported", f"{subject.feature} is judged in one process, not on ranks")
        if program.world_size not in self._pools and self._is_remote:
            return undecided("world_size", f"the program has {program.world_size} ranks; torchrun started {', '.join(map(str, self._pools))}")
        if program.world_size not in self._pools:
            pool = RankPool(program.world_size, preload=PRELOAD, deadline_s=self.deadline_s)
            self._pools[program.world_size] = self._stack.enter_context(pool)
        with nullcontext() if clock is None else clock.phase("run"):
            return check(program, subject, seed=seed, ranks=self._pools[program.world_size], is_compiled=self.level == "compiled")
