"""The process that imports torch once and forks the ranks; ``python -m harness.executors.ranks.server FD FOLDER MODULE ...``.

It reads ``Spawn`` from the socket FD and tells what becomes of its processes. When the controller is gone, however it ended, the
socket closes: the server removes FOLDER and ends, and the kernel ends the ranks with it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
from contextlib import suppress
from typing import Final

from harness.executors.ranks.messages import Died, Peer, Preloaded, Spawn, Spawned, ToServer

__all__ = ["main"]

_PR_SET_PDEATHSIG: Final = 1
_NUM_FILES: Final = 6


def main(arguments: list[str]) -> int:
    """Serve until the controller is gone."""
    sock = socket.socket(fileno=int(arguments[0]))
    peer: Peer[ToServer] = Peer(sock, ToServer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        peer.send(_preload(arguments[2:]))
        _serve(peer)
    except BrokenPipeError:
        pass
    finally:
        shutil.rmtree(arguments[1], ignore_errors=True)
    return 0


def _serve(peer: Peer[ToServer]) -> None:
    sock = peer.sock
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: set[int] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if wake in ready:
                with suppress(BlockingIOError):
                    while os.read(wake, 4096):
                        pass
            for died in _reap(children):
                peer.send(died)
            if sock.fileno() not in ready:
                continue
            received = peer.receive(_NUM_FILES)
            if received is None:
                return
            message, files = received
            spawned = _spawn(message, files, inherited=(wake, woken, sock.fileno()))
            if spawned.error is None:
                children.add(spawned.pid)
            peer.send(spawned)


def _preload(names: list[str]) -> Preloaded:
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            return Preloaded(f"{name} does not import: {type(error).__name__}: {error}")
    gc.collect()
    gc.freeze()  # no rank looks through what is imported for garbage, nor copies its pages to do so
    return Preloaded()


def _reap(children: set[int]) -> list[Died]:
    died: list[Died] = []
    for pid in list(children):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            children.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            died.append(Died(pid, code if code >= 0 else None, -code if code < 0 else None))
    return died


def _spawn(message: Spawn, files: list[int], inherited: tuple[int, ...]) -> Spawned:
    server = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        return Spawned(message.rank, 0, str(error))
    finally:
        if os.getpid() == server:
            for file in files:
                os.close(file)
    if pid:
        return Spawned(message.rank, pid)
    status = 1
    try:
        _become_rank(server, inherited, output=files[1])
        from harness.executors.ranks.rank import serve

        serve(socket.socket(fileno=files[0]), stacks=files[2], flight=files[3], board=files[4], turnstile=files[5])
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _become_rank(server: int, inherited: tuple[int, ...], output: int) -> None:
    """Leave behind what is the server's, and end when it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for file in inherited:
        os.close(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
