"""Ranks that torchrun started, on this machine or on several, as a pool: the controller's side.

The controller listens, and the ranks (``python -m harness.executors.ranks.worker`` under torchrun) come to it. Where ``RankPool`` kills and forks
processes, here every rank ends itself when a case went wrong, and torchrun starts all of them anew.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Final

from msgspec import Struct
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from harness.executors.ranks.mailbox import Mailbox, RemoteRanks
from harness.executors.ranks.messages import Case, Done
from harness.executors.ranks.pool import DEADLINE_S, CaseResult, Fault, PoolBroken, RankState

__all__ = ["Abandon", "End", "Hello", "Join", "Names", "Order", "RemotePool", "Roster", "Seen"]

_START_S: Final = 120.0
_GRACE_S: Final = 0.5
_STACK_S: Final = 2.0
_END_S: Final = 5.0
_PAUSE_S: Final = 0.001
_MOST_PAUSE_S: Final = 0.02
_STORE_S: Final = 30.0
_CASES_AN_ORDER: Final = 200


class Join(Struct, frozen=True):
    """From a process that has become a rank: a number that it drew, so that it is told from the one that had this rank before."""

    drawn: int


class Roster(Struct, frozen=True):
    """From rank 0: who makes up a generation, by what each drew."""

    generation: int
    drawn: tuple[int, ...]


class Hello(Struct, frozen=True):
    """From rank 0, once all ranks of a generation have formed a group."""

    generation: int
    world_size: int
    backend: str


class Order(Struct, frozen=True):
    """To all ranks: import ``modules``, then do ``task`` for each case."""

    task: str
    cases: tuple[Case, ...]
    modules: tuple[str, ...]


class Seen(Struct, frozen=True):
    """From a rank that was asked: where it is, and its Python stack."""

    place: str
    stack: str


class End(Struct, frozen=True):
    """A word without content: what it says is its name."""


class Abandon(Struct, frozen=True):
    """To all ranks: this generation is given up, and ``rank`` is to fail.

    It is one alone, since torchrun ends the others for it: agents whose ranks fail at the same time may miss each other.
    """

    rank: int


class Names:
    """What the messages of one generation are called."""

    HELLO: Final = "hello"
    ROSTER: Final = "roster"
    END: Final = "end"

    @staticmethod
    def join(rank: int) -> str:
        return f"join/{rank}"

    @staticmethod
    def agreed(generation: int, rank: int) -> str:
        return f"{generation}/agreed/{rank}"

    @staticmethod
    def order(generation: int, number: int) -> str:
        return f"{generation}/order/{number}"

    @staticmethod
    def begun(generation: int, number: int, rank: int) -> str:
        return f"{generation}/begun/{number}/{rank}"

    @staticmethod
    def done(generation: int, case: int, rank: int) -> str:
        return f"{generation}/done/{case}/{rank}"

    @staticmethod
    def met(generation: int, case: int, rank: int) -> str:
        return f"{generation}/met/{case}/{rank}"

    @staticmethod
    def gone(generation: int, rank: int) -> str:
        return f"{generation}/gone/{rank}"

    @staticmethod
    def look(generation: int) -> str:
        return f"{generation}/look"

    @staticmethod
    def seen(generation: int, rank: int) -> str:
        return f"{generation}/seen/{rank}"

    @staticmethod
    def abandon(generation: int) -> str:
        return f"{generation}/abandon"


class RemotePool:
    """A pool whose ranks torchrun starts; see ``RankPool`` for what it does.

    Args:
        host, port: where to listen; ranks are told it as ``--controller HOST:PORT``.
        secret: that the ranks have too.
        deadline_s: how long a case may take.
        start_s: how long to wait for ranks, at first and after a fault.

    Attributes:
        world_size, backend: of the ranks that came.
        refusals: see ``RankPool``.

    Raises:
        RemoteRanks: the address cannot be listened at.
    """

    def __init__(self, host: str, port: int, secret: str, *, deadline_s: float = DEADLINE_S, start_s: float = _START_S) -> None:
        self.deadline_s = deadline_s
        self.start_s = start_s
        self.num_healed = 0
        self.refusals: dict[bytes, str] = {}
        self._modules: tuple[str, ...] = ()
        self._hello: Hello | None = None
        self._abandoned: set[int] = set()
        self._number = 1
        self._num_orders = 0
        try:
            listener = socket.create_server((host, port), backlog=1024)
        except OSError as error:
            raise RemoteRanks(f"{host}:{port} cannot be listened at: {error.strerror or error}") from None
        self.address = (host, int(listener.getsockname()[1]))
        store = TCPStore(
            *self.address, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_STORE_S), master_listen_fd=listener.detach()
        )
        self._mail = Mailbox(store, secret)

    def __enter__(self) -> RemotePool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def world_size(self) -> int:
        return self._ranks().world_size

    @property
    def backend(self) -> str:
        return self._ranks().backend

    def start(self) -> None:
        """Wait until ranks are there.

        Raises:
            PoolBroken: none came in time.
        """
        self._ranks()

    def ensure(self, modules: Iterable[str]) -> None:
        """See to it that the ranks import ``modules`` before they begin a case."""
        self._modules = tuple(dict.fromkeys((*self._modules, *modules)))

    def run(self, task: str, payloads: Sequence[bytes]) -> list[CaseResult]:
        """Do ``task`` for each payload on all ranks; see ``RankPool.run``.

        Raises:
            PoolBroken: no ranks came.
        """
        results: list[CaseResult] = []
        while len(results) < len(payloads):
            results += self._order(task, payloads[len(results) : len(results) + _CASES_AN_ORDER])
        return results

    def close(self) -> None:
        """Tell the ranks to end, and wait until they have heard it; torchrun ends with them."""
        self._mail.put(Names.END, End())
        if self._hello is not None:
            self._all([Names.gone(self._hello.generation, rank) for rank in range(self._hello.world_size)], _END_S)

    def _ranks(self) -> Hello:
        if self._hello is None:
            self._hello = self._awaited(self._greeting, self.start_s)
            self._num_orders = 0
            if self._hello is None:
                host, port = self.address
                raise PoolBroken(
                    f"no ranks came to {host}:{port} within {self.start_s:g} s; start them with torchrun, --max-restarts above 0,"
                    f" -m harness.executors.ranks.worker --controller {host}:{port}, and the same secret"
                )
        return self._hello

    def _greeting(self) -> Hello | None:
        hello = self._mail.take(Names.HELLO, Hello)
        return None if hello is None or hello.generation in self._abandoned else hello

    def _awaited(self, look: Callable[[], Hello | None], seconds: float) -> Hello | None:
        end = time.monotonic() + seconds
        while (found := look()) is None and time.monotonic() < end:
            time.sleep(_MOST_PAUSE_S)
        return found

    def _is_replaced(self, ranks: Hello) -> bool:
        """Whether torchrun has started other ranks meanwhile: those of one node come again when those of another have ended."""
        new = self._greeting()
        return new is not None and new.generation != ranks.generation

    def _forget(self, ranks: Hello, failing: int = -1) -> None:
        """These are not to be used any more; rank ``failing`` ends itself, unless one has ended already."""
        self._abandoned.add(ranks.generation)
        self._hello = None
        self._mail.put(Names.abandon(ranks.generation), Abandon(failing))

    def _order(self, task: str, payloads: Sequence[bytes]) -> list[CaseResult]:
        """Results up to a fault, or to a case that some rank broke off; none where the ranks were replaced before they began."""
        ranks = self._ranks()
        generation, first, number = ranks.generation, self._number, self._num_orders
        self._number += len(payloads)
        self._num_orders += 1
        order = Order(task, tuple(Case(first + i, payload) for i, payload in enumerate(payloads)), self._modules)
        self._mail.put(Names.order(generation, number), order)
        begun = [Names.begun(generation, number, rank) for rank in range(ranks.world_size)]
        results: list[CaseResult] = []
        end = time.monotonic() + self.start_s
        while not self._all(begun, _GRACE_S):
            if self._is_replaced(ranks):
                self._forget(ranks)
                return []
            if time.monotonic() > end:
                return [self._given_up(ranks, {}, "machine", f"the ranks did not begin within {self.start_s:g} s")]
        for case in range(first, first + len(payloads)):
            result, goes_on = self._collected(ranks, case)
            results.append(result)
            if not goes_on:
                break
        done = range(first, first + len(results))
        if self._hello is ranks:
            ranks_all = range(ranks.world_size)
            self._mail.drop([Names.order(generation, number), *begun])
            self._mail.drop(name(generation, case, rank) for name in (Names.done, Names.met) for case in done for rank in ranks_all)
        return results

    def _all(self, wanted: Sequence[str], seconds: float) -> bool:
        """Whether all of these are written in time."""
        end, pause = time.monotonic() + seconds, _PAUSE_S
        while not self._mail.has(wanted):
            if time.monotonic() >= end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE_S)
        return True

    def _collected(self, ranks: Hello, case: int) -> tuple[CaseResult, bool]:
        """The result of one case, and whether the order goes on after it."""
        numbers = range(ranks.world_size)
        wanted = [Names.done(ranks.generation, case, rank) for rank in numbers]
        end, is_cut = time.monotonic() + self.deadline_s, False
        here: dict[int, Done] = {}
        while not self._all(wanted, min(_GRACE_S, max(end - time.monotonic(), 0))):
            here = {rank: answer for rank in numbers if (answer := self._mail.take(wanted[rank], Done)) is not None}
            if not is_cut and any(not answer.is_clean for answer in here.values()):
                end, is_cut = min(end, time.monotonic() + _GRACE_S), True
            if self._is_replaced(ranks):
                return self._given_up(ranks, here, "rank_died", "torchrun started new ranks: one of them had ended"), False
            if time.monotonic() >= end:
                return self._fault(ranks, case, here), False
        answers = [answer for name in wanted if (answer := self._mail.take(name, Done)) is not None]
        if len(answers) < ranks.world_size:
            return self._given_up(ranks, here, "machine", "an answer was not written with the secret"), False
        failed = [f"rank {rank}: {answer.error}" for rank, answer in enumerate(answers) if answer.error is not None]
        fault = Fault("machine", f"the harness itself failed: {failed[0]}") if failed else None
        return CaseResult(tuple(a.payload for a in answers), fault), all(a.is_clean for a in answers)

    def _fault(self, ranks: Hello, case: int, here: dict[int, Done]) -> CaseResult:
        """What is seen of the ranks when a case's time is over: those that do not even say where they are have died."""
        self._mail.put(Names.look(ranks.generation), End())
        asked = [rank for rank in range(ranks.world_size) if rank not in here]
        self._all([Names.seen(ranks.generation, rank) for rank in asked], _STACK_S)
        states = []
        for rank in range(ranks.world_size):
            if rank in here:
                states.append(RankState(rank, "done" if here[rank].is_clean else "raised"))
                continue
            seen = self._mail.take(Names.seen(ranks.generation, rank), Seen)
            states.append(RankState(rank, "died") if seen is None else RankState(rank, "stuck", seen.place, seen.stack))
        said = "; ".join(state.describe() for state in states if state.status != "done")
        if any(state.status == "died" for state in states):
            return self._given_up(ranks, here, "rank_died", said, states)
        if any(state.status == "raised" for state in states):
            return self._given_up(ranks, here, "divergence", said, states)
        return self._given_up(ranks, here, "hang", f"nothing happened for {self.deadline_s:g} s: {said}", states)

    def _given_up(
        self, ranks: Hello, here: dict[int, Done], kind: str, message: str, states: Sequence[RankState] = ()
    ) -> CaseResult:
        """The case's result; all ranks end themselves, and torchrun starts new ones."""
        self.num_healed += 1
        if not states:
            states = [RankState(r, "done") if r in here else RankState(r, "died") for r in range(ranks.world_size)]
        is_ending = kind == "rank_died"
        self._forget(ranks, -1 if is_ending else next((s.rank for s in states if s.status != "done"), 0))
        payloads = tuple(here[rank].payload if rank in here else None for rank in range(ranks.world_size))
        return CaseResult(payloads, Fault(kind, message, () if kind == "machine" else tuple(states)))  # type: ignore[arg-type]
