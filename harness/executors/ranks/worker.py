"""A rank that torchrun starts: ``torchrun ... -m harness.executors.ranks.worker --controller HOST:PORT``.

It comes to the controller of a ``harness`` command that was given ``--ranks HOST:PORT``, does what it says, and ends when it ends. The same
tasks run here as in a pool's own ranks. When the controller gives a case up, every rank ends with a failure, and torchrun, if its
``--max-restarts`` lets it, starts all of them anew.
"""

from __future__ import annotations

import importlib
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from functools import partial
from typing import Final

import click
import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from harness.errors import HarnessError
from harness.executors.ranks.mailbox import Mailbox, RemoteRanks, address_of, secret_from
from harness.executors.ranks.messages import Done
from harness.executors.ranks.rank import Context, Stopped, done_with
from harness.executors.ranks.remote import Abandon, End, Hello, Join, Names, Order, Roster, Seen

__all__ = ["main"]

_ABANDONED: Final = 75
_PAUSE_S: Final = 0.0005
_MOST_PAUSE_S: Final = 0.02
_LOOK_S: Final = 0.05
_LEFT_S: Final = 20.0
_COME_S: Final = 600.0
_STORE_S: Final = 30.0
_BACKEND_S: Final = 1800.0


class _Worker:
    """One rank of one generation."""

    def __init__(self, mail: Mailbox, generation: int, context: Context) -> None:
        self.mail = mail
        self.generation = generation
        self.context = context
        self.place = ""
        self.main_thread = threading.get_ident()
        self.is_over = threading.Event()

    def serve(self) -> None:
        """Do orders until the controller says that it is over."""
        number = 0
        rank = self.context.rank
        while True:
            name, pause = Names.order(self.generation, number), _PAUSE_S
            while not self.mail.has([name]):
                if self.mail.take(Names.END, End) is not None:
                    self.mail.put(Names.gone(self.generation, rank), End())
                    return
                time.sleep(pause)
                pause = min(2 * pause, _MOST_PAUSE_S)
            order = self.mail.take(name, Order)
            if order is None:
                raise RemoteRanks("an order was not written with the secret")
            for module in order.modules:
                importlib.import_module(module)
            self.mail.put(Names.begun(self.generation, number, rank), End())
            self._run(order)
            number += 1

    def _run(self, order: Order) -> None:
        first = order.cases[0].number
        for case in order.cases:
            self.at("")
            own = self.context._replace(at=self.at, enter=partial(self._enter, case.number, first), meet=partial(self._meet, case.number))
            try:
                done = done_with(order.task, case, own)
            except Stopped:
                return
            self.mail.put(Names.done(self.generation, case.number, self.context.rank), done)
            if not done.is_clean:
                return

    def at(self, place: str) -> None:
        self.place = place

    def _enter(self, case: int, first: int) -> None:
        """Wait until all ranks have done the case before; a rank that broke it off ends the order."""
        if case == first:
            return
        before = [Names.done(self.generation, case - 1, rank) for rank in range(self.context.world_size)]
        self._await(before)
        answers = [self.mail.take(name, Done) for name in before]
        if not all(answer is not None and answer.is_clean for answer in answers):
            raise Stopped

    def _meet(self, case: int) -> None:
        self.mail.put(Names.met(self.generation, case, self.context.rank), End())
        self._await([Names.met(self.generation, case, rank) for rank in range(self.context.world_size)])

    def _await(self, wanted: list[str]) -> None:
        pause = _PAUSE_S
        while not self.mail.has(wanted):
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE_S)

    def watch(self, mail: Mailbox) -> None:
        """In a thread of its own: say where the rank is when asked, and end it when the controller gives up."""
        told = False
        try:
            while not self.is_over.wait(_LOOK_S):
                if not told and mail.take(Names.look(self.generation), End) is not None:
                    frame = sys._current_frames().get(self.main_thread)
                    stack = "" if frame is None else "".join(reversed(traceback.format_stack(frame)))
                    mail.put(Names.seen(self.generation, self.context.rank), Seen(self.place, stack))
                    told = True
                abandon = mail.take(Names.abandon(self.generation), Abandon)
                if abandon is not None:
                    if abandon.rank != self.context.rank:
                        time.sleep(_LEFT_S)  # within which torchrun ends this rank for the other's sake
                    os._exit(_ABANDONED)
        except RuntimeError:  # the store is gone, and the controller with it
            return


