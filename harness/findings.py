"""Findings on disk: written whole or not at all, read back with every fault named."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import secrets
import shlex
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from harness.errors import InvalidProgram
from harness.ops import read_finding as parse_finding
from harness.ops import read_program as parse_program
from harness.spec.program import LIMITS, Program
from harness.spec.verdict import Finding, Signature, encode_finding

__all__ = ["Stored", "environment", "file_name", "load_finding", "load_program", "store_finding", "write_atomically"]


def environment() -> dict[str, str]:
    """Versions of what a finding was seen with; torch's from its distribution, so that nothing is imported."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for distribution in ("torch", "compiler-harness", "hypothesis"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[distribution] = metadata.version(distribution)
    return versions


def file_name(signature: Signature) -> str:
    """A name that people can read, the same for the same fault, as ``bucketing-reference-default-runs-1a2b3c4d.json``."""
    words = "-".join((signature.feature, signature.subject, signature.law, signature.kind))
    slug = re.sub(r"[^A-Za-z0-9_]+", "-", words).strip("-")[:80]
    digest = hashlib.blake2b(repr(signature).encode(), digest_size=4).hexdigest()
    return f"{slug}-{digest}.json"


class Stored(NamedTuple):
    """Where a finding is, and whether this call wrote it (or an equal one was there already)."""

    path: Path
    is_new: bool


def store_finding(finding: Finding, folder: Path, *, replacing: Path | None = None) -> Stored:
    """Write a finding into ``folder`` (made where missing); its ``command`` is made to name the file.

    No file is lost: only ``replacing``, which the caller wrote before, is written over. Where another file already has
    the name of this signature, that file serves if it holds the same, seen with the same torch; else the next free
    number is taken.

    Raises:
        OSError: the folder or file cannot be written; what was there stays whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if replacing is not None:
        write_atomically(replacing, _encoded(finding, replacing))
        return Stored(replacing, True)
    name = file_name(finding.signature)
    for number in count(1):
        path = folder / (name if number == 1 else name.replace(".json", f"-{number}.json"))
        if _holds(path, finding):
            return Stored(path, False)
        if write_atomically(path, _encoded(finding, path), new=True):
            return Stored(path, True)
    raise AssertionError("unreachable")


def _encoded(finding: Finding, path: Path) -> bytes:
    return encode_finding(msgspec.structs.replace(finding, command=f"harness replay {shlex.quote(str(path))}"))


def _holds(path: Path, finding: Finding) -> bool:
    """Whether ``path`` already has this finding, as good as the new one."""
    try:
        old = load_finding(path)
    except (InvalidProgram, OSError):
        return False
    return _essence(old) == _essence(finding)


def _essence(finding: Finding) -> Finding:
    """What matters of a finding: all but its command and the machine."""
    torch = {name: version for name, version in finding.environment.items() if name == "torch"}
    return msgspec.structs.replace(finding, command="", environment=torch)


def write_atomically(path: Path, data: bytes, *, new: bool = False) -> bool:
    """Write ``data`` to a temporary file beside ``path``, flush it to disk, and give it the name ``path`` in one step.

    Args:
        path: a file that is there already is replaced, unless ``new``.
        data: all of the file.
        new: leave a file that is there as it is.

    Returns:
        False where ``new`` and ``path`` is there already, so that nothing was written.
    """
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if new:
            os.link(temporary, path)
            os.unlink(temporary)
        else:
            os.replace(temporary, path)
    except FileExistsError:
        os.unlink(temporary)
        return False
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return True


def load_finding(path: Path) -> Finding:
    """Read a finding.

    Raises:
        InvalidProgram: naming the file, the field, what stood there and what may stand there.
        OSError: the file cannot be read.
    """
    try:
        return parse_finding(_read(path))
    except InvalidProgram as error:
        raise error.at(str(path)) from None


def load_program(path: Path) -> Program:
    """Read a Program from a file; a finding's file gives its Program.

    Raises:
        InvalidProgram: naming the file, the field, what stood there and what may stand there.
        OSError: the file cannot be read.
    """
    data = _read(path)
    try:
        if _is_finding(data):
            return parse_finding(data).program
        return parse_program(data)
    except InvalidProgram as error:
        raise error.at(str(path)) from None


class _Probe(Struct):
    signature: msgspec.Raw = msgspec.Raw()
    program: msgspec.Raw = msgspec.Raw()


def _is_finding(data: bytes) -> bool:
    try:
        probe = msgspec.json.decode(data, type=_Probe)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return bool(bytes(probe.signature) and bytes(probe.program))


def _read(path: Path) -> bytes:
    size = path.stat().st_size
    if size > LIMITS.file_bytes:
        raise InvalidProgram("$", f"{size} bytes; at most {LIMITS.file_bytes} are read", source=str(path))
    return path.read_bytes()
