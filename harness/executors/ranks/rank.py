"""What one rank does: join the group when told to, then do tasks, case by case, until the controller is gone."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from harness.executors.ranks.board import Board, Turnstile
from harness.executors.ranks.messages import Case, Done, Form, Formed, Peer, Run, ToRank

__all__ = ["TASKS", "Context", "Stopped", "TaskResult", "done_with", "serve"]

TASKS: Final = {
    "judge": "harness.worker:judge",
    "bare": "harness.worker:bare",
    "compiled": "harness.worker:compiled",
    "outline": "harness.worker:outline",
    "probe": "harness.worker:probe",
}
"""The tasks that a controller may ask for, by name."""


_FLIGHT: Final = ("collective_seq_id", "profiling_name", "state", "process_group", "input_sizes", "input_dtypes")
"""What is kept of an entry of the flight recorder."""


class Context(NamedTuple):
    """What a task knows of its rank.

    Attributes:
        rank, world_size, backend, device: its place.
        at: says where the task is, for whoever watches.
        enter: waits until all ranks have done the case before; to be called before the first collective, and by a task that has one.
        meet: waits until all ranks have come to the same point of the same case; to be called once a case.
    """

    rank: int
    world_size: int
    backend: str
    device: str
    at: Callable[[str], None]
    enter: Callable[[], None] = lambda: None
    meet: Callable[[], None] = lambda: None


class Stopped(BaseException):
    """Some rank did not take part in all collectives of the case before, so that this one cannot begin."""


class TaskResult(NamedTuple):
    """What a task returns: see ``messages.Done``."""

    payload: bytes
    is_clean: bool = True


Task = Callable[[bytes, Context], TaskResult]


def serve(sock: socket.socket, *, stacks: int, flight: int, board: int, turnstile: int) -> None:
    """Do what the controller says, until it is gone.

    Args:
        sock: to the controller.
        stacks: an open file that the Python stacks of all threads are written to when SIGUSR1 arrives, also while a collective blocks.
        flight: an open file that the collectives under way are written to when SIGUSR2 arrives, where torch's flight recorder is on.
        board, turnstile: open files for these.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR2,))
    if os.environ.get("TORCH_FR_BUFFER_SIZE", "0") != "0":
        threading.Thread(target=_dump_flight, args=(flight,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    own_board = Board(board)
    peer: Peer[ToRank] = Peer(sock, ToRank)
    context: Context | None = None
    stile: Turnstile | None = None
    while (received := peer.receive()) is not None:
        message = received[0]
        if isinstance(message, Form):
            context = Context(message.rank, message.world_size, message.backend, message.device, own_board.at)
            stile = Turnstile(turnstile, message.rank, message.world_size)
            peer.send(_form(message))
        else:
            assert context is not None and stile is not None
            _run(message, peer, own_board, stile, context)


def _dump_flight(file: int) -> None:
    """At each SIGUSR2: what torch's flight recorder has of collectives that are not complete, as JSON."""
    from torch._C import _distributed_c10d

    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    while dump is not None:
        signal.sigwait((signal.SIGUSR2,))
        entries = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", [])
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps([{key: entry.get(key) for key in _FLIGHT} for entry in entries]).encode(), 0)


def _form(message: Form) -> Formed:
    try:
        if message.device.startswith("cuda"):
            torch.cuda.set_device(torch.device(message.device))
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            message.backend,
            store=FileStore(message.store, message.world_size),
            rank=message.rank,
            world_size=message.world_size,
            timeout=timedelta(seconds=message.timeout_s),
        )
        one = torch.ones(1, device=message.device)
        dist.all_reduce(one)
        if int(one) != message.world_size:
            return Formed(f"a sum of ones over {message.world_size} ranks is {int(one)}")
    except Exception as error:
        return Formed(f"{type(error).__name__}: {error}")
    return Formed()


@lru_cache(maxsize=None)
def _task(name: str) -> Task:
    module, _, attribute = TASKS[name].partition(":")
    found: Task = getattr(importlib.import_module(module), attribute)
    return found


def _run(message: Run, peer: Peer[Any], board: Board, turnstile: Turnstile, context: Context) -> None:
    """All cases, up to one in which some rank did not take part in all collectives."""
    first = message.cases[0].number

    def enter(case: int) -> None:
        if not turnstile.enter(case, first):
            raise Stopped

    for case in message.cases:
        number = case.number
        board.begin(number)
        own = context._replace(enter=partial(enter, number), meet=partial(turnstile.meet, number))
        try:
            done = done_with(message.task, case, own)
        except Stopped:
            return
        turnstile.done(number, stop=not done.is_clean)
        peer.send(done)
        if not done.is_clean:
            return


def done_with(name: str, case: Case, context: Context) -> Done:
    """Do one case.

    Raises:
        Stopped: some rank broke off the case before.
    """
    try:
        result = _task(name)(case.payload, context)
    except Exception as error:
        place = "".join(traceback.format_tb(error.__traceback__)[-2:])
        return Done(case.number, b"", False, f"{type(error).__name__}: {error}\n{place}")
    return Done(case.number, result.payload, result.is_clean)
