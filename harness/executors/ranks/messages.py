"""What the controller, the process server and the ranks say to each other: typed messages in msgpack, each after its length.

No code and no pickle crosses a process boundary. Both ends are of one installation, so that messages carry no version.
"""

from __future__ import annotations

import socket
import struct
from typing import Final, Generic, TypeVar

import msgspec
from msgspec import Struct

__all__ = [
    "Case",
    "Died",
    "Done",
    "Form",
    "Formed",
    "FromRank",
    "FromServer",
    "Peer",
    "Preloaded",
    "Run",
    "Spawn",
    "Spawned",
    "ToRank",
    "ToServer",
]

_LENGTH: Final = struct.Struct("<Q")
_MOST_BYTES: Final = 2**32
_CHUNK: Final = 1 << 20


class Spawn(Struct, tag=True, frozen=True):
    """To the server, with six files: fork a process for ``rank``. The files are its socket, output, stacks, flight, board and turnstile."""

    rank: int


class Preloaded(Struct, tag=True, frozen=True):
    """From the server: all modules are imported; ``error`` says what did not import."""

    error: str | None = None


class Spawned(Struct, tag=True, frozen=True):
    """From the server: ``rank`` runs as process ``pid``, or ``error`` says why none could be started."""

    rank: int
    pid: int
    error: str | None = None


class Died(Struct, tag=True, frozen=True):
    """From the server: process ``pid`` ended, by signal ``signal`` or else with exit status ``exit_code``."""

    pid: int
    exit_code: int | None
    signal: int | None


class Form(Struct, tag=True, frozen=True):
    """To a rank: join the default group.

    Attributes:
        rank, world_size: this process's place.
        store: the path of the file that the ranks meet at.
        backend: ``gloo`` or ``nccl``.
        device: as ``cpu`` or ``cuda:0``.
        timeout_s: of the backend itself.
    """

    rank: int
    world_size: int
    store: str
    backend: str
    device: str
    timeout_s: float


class Case(Struct, frozen=True, array_like=True):
    """One call of a task: its number, which is never used twice, and its argument."""

    number: int
    payload: bytes


class Run(Struct, tag=True, frozen=True):
    """To a rank: do ``task`` for each case, one after the other."""

    task: str
    cases: tuple[Case, ...]


class Formed(Struct, tag=True, frozen=True):
    """From a rank: the group is there, and a first collective was done; ``error`` says why not."""

    error: str | None = None


class Done(Struct, tag=True, frozen=True):
    """From a rank: a case's result.

    Attributes:
        number: of the case.
        payload: what the task returned.
        is_clean: whether this rank took part in every collective of the case, so that the others need not wait in vain.
        error: the harness's own failure on this rank; then ``payload`` is empty.
    """

    number: int
    payload: bytes
    is_clean: bool = True
    error: str | None = None


ToServer = Spawn
FromServer = Preloaded | Spawned | Died
ToRank = Form | Run
FromRank = Formed | Done

In = TypeVar("In")
_ENCODER: Final = msgspec.msgpack.Encoder()


class Peer(Generic[In]):
    """One end of a socket.

    Args:
        sock: connected; of this Peer from now on.
        incoming: the type of what the other end sends.
    """

    def __init__(self, sock: socket.socket, incoming: object) -> None:
        self.sock = sock
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Struct, files: tuple[int, ...] = ()) -> None:
        """Send one message, with open files.

        Raises:
            OSError: the other end is gone.
        """
        data = _ENCODER.encode(message)
        head = _LENGTH.pack(len(data))
        if files:
            socket.send_fds(self.sock, [head], list(files))
            self.sock.sendall(data)
        else:
            self.sock.sendall(head + data)

    def receive(self, max_files: int = 0) -> tuple[In, list[int]] | None:
        """Wait for one message with its open files; None where the other end is gone."""
        files: list[int] = []
        while (message := self._take()) is None:
            if max_files:
                data, new, _, _ = socket.recv_fds(self.sock, _CHUNK, max_files)
                files += new
            else:
                data = self.sock.recv(_CHUNK)
            if not data:
                return None
            self._buffer += data
        return message, files

    def read_available(self) -> tuple[list[In], bool]:
        """All whole messages of what has arrived, after the socket was found readable; and whether the other end is gone."""
        try:
            data = self.sock.recv(_CHUNK)
        except ConnectionResetError:
            data = b""
        self._buffer += data
        messages = []
        while (message := self._take()) is not None:
            messages.append(message)
        return messages, not data

    def close(self) -> None:
        self.sock.close()

    def _take(self) -> In | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > _MOST_BYTES:
            raise ValueError(f"a message of {length} bytes; at most {_MOST_BYTES} are read")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        message = self._decoder.decode(bytes(self._buffer[_LENGTH.size : end]))
        del self._buffer[:end]
        return message
