"""The controller's side of the pool: start ranks, hand out cases, see what goes wrong, and make the pool whole again."""

from __future__ import annotations

import fcntl
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NoReturn, Protocol

from harness.errors import HarnessError
from harness.executors.ranks.board import Board, anonymous_file
from harness.executors.ranks.messages import Case, Died, Done, Form, Formed, FromRank, FromServer, Peer, Preloaded, Run, Spawn, Spawned

__all__ = ["CaseResult", "Fault", "Pool", "PoolBroken", "RankPool", "RankState"]

DEADLINE_S: Final = 10.0
"""How long a case may take, from when the first rank began it."""

_GRACE_S: Final = 0.5
"""How long the other ranks may still take once one rank raised or died."""

_START_S: Final = 120.0
_END_S: Final = 10.0
_BACKEND_S: Final = 1800.0
_TICK_S: Final = 0.5
_STACK_S: Final = 0.5
_FLIGHT_ENTRIES: Final = 2000
_MOST_FLIGHT_BYTES: Final = 1 << 16
_BUSY: Final = 0.5
_LOOKS: Final = 10
_LOOK_S: Final = 0.01
_TAIL_BYTES: Final = 4000
_OUTPUT_BYTES: Final = 1 << 20


class PoolBroken(HarnessError):
    """The pool's processes cannot be started, or the group cannot be formed.

    Cause: too little memory or too many processes on this machine, a network interface that gloo cannot use, a module that does not
    import. Remedy: as the message says.
    """


class RankState(NamedTuple):
    """How one rank was found when a case went wrong.

    Attributes:
        rank: its number.
        status: ``done``, ``raised`` (it did not take part in all collectives), ``stuck`` or ``died``.
        place: what its board said, as ``transformed: wait_tensor_1``.
        stack: the Python stacks of a stuck rank, innermost frame first.
        output: the last lines that it wrote to its standard output and error.
        flight: of a stuck rank: the collectives that torch's flight recorder has as not complete, as JSON; empty where it records none.
        exit_code, signal: how it died.
    """

    rank: int
    status: Literal["done", "raised", "stuck", "died"]
    place: str = ""
    stack: str = ""
    output: str = ""
    exit_code: int | None = None
    signal: int | None = None
    flight: str = ""

    def describe(self) -> str:
        """One clause for a message."""
        where = f" at {self.place}" if self.place else ""
        if self.status != "died":
            return f"rank {self.rank} {'is ' if self.status != 'raised' else ''}{self.status}{where}"
        how = f"signal {self.signal} ({signal.Signals(self.signal).name})" if self.signal else f"exit status {self.exit_code}"
        return f"rank {self.rank} died{where} by {how}"

    def report(self) -> str:
        """All that is known of it, in several lines."""
        parts = (("", self.stack), ("it wrote:\n", self.output), ("flight recorder: ", self.flight))
        return "\n".join([self.describe(), *(head + text for head, text in parts if text)])


class Fault(NamedTuple):
    """Why a case has no result on every rank.

    Attributes:
        kind: ``rank_died``; ``divergence`` (raised on some ranks, so that others waited in vain); ``hang``; or ``machine``, which says nothing of the case.
        message: one sentence.
        ranks: how each was found; empty where the machine is at fault.
    """

    kind: Literal["rank_died", "divergence", "hang", "machine"]
    message: str
    ranks: tuple[RankState, ...] = ()


class CaseResult(NamedTuple):
    """What became of one case.

    Attributes:
        payloads: what the task returned on each rank; None for a rank that returned nothing.
        fault: why not all of them did.
    """

    payloads: tuple[bytes | None, ...]
    fault: Fault | None = None


class Pool(Protocol):
    """Ranks that cases are run on; ``RankPool`` starts its own, ``remote.RemotePool`` has those that torchrun started."""

    refusals: dict[bytes, str]

    @property
    def world_size(self) -> int:
        """How many there are."""

    @property
    def backend(self) -> str:
        """``gloo`` or ``nccl``."""

    def ensure(self, modules: Iterable[str], /) -> None:
        """See to it that the ranks import ``modules`` before they begin a case."""

    def run(self, task: str, payloads: Sequence[bytes], /) -> list[CaseResult]:
        """Do ``task`` for each payload on all ranks."""


