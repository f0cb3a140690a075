"""Typed messages through a c10d TCPStore that anybody may connect to, but only those who know a secret can read or write.

Both the names of the keys and the values depend on the secret: a key is a keyed hash of its name, a value is encrypted and authenticated
(Fernet) together with its name, so that a peer without the secret can neither read a message nor have one accepted.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from harness.errors import HarnessError

__all__ = ["SECRET", "Mailbox", "RemoteRanks", "address_of", "secret_from"]

SECRET: Final = "HARNESS_RANKS_SECRET"
"""The environment variable that holds the secret, for the controller and for every rank."""

_LEAST_CHARACTERS: Final = 16

T = TypeVar("T", bound=Struct)


class RemoteRanks(HarnessError):
    """The controller and ranks that torchrun started cannot work together.

    Cause: no secret, another secret, an address that cannot be listened at, or ranks that did not come. Remedy: as the message says.
    """


class _Letter(Struct, frozen=True, array_like=True):
    name: str
    message: msgspec.Raw


class Mailbox:
    """Messages by name.

    Args:
        store: connected.
        secret: what ``secret_from`` gave.
    """

    def __init__(self, store: TCPStore, secret: str) -> None:
        try:
            from cryptography.fernet import Fernet
        except ModuleNotFoundError:
            raise RemoteRanks("ranks on other machines need the package cryptography: pip install 'compiler-harness[remote]'") from None
        self._store = store
        self._key = hashlib.blake2b(secret.encode(), digest_size=32, person=b"harness.ranks").digest()
        self._cipher = Fernet(base64.urlsafe_b64encode(self._key))

    def clone(self) -> Mailbox:
        """The same through a connection of its own, for another thread."""
        other = object.__new__(Mailbox)
        other._store, other._key, other._cipher = self._store.clone(), self._key, self._cipher  # type: ignore[attr-defined]
        return other

    def put(self, name: str, message: Struct) -> None:
        """Write a message, in place of an older one of this name."""
        letter = _Letter(name, msgspec.Raw(msgspec.msgpack.encode(message)))
        self._store.set(self._place(name), self._cipher.encrypt(msgspec.msgpack.encode(letter)).decode())

    def has(self, names: Iterable[str]) -> bool:
        """Whether something is written under all of these names."""
        return bool(self._store.check([self._place(name) for name in names]))

    def take(self, name: str, kind: type[T]) -> T | None:
        """The message of this name; None where there is none, or none that was written with the secret."""
        from cryptography.fernet import InvalidToken

        if not self.has([name]):
            return None
        try:
            letter = msgspec.msgpack.decode(self._cipher.decrypt(self._store.get(self._place(name))), type=_Letter)
        except InvalidToken:
            return None
        return msgspec.msgpack.decode(letter.message, type=kind) if letter.name == name else None

    def drop(self, names: Iterable[str]) -> None:
        """Forget these messages."""
        for name in names:
            self._store.delete_key(self._place(name))

    def _place(self, name: str) -> str:
        return hashlib.blake2b(name.encode(), key=self._key, digest_size=16).hexdigest()


def secret_from(environment: Any = os.environ) -> str:
    """The secret that the environment holds.

    Raises:
        RemoteRanks: there is none, or it is too short.
    """
    secret: str = environment.get(SECRET, "")
    if len(secret) < _LEAST_CHARACTERS:
        raise RemoteRanks(f"{SECRET} has {len(secret)} characters; set it to the same secret of {_LEAST_CHARACTERS} or more for the command and for all ranks")
    return secret


def address_of(text: str) -> tuple[str, int]:
    """``HOST:PORT`` as its parts.

    Raises:
        RemoteRanks: it is not of that form.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise RemoteRanks(f"{text!r} is no address; must be as 127.0.0.1:29600")
    return host.strip("[]"), int(port)
