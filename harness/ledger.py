"""The ledger: faults of the installed torch that are known, each understood to its root cause.

``golden/known_failures.toml`` has one table ``[[fault]]`` a fault. A failing check matches an entry when torch's
version is in its range and every field of the entry's signature fits; fields may hold ``*`` and ``?`` as in file names.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from datetime import date
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from harness.errors import InvalidProgram
from harness.ops.traits import TRAITS, traits
from harness.spec.program import LIMITS, Program
from harness.spec.protocols import OptionValue
from harness.spec.verdict import Signature

__all__ = ["Fault", "Ledger", "golden_folder", "installed_torch", "load_ledger"]


class Fault(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One known fault.

    Attributes:
        id: short and lasting, as ``bucketing-single-user``.
        feature, subject, law, kind, detail: of the signature; may hold wildcards.
        torch: the versions that have it, as a PEP 440 specifier.
        summary: one line: what is wrong where.
        program: the minimal program, relative to the golden folder.
        options: of the subject, that show it on that program.
        needs: what a program makes use of (``harness.ops.traits``) for the fault to show: wrong values of other programs are not this one.
        upstream: the reference of the upstream issue, or empty.
        found: when.
    """

    id: str
    feature: str
    subject: str
    law: str
    kind: str
    torch: str
    summary: str
    program: str
    options: dict[str, OptionValue]
    found: date
    detail: str = "*"
    needs: tuple[str, ...] = ()
    upstream: str = ""

    def matches(self, signature: Signature, torch_version: str, program: Program | None = None) -> bool:
        """Whether ``signature``, seen with that torch on that program, is this fault; what is needed of a program is not known of None."""
        if not SpecifierSet(self.torch).contains(Version(torch_version), prereleases=True):
            return False
        if self.needs and (program is None or not traits(program).issuperset(self.needs)):
            return False
        return all(
            fnmatchcase(getattr(signature, field), _escaped(getattr(self, field)))
            for field in ("feature", "subject", "law", "kind", "detail")
        )


def _escaped(pattern: str) -> str:
    """A pattern in which ``[`` is an ordinary character."""
    return pattern.replace("[", "[[]")


class _File(Struct, forbid_unknown_fields=True):
    fault: list[Fault] = []


class Ledger(Struct, frozen=True):
    """All known faults, and the version of the torch that is judged."""

    faults: tuple[Fault, ...]
    torch_version: str

    def match(self, signature: Signature, program: Program | None = None) -> Fault | None:
        """The known fault that ``signature`` shows on ``program``, or None."""
        return next((fault for fault in self.faults if fault.matches(signature, self.torch_version, program)), None)


@lru_cache(maxsize=1)
def installed_torch() -> str:
    """The public version of the installed torch, without importing it; ``0`` where there is none."""
    try:
        return Version(metadata.version("torch")).public
    except metadata.PackageNotFoundError:
        return "0"


def golden_folder() -> Path:
    """Where the golden data are: beside the package in a checkout, inside it once installed."""
    inside = Path(__file__).parent / "golden"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "golden"


def load_ledger(path: Path | None = None) -> Ledger:
    """Read the ledger; the project's own where no path is given.

    Raises:
        InvalidProgram: naming the file, the field and what is wrong.
        OSError: the file cannot be read.
    """
    source = path or golden_folder() / "known_failures.toml"
    size = source.stat().st_size
    if size > LIMITS.file_bytes:
        raise InvalidProgram("$", f"{size} bytes; at most {LIMITS.file_bytes} are read", source=str(source))
    try:
        parsed: Mapping[str, Any] = tomllib.loads(source.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidProgram("$", str(error), source=str(source)) from None
    try:
        faults = msgspec.convert(parsed, _File).fault
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `")
        raise InvalidProgram(where.rstrip("`") or "$", text, source=str(source)) from None
    for field, reason in _faults_of(faults):
        raise InvalidProgram(field, reason, source=str(source))
    return Ledger(tuple(faults), installed_torch())


def _faults_of(entries: list[Fault]) -> Iterator[tuple[str, str]]:
    """Every way in which the entries say too little, too much, or the same twice."""
    seen: set[str] = set()
    for i, fault in enumerate(entries):
        path = f"$.fault[{i}]"
        try:
            SpecifierSet(fault.torch)
        except InvalidSpecifier:
            yield f"{path}.torch", f"{fault.torch!r}; must be a version range as >=2.13,<2.15"
        if not fault.id or fault.id in seen:
            yield f"{path}.id", f"{fault.id!r} stands twice" if fault.id else "empty; must be a name of its own"
        for field in ("torch", "law", "kind"):
            if getattr(fault, field) in ("", "*"):
                yield f"{path}.{field}", "must be given: an entry that matches everything hides everything"
        for name in fault.needs:
            if name not in TRAITS:
                yield f"{path}.needs", f"{name!r}; must be of {', '.join(TRAITS)}"
        if not fault.summary.strip() or "\n" in fault.summary:
            yield f"{path}.summary", "must be one line that says what is wrong where"
        seen.add(fault.id)