class _Rank:
    """One process, as the controller sees it."""

    def __init__(self, number: int, pid: int, peer: Peer[FromRank], output: int, stacks: int, flight: int, board: Board) -> None:
        self.number = number
        self.pid = pid
        self.handle = os.pidfd_open(pid)
        self.peer = peer
        self.output = output
        self.stacks = stacks
        self.flight = flight
        self.board = board
        self.is_gone = False
        self.died: Died | None = None
        self.busy_since: tuple[float, float] | None = None

    def close(self) -> None:
        self.peer.close()
        for file in (self.handle, self.output, self.stacks, self.flight):
            os.close(file)


class RankPool:
    """Processes that are ranks of one group, kept alive between cases.

    Args:
        world_size: how many.
        backend: ``gloo`` or ``nccl``.
        devices: one a rank, as ``cpu`` or ``cuda:0``; all ``cpu`` where left out.
        preload: modules that are imported once, before the ranks are forked.
        deadline_s: how long a case may take, from when the first rank began it; independent of the backend's own time-out.
        hash_seed: ``PYTHONHASHSEED`` of the ranks; Python's own choice where left out.

    Attributes:
        num_healed: how often all ranks were ended because of a fault.
        refusals: what the backend was found to refuse, by what was tried; kept here by whoever probes.

    The processes are started by the first ``run``, or by ``start``. They end with ``close``, with the ``with`` block, or when this process ends, however it does.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str = "gloo",
        devices: Sequence[str] | None = None,
        preload: Iterable[str] = ("harness.worker",),
        deadline_s: float = DEADLINE_S,
        hash_seed: int | None = None,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size={world_size}; must be 1 or more")
        self.world_size = world_size
        self.backend = backend
        self.devices = tuple(devices) if devices is not None else ("cpu",) * world_size
        if len(self.devices) != world_size:
            raise ValueError(f"{len(self.devices)} devices for {world_size} ranks; one a rank is needed")
        self.deadline_s = deadline_s
        self.hash_seed = hash_seed
        self.num_healed = 0
        self.refusals: dict[bytes, str] = {}
        self._preload = tuple(dict.fromkeys(preload))
        self._server: subprocess.Popen[bytes] | None = None
        self._server_peer: Peer[FromServer] | None = None
        self._folder: Path | None = None
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._number = 1
        self._generation = 0
        self._spawned: dict[int, Spawned] = {}
        self._preloaded: Preloaded | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The ranks' process ids, in rank order; empty while they are not running."""
        return tuple(rank.pid for rank in self._ranks)

    @property
    def server_pid(self) -> int | None:
        """The id of the process that forks the ranks."""
        return None if self._server is None else self._server.pid

    def start(self) -> None:
        """Start the ranks and form their group, unless that is done.

        Raises:
            PoolBroken: it cannot be done.
        """
        if self._ranks:
            return
        if self._server is None:
            self._start_server()
        self._generation += 1
        turnstile = anonymous_file("turnstile")
        try:
            self._ranks = [self._spawn(number, turnstile) for number in range(self.world_size)]
            self._form()
        except BaseException:
            self._end_ranks()
            raise
        finally:
            os.close(turnstile)

    def ensure(self, modules: Iterable[str]) -> None:
        """See to it that the ranks are forked with ``modules`` imported; this restarts them where they are not."""
        missing = [name for name in modules if name not in self._preload]
        if missing:
            self._preload += tuple(missing)
            self.close()

    def run(self, task: str, payloads: Sequence[bytes]) -> list[CaseResult]:
        """Do ``task`` for each payload on all ranks.

        A case that hangs, dies or raises on some ranks only has a ``Fault``; the pool is made whole and goes on with the next.

        Args:
            task: one of ``rank.TASKS``.
            payloads: one a case; each rank gets the same.

        Raises:
            PoolBroken: the ranks cannot be started.
        """
        results: list[CaseResult] = []
        while len(results) < len(payloads):
            self.start()
            first = self._number
            left = payloads[len(results) :]
            self._number += len(left)
            message = Run(task, tuple(Case(first + i, payload) for i, payload in enumerate(left)))
            try:
                results += _Batch(self, message, self.deadline_s).collect()
            except BaseException:
                self._end_ranks()
                raise
        return results

    def close(self) -> None:
        """End all processes and leave nothing behind; a later ``run`` starts anew."""
        self._end_ranks()
        if self._server_peer is not None:
            self._selector.unregister(self._server_peer.sock)
            self._server_peer.close()
            self._server_peer = None
        if self._server is not None:
            try:
                self._server.wait(timeout=_END_S)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start_server(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="harness-ranks-"))
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        environment.setdefault("OMP_NUM_THREADS", "1")
        if self.backend == "nccl":
            environment.setdefault("TORCH_FR_BUFFER_SIZE", str(_FLIGHT_ENTRIES))
        if self.hash_seed is not None:
            environment["PYTHONHASHSEED"] = str(self.hash_seed)
        command = [sys.executable, "-m", "harness.executors.ranks.server", str(theirs.fileno()), str(self._folder), *self._preload]
        self._preloaded = None
        self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
        theirs.close()
        self._server_peer = Peer(ours, FromServer)
        self._selector.register(ours, selectors.EVENT_READ, None)
        try:
            self._wait(lambda: self._preloaded is not None, _START_S, "the server of ranks did not start")
            assert self._preloaded is not None
            if self._preloaded.error is not None:
                raise PoolBroken(self._preloaded.error)
        except BaseException:
            self.close()
            raise

    def _spawn(self, number: int, turnstile: int) -> _Rank:
        assert self._server_peer is not None
        ours, theirs = socket.socketpair()
        output, stacks, flight, board = (anonymous_file(f"{name}-{number}") for name in ("output", "stacks", "flight", "board"))
        own_board = Board(board)
        try:
            fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
            self._send(Spawn(number), (theirs.fileno(), output, stacks, flight, board, turnstile))
            self._wait(lambda: number in self._spawned, _START_S, f"rank {number} did not start")
            spawned = self._spawned.pop(number)
            if spawned.error is not None:
                raise PoolBroken(f"rank {number} cannot be started: {spawned.error}")
        except BaseException:
            ours.close()
            for file in (output, stacks, flight):
                os.close(file)
            raise
        finally:
            theirs.close()
            os.close(board)
        rank = _Rank(number, spawned.pid, Peer(ours, FromRank), output, stacks, flight, own_board)
        self._selector.register(ours, selectors.EVENT_READ, rank)
        return rank

    def _send(self, message: Any, files: tuple[int, ...] = ()) -> None:
        assert self._server_peer is not None
        try:
            self._server_peer.send(message, files)
        except OSError:
            self._lose_server()

    def _lose_server(self) -> NoReturn:
        assert self._server_peer is not None
        self._selector.unregister(self._server_peer.sock)
        self._server_peer.close()
        self._server_peer = None
        raise PoolBroken("the server of ranks is gone")

    def _form(self) -> None:
        assert self._folder is not None
        store = self._folder / f"store-{self._generation}"
        for rank in self._ranks:
            with suppress(OSError):  # of a rank that died, which is seen below
                rank.peer.send(Form(rank.number, self.world_size, str(store), self.backend, self.devices[rank.number], _BACKEND_S))
        formed: dict[int, Formed] = {}

        def is_formed() -> bool:
            return len(formed) == self.world_size or any(r.is_gone for r in self._ranks) or any(f.error for f in formed.values())

        self._wait(is_formed, _START_S, "the ranks did not form a group", formed)
        for number, answer in formed.items():
            if answer.error is not None:
                raise PoolBroken(f"rank {number} cannot join a {self.backend} group: {answer.error}")
        for rank in self._ranks:
            if rank.is_gone:
                raise PoolBroken(f"rank {rank.number} died while the group was formed: {_tail(rank.output)}")

    def _wait(self, is_done: Any, seconds: float, what: str, formed: dict[int, Formed] | None = None) -> None:
        """Take messages until ``is_done``."""
        end = time.monotonic() + seconds
        while not is_done():
            left = end - time.monotonic()
            if left <= 0:
                raise PoolBroken(f"{what} within {seconds:g} s")
            for rank, message in self.events(left):
                if rank is not None and isinstance(message, Formed) and formed is not None:
                    formed[rank.number] = message

    def events(self, timeout: float) -> list[tuple[_Rank | None, Any]]:
        """What has arrived, at most ``timeout`` seconds from now: (rank, message), the message being None where the rank is gone."""
        found: list[tuple[_Rank | None, Any]] = []
        for key, _ in self._selector.select(max(timeout, 0.0)):
            rank: _Rank | None = key.data
            peer: Peer[Any] | None = rank.peer if rank is not None else self._server_peer
            assert peer is not None
            messages, is_gone = peer.read_available()
            found += [(rank, message) for message in messages]
            if rank is None:
                for message in messages:
                    self._from_server(message)
                if is_gone:
                    self._lose_server()
            elif is_gone:
                rank.is_gone = True
                self._selector.unregister(rank.peer.sock)
                found.append((rank, None))
        return found

    def _from_server(self, message: FromServer) -> None:
        if isinstance(message, Preloaded):
            self._preloaded = message
        elif isinstance(message, Spawned):
            self._spawned[message.rank] = message
        else:
            for rank in self._ranks:
                if rank.pid == message.pid:
                    rank.died = message

    def await_deaths(self, ranks: Sequence[_Rank], seconds: float) -> None:
        """Wait until the server has said how each of these ended."""
        end = time.monotonic() + seconds
        while any(rank.died is None for rank in ranks) and time.monotonic() < end:
            self.events(end - time.monotonic())

    @property
    def ranks(self) -> Sequence[_Rank]:
        """The processes, in rank order."""
        return self._ranks

    def abandon(self) -> None:
        """End all ranks: what a broken collective left in their communicators is unknown. The next ``run`` starts new ones."""
        self.num_healed += 1
        self._end_ranks()

    def _end_ranks(self) -> None:
        ranks = self._ranks
        for rank in ranks:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank.handle, signal.SIGKILL)
        if self._server_peer is not None:
            with suppress(PoolBroken):
                self.await_deaths(ranks, _END_S)
        for rank in ranks:
            if not rank.is_gone:
                self._selector.unregister(rank.peer.sock)
            rank.close()
        self._ranks = []
        if self._folder is not None:
            (self._folder / f"store-{self._generation}").unlink(missing_ok=True)


