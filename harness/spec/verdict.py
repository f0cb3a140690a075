"""Verdict, Signature and Finding: what the oracles say, and what is kept of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from harness.errors import InvalidProgram
from harness.spec.program import LIMITS, Program, invalid_from, structural_faults

__all__ = [
    "FINDING_SCHEMA_VERSION",
    "Finding",
    "Reason",
    "Signature",
    "Status",
    "Verdict",
    "decode_finding",
    "encode_finding",
    "first_line",
    "merge",
    "normalise_message",
    "to_builtins",
]

FINDING_SCHEMA_VERSION: Final = 1

Status = Literal["FAIL", "INCONCLUSIVE", "PASS"]
_RANK: Final[dict[str, int]] = {"PASS": 0, "INCONCLUSIVE": 1, "FAIL": 2}


class Reason(Struct, frozen=True, omit_defaults=True):
    """One thing that an oracle has to say.

    Attributes:
        law: the law's name, as ``equal_outputs``.
        status: what this reason alone makes of the verdict.
        kind: the kind of discrepancy, as ``values``, ``storage_shared``, or an exception's type name.
        message: one sentence for a person.
        rank, node, index: where.
        expected, seen, allowed: what was expected, what was seen, what would have been allowed.
        detail: what else parts this fault from others of its law and kind, for the signature.
        ranks: of a case that did not run to its end: how each rank was found, with its Python stack and what it wrote.
    """

    law: str
    status: Status
    kind: str
    message: str
    rank: int | None = None
    node: str | None = None
    index: str | None = None
    expected: str | None = None
    seen: str | None = None
    allowed: str | None = None
    detail: str = ""
    ranks: tuple[str, ...] = ()


class Signature(Struct, frozen=True, order=True):
    """What makes two findings the same fault.

    Attributes:
        feature: as ``bucketing``.
        subject: the subject with the pass that ran, as ``inductor:all_gather/custom_ops``.
        law: the law that failed.
        kind: the kind of discrepancy, or the exception's type.
        detail: the normalised message (see ``normalise_message``) of an exception, else the reason's own detail.
    """

    feature: str
    subject: str
    law: str
    kind: str
    detail: str = ""


class Verdict(Struct, frozen=True, omit_defaults=True):
    """What a check found.

    Attributes:
        status: FAIL > INCONCLUSIVE > PASS.
        reasons: all that failed or could not be decided.
        strength: for a PASS: ``proved`` (field-equal and bitwise equal) or ``tested`` (numbers decided).
        num_fired: how many things the subject changed; 0 means that a PASS is vacuous.
        notes: measured, but not promised by the pass, so never an accusation.
        num_trials: how many sets of inputs were run.
        error_bound: an upper bound on the probability that ``proved`` is wrong.
    """

    status: Status
    reasons: tuple[Reason, ...] = ()
    strength: Literal["proved", "tested"] | None = None
    num_fired: int = 0
    notes: tuple[Reason, ...] = ()
    num_trials: int = 0
    error_bound: float | None = None

    @property
    def is_vacuous(self) -> bool:
        """Whether all laws held only because nothing happened."""
        return self.status == "PASS" and self.num_fired == 0


class Finding(Struct, frozen=True, omit_defaults=True):
    """A failing verdict with all that is needed to see it again.

    Attributes:
        signature: as first found.
        program: minimal.
        subject: the name to give to ``--subject``.
        options: the subject's options, as ``{"pass": "all_gather", "mode": "custom_ops"}``.
        verdict: with its reasons.
        environment: versions of torch, Python, the harness, and the platform.
        command: the command that shows it again.
        seed: of the input values.
    """

    signature: Signature
    program: Program
    subject: str
    options: dict[str, str | int | float | bool | None]
    verdict: Verdict
    environment: dict[str, str]
    command: str
    seed: int = 0
    schema_version: int = FINDING_SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.schema_version != FINDING_SCHEMA_VERSION:
            raise ValueError(f"schema_version {self.schema_version}; this harness reads {FINDING_SCHEMA_VERSION}")


def merge(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on several checks together: the gravest status, all reasons, the weakest strength."""
    parts = list(verdicts)
    if not parts:
        return Verdict("INCONCLUSIVE", (Reason("fired", "INCONCLUSIVE", "nothing_judged", "nothing was judged"),))
    strengths = {v.strength for v in parts if v.status == "PASS"}
    return Verdict(
        status=max((v.status for v in parts), key=_RANK.__getitem__),
        reasons=tuple(r for v in parts for r in v.reasons),
        strength="tested" if "tested" in strengths else "proved" if strengths == {"proved"} else None,
        num_fired=sum(v.num_fired for v in parts),
        notes=tuple(r for v in parts for r in v.notes),
        num_trials=sum(v.num_trials for v in parts),
        error_bound=max((v.error_bound for v in parts if v.error_bound is not None), default=None),
    )


_NOISE: Final = (
    (re.compile(r"0x[0-9a-fA-F]+"), "0x*"),
    (re.compile(r"\{[^{}]*\}"), "{*}"),
    (re.compile(r"\b(?:torch\.)?(?:Float8_\w+|BFloat16|Half|Float|Double|Long|Int|Short|Char|Byte|Bool)\b"), "dtype"),
    (re.compile(r"\btorch\.(?:float|bfloat|int|uint|bool)\w*"), "dtype"),
    (re.compile(r"\[[^\[\]]*\]"), "[*]"),
    (re.compile(r"\b[a-z][a-z0-9]*(_[a-z0-9]+)+\b(?!\()"), "*"),
    (re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?"), "#"),
    (re.compile(r"\s+"), " "),
)


def first_line(text: str) -> str:
    """The first line of a message, cut to 300 characters."""
    return text.strip().splitlines()[0][:300] if text.strip() else ""


def normalise_message(message: str) -> str:
    """An exception's message with what varies from program to program taken out, at most 160 characters.

    Of several lines the first non-empty one is kept. Addresses, sets, lists, dtypes, names of nodes, and numbers are
    each replaced by a sign (a node's name is a lower-case word with underscores that is not called). Normalising twice is the same as once.
    """
    text = next((line.strip() for line in message.splitlines() if line.strip()), "")
    for pattern, sign in _NOISE:
        text = pattern.sub(sign, text)
    return text[:160].strip()


_DECODER = msgspec.json.Decoder(Finding)
_ENCODER = msgspec.json.Encoder()


def encode_finding(finding: Finding) -> bytes:
    """JSON, indented for people; ``decode_finding`` of it is equal to ``finding``."""
    return msgspec.json.format(_ENCODER.encode(finding), indent=1) + b"\n"


def decode_finding(data: bytes | str) -> Finding:
    """Read a Finding from JSON, its Program checked as ``decode_program`` does.

    Raises:
        InvalidProgram: with the path of the field, what stood there and what may stand there.
    """
    if len(data) > LIMITS.file_bytes:
        raise InvalidProgram("$", f"{len(data)} bytes; at most {LIMITS.file_bytes} are read")
    try:
        finding = _DECODER.decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_from(error) from None
    for path, reason in structural_faults(finding.program):
        raise InvalidProgram(path.replace("$", "$.program", 1), reason)
    return finding


def to_builtins(value: Any) -> Any:
    """``value`` as plain lists and dicts, for ``--json`` output."""
    return msgspec.to_builtins(value)
