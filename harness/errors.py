"""The errors that a user of the harness may meet. Each docstring says what causes it and what to do about it."""

from __future__ import annotations

__all__ = [
    "Deadlock",
    "Divergence",
    "HarnessError",
    "InvalidProgram",
    "UnknownSubject",
    "Unsupported",
    "WrongWorld",
]


class HarnessError(Exception):
    """Base of all errors that the harness raises on purpose.

    Cause: something a user did, or that this machine or this torch can't do. The command line prints the message as one
    line and exits with status 2. Remedy: as the message says.
    """


class InvalidProgram(HarnessError):
    """A Program, Finding or ledger file is not what its schema allows.

    Cause: a file that is cut off, edited by hand, or written by another version. Remedy: the message names the source,
    the path of the field, what stood there and what may stand there.

    Args:
        path: the field, as ``$.ops[3].args[0]``.
        reason: what stood there and what may stand there.
        source: the file or other origin, where known.
    """

    def __init__(self, path: str, reason: str, *, source: str | None = None) -> None:
        self.path = path
        self.reason = reason
        self.source = source
        super().__init__(f"{source}: {path}: {reason}" if source else f"{path}: {reason}")

    def at(self, source: str) -> InvalidProgram:
        """The same error, naming the file that it was found in."""
        return InvalidProgram(self.path, self.reason, source=source)


class Unsupported(HarnessError):
    """Something well-formed lies outside what the harness models.

    Cause: an operator, dtype or construct that is not in the table. Remedy: add it to ``harness/ops``, or leave it out.

    Args:
        op: the operator or construct, by its name.
        node: the node or field where it stands, or None.
        reason: more about it.
    """

    def __init__(self, op: str, node: str | None = None, reason: str = "not in the operator table") -> None:
        self.op = op
        self.node = node
        self.reason = reason
        where = f" at {node}" if node else ""
        super().__init__(f"unsupported {op}{where}: {reason}")


class UnknownSubject(HarnessError):
    """No subject by that name, or it could not be loaded.

    Cause: a misspelt name, a module that does not import, an attribute that is not callable. Remedy: ``harness features``
    lists the names; a user's own pass is ``package.module:attribute`` or ``path/to/file.py:attribute``.
    """


class WrongWorld(HarnessError):
    """A program is for another number of ranks than there are.

    Cause: a pool or ``--world-size`` of one size, a program of another. Remedy: use a pool of the program's size.
    """


class Divergence(HarnessError):
    """The ranks of one group disagree about a collective.

    Cause: ranks issue collectives that differ in kind, shape, dtype or reduce op, or one rank issues fewer than another.
    Remedy: the message names ranks and nodes. On a real backend this hangs, crashes or corrupts data.
    """


class Deadlock(HarnessError):
    """No rank can go on: each waits for a collective that another rank has not started.

    Cause: collectives in different order on different ranks. Remedy: the message says who waits for what.
    """