class _Batch:
    """Several cases under way on all ranks."""

    def __init__(self, pool: RankPool, message: Run, deadline_s: float) -> None:
        self.pool = pool
        self.message = message
        self.deadline_s = deadline_s
        self.first = message.cases[0].number
        self.done: dict[int, dict[int, Done]] = {}
        self.results: list[CaseResult] = []
        self.progress_at = time.monotonic()
        self.cut_at: float | None = None
        self.wake_at = 0.0

    @property
    def current(self) -> int:
        """The number of the first case that is not done on all ranks."""
        return self.first + len(self.results)

    def collect(self) -> list[CaseResult]:
        """Results of the cases, in order, up to a fault or to a case that some rank broke off."""
        pool = self.pool
        for rank in pool.ranks:
            rank.busy_since = None
            _forget_output(rank)
            try:
                rank.peer.send(self.message)
            except OSError:
                pass  # its death is seen below
        while len(self.results) < len(self.message.cases):
            now = time.monotonic()
            deadline = self._deadline()
            self.wake_at = min(deadline, now + _TICK_S)
            try:
                events = pool.events(self.wake_at - now)
            except PoolBroken as error:
                pool.close()
                return [*self.results, CaseResult((None,) * pool.world_size, Fault("machine", str(error)))]
            for sender, message in events:
                if sender is not None and isinstance(message, Done):
                    self.done.setdefault(message.number, {})[sender.number] = message
            while len(here := self.done.get(self.current, {})) == pool.world_size:
                answers = [here[r] for r in range(pool.world_size)]
                self.results.append(self._result(answers))
                self.cut_at, self.progress_at = None, time.monotonic()
                if not all(answer.is_clean for answer in answers) or len(self.results) == len(self.message.cases):
                    return self.results
            self._watch(here)
            may_be_late = self.cut_at is not None or time.monotonic() >= deadline
            if may_be_late and time.monotonic() >= self._deadline():
                fault = self._fault(here)
                payloads = tuple(here[r].payload if r in here else None for r in range(pool.world_size))
                pool.abandon()
                return [*self.results, CaseResult(payloads, fault)]
        return self.results

    def _result(self, answers: Sequence[Done]) -> CaseResult:
        payloads = tuple(answer.payload for answer in answers)
        failed = [f"rank {r}: {answer.error}" for r, answer in enumerate(answers) if answer.error is not None]
        return CaseResult(payloads, Fault("machine", f"the harness itself failed: {failed[0]}") if failed else None)

    def _deadline(self) -> float:
        """When the current case is given up."""
        boards = [rank.board.read() for rank in self.pool.ranks]
        began = [seen.since for seen in boards if seen.case >= self.current]
        end = min(began) + self.deadline_s if began else self.progress_at + self.deadline_s + _START_S
        return end if self.cut_at is None else min(end, self.cut_at)

    def _watch(self, here: dict[int, Done]) -> None:
        """Give the others a little time only, once one rank died in this case or broke it off; measure who computes."""
        now = time.monotonic()
        lost = [rank for rank in self.pool.ranks if rank.is_gone and rank.number not in here]
        if self.cut_at is None and (lost or any(not answer.is_clean for answer in here.values())):
            self.cut_at = now + _GRACE_S
        if now >= self.wake_at:
            for rank in self.pool.ranks:
                if rank.busy_since is None:
                    rank.busy_since = (now, _main_thread(rank.pid)[1])

    def _fault(self, here: dict[int, Done]) -> Fault:
        pool = self.pool
        stuck = [rank for rank in pool.ranks if rank.number not in here and not rank.is_gone]
        starved = [rank.number for rank in stuck if _is_starved(rank)]
        stacks = _stacks(stuck)
        gone = [rank for rank in pool.ranks if rank.is_gone]
        pool.await_deaths(gone, _END_S)
        states = tuple(_state(rank, self.current, here, stacks) for rank in pool.ranks)
        said = "; ".join(state.describe() for state in states if state.status != "done")
        if any(state.status == "died" for state in states):
            return Fault("rank_died", said, states)
        if any(state.status == "raised" for state in states):
            return Fault("divergence", said, states)
        if not any(rank.board.read().case == self.current for rank in pool.ranks):
            return Fault("machine", "no rank began the case in time")
        if starved:
            return Fault("machine", f"rank {starved[0]} was computing, but got less than half of a core: {said}")
        return Fault("hang", f"nothing happened for {self.deadline_s:g} s: {said}", states)