@click.command()
@click.option("--controller", default="127.0.0.1:29600", show_default=True, help="Where the harness command listens, as its --ranks says.")
@click.option("--backend", type=click.Choice(("gloo", "nccl")), help="nccl where there is a CUDA device for each rank of this machine; else gloo.")
def main(controller: str, backend: str | None) -> None:
    """One rank for a harness command on this or another machine; to be started by torchrun."""
    try:
        _serve(address_of(controller), secret_from(), backend)
    except HarnessError as error:
        raise click.ClickException(str(error)) from None


def _serve(address: tuple[str, int], secret: str, backend: str | None) -> None:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        raise RemoteRanks("this is to be started by torchrun: torchrun --nproc-per-node=2 --max-restarts=100 -m harness.executors.ranks.worker")
    torch.set_num_threads(1)
    rank, world_size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    has_devices = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    backend = backend or ("nccl" if has_devices else "gloo")
    device = f"cuda:{local}" if backend == "nccl" else "cpu"
    store = _connected(address)
    mail = Mailbox(store, secret)
    if backend == "nccl":
        torch.cuda.set_device(local)
    generation = _gathered(mail, rank, world_size)
    meeting = PrefixStore(f"{generation}", store)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=world_size, timeout=timedelta(seconds=_BACKEND_S))
    dist.barrier()
    context = Context(rank, world_size, backend, device, lambda place: None)
    worker = _Worker(mail, generation, context)
    watcher = threading.Thread(target=worker.watch, args=(mail.clone(),), daemon=True)
    watcher.start()
    try:
        if rank == 0:
            mail.put(Names.HELLO, Hello(worker.generation, world_size, backend))
        worker.serve()
    except DistNetworkError:  # the controller is gone without a word
        pass
    finally:
        worker.is_over.set()
        watcher.join()
    dist.destroy_process_group()


def _gathered(mail: Mailbox, rank: int, world_size: int) -> int:
    """Wait until all ranks are those that torchrun started last, and agree on a generation, which is returned.

    Torch's own way (``env://``) finds no partners here: it counts restarts by agent, and agents of several nodes count differently.
    """
    drawn, ranks = secrets.randbits(62), range(world_size)
    mail.put(Names.join(rank), Join(drawn))
    roster: Roster | None = None
    end = time.monotonic() + _COME_S
    while time.monotonic() < end:
        if rank == 0:
            joined = [mail.take(Names.join(r), Join) for r in ranks]
            there = tuple(j.drawn for j in joined if j is not None)
            if len(there) == world_size and (roster is None or roster.drawn != there):
                roster = Roster(secrets.randbits(62), there)
                mail.put(Names.ROSTER, roster)
        else:
            roster = mail.take(Names.ROSTER, Roster)
        if roster is not None and len(roster.drawn) == world_size and roster.drawn[rank] == drawn:
            mail.put(Names.agreed(roster.generation, rank), End())
            if mail.has([Names.agreed(roster.generation, r) for r in ranks]):
                return roster.generation
        time.sleep(_MOST_PAUSE_S)
    raise RemoteRanks(f"not all {world_size} ranks came within {_COME_S:g} s")


def _connected(address: tuple[str, int]) -> TCPStore:
    """The controller's store, once it is there."""
    end = time.monotonic() + _COME_S
    while True:
        try:
            socket.create_connection(address, timeout=_STORE_S).close()
            return TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_STORE_S))
        except OSError as error:
            if time.monotonic() > end:
                raise RemoteRanks(f"nobody listens at {address[0]}:{address[1]} for {_COME_S:g} s ({error})") from None
            time.sleep(_LOOK_S)


if __name__ == "__main__":
    main()
