"""Two more processes, of different hash seeds: a pass that depends on the order of sets makes different graphs there.

On a real cluster each rank compiles in a process of its own, with a hash seed of its own; what depends on it differs from rank to rank.
"""

from __future__ import annotations

import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from harness.executors.ranks.pool import CaseResult, PoolBroken, RankPool
from harness.spec.program import Program
from harness.spec.protocols import Subject
from harness.worker import PRELOAD, Question, decode_answer, encode_question

__all__ = ["Twin"]

_SEEDS: Final = (1, 2)


class Twin:
    """Applies subjects to graphs in processes of its own; a context manager that ends them.

    Args:
        modules: that the subjects to come need.
        is_patient: wait for the processes to start; else nothing is asked of them until they have.
        one_in: ask only about one in so many programs, always the same ones, until a difference was seen.
    """

    def __init__(self, modules: tuple[str, ...] = (), *, is_patient: bool = True, one_in: int = 1) -> None:
        self._pools = [RankPool(1, preload=(*PRELOAD, *modules), hash_seed=seed) for seed in _SEEDS]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="twin")
        self._started = self._thread.submit(self._start)
        self.is_patient = is_patient
        self.one_in = one_in

    def __enter__(self) -> Twin:
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.shutdown()
        for pool in self._pools:
            pool.close()

    def _start(self) -> None:
        with suppress(PoolBroken):
            for pool in self._pools:
                pool.start()

    def ask(self, program: Program, subject: Subject) -> Future[tuple[str, ...]] | None:
        """The digests of what ``subject`` makes of the graph of rank 0 under each hash seed, once they are there.

        None where the processes are not yet there, or this program is not one to ask about. The tuple is empty where the processes cannot load or run the subject.
        """
        if not self.is_patient and not self._started.done():
            return None
        question = encode_question(Question(program, subject.feature, subject.name, dict(subject.options)))
        return None if zlib.crc32(question) % self.one_in else self._thread.submit(self._outlines, question)

    def _outlines(self, question: bytes) -> tuple[str, ...]:
        try:
            results = [pool.run("outline", [question])[0] for pool in self._pools]
        except PoolBroken:
            return ()
        found = tuple(outline for result in results if (outline := _outline(result)))
        if len(set(found)) > 1:
            self.one_in = 1
        return found


def _outline(result: CaseResult) -> str:
    payload = result.payloads[0]
    return decode_answer(payload).outline if payload and result.fault is None else ""