def _state(rank: _Rank, case: int, here: dict[int, Done], stacks: dict[int, str]) -> RankState:
    seen = rank.board.read()
    place = seen.place if seen.case == case else ""
    answer = here.get(rank.number)
    if answer is not None:
        return RankState(rank.number, "done" if answer.is_clean else "raised", place)
    output = _tail(rank.output)
    if rank.is_gone:
        died = rank.died or Died(rank.pid, None, None)
        return RankState(rank.number, "died", place, "", output, died.exit_code, died.signal)
    flight = os.pread(rank.flight, _MOST_FLIGHT_BYTES, 0).decode(errors="replace").strip("\0\n ")
    return RankState(rank.number, "stuck", place, stacks.get(rank.number, ""), output, flight=flight)


def _stacks(ranks: Sequence[_Rank]) -> dict[int, str]:
    """The Python stacks of these ranks, also of those that are blocked in a collective; their flight recorders are written out too."""
    for rank in ranks:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(rank.handle, signal.SIGUSR2)
        os.ftruncate(rank.stacks, 0)
        os.lseek(rank.stacks, 0, os.SEEK_SET)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(rank.handle, signal.SIGUSR1)
    end = time.monotonic() + _STACK_S
    sizes = [-1] * len(ranks)
    while time.monotonic() < end:
        time.sleep(_STACK_S / 10)
        now = [os.fstat(rank.stacks).st_size for rank in ranks]
        if now == sizes and all(now):
            break
        sizes = now
    return {rank.number: os.pread(rank.stacks, 1 << 16, 0).decode(errors="replace").strip("\0\n ") for rank in ranks}


def _tail(file: int) -> str:
    size = os.fstat(file).st_size
    text = os.pread(file, _TAIL_BYTES, max(size - _TAIL_BYTES, 0)).decode(errors="replace")
    return text.strip("\0\n ")


def _forget_output(rank: _Rank) -> None:
    """Keep what a rank writes from growing without end."""
    if os.fstat(rank.output).st_size > _OUTPUT_BYTES:
        os.ftruncate(rank.output, 0)


def _main_thread(pid: int) -> tuple[bool, float]:
    """Whether a process's main thread wants a core now, and how many seconds it has had one."""
    try:
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False, 0.0
    return fields[0] == "R", (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _is_starved(rank: _Rank) -> bool:
    """Whether a rank computes, yet had less than half of a core since it was first looked at."""
    if rank.busy_since is None:
        return False
    at, cpu = rank.busy_since
    share = (_main_thread(rank.pid)[1] - cpu) / (time.monotonic() - at)
    for _ in range(_LOOKS):
        if not _main_thread(rank.pid)[0]:
            return False
        time.sleep(_LOOK_S)
    return share < _BUSY
