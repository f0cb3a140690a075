"""The one line inside a rank: decode a case, apply the subject, run both graphs on the real backend, say what was seen.

The pool calls these tasks by name (``harness.executors.ranks.rank.TASKS``). What they answer is judged by ``harness.check``.
"""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct
from torch.fx import GraphModule, Node

from harness.errors import Unsupported
from harness.executors.compiled import Compiler, run_compiled
from harness.executors.inputs import clone, draw_concrete, trial_seed
from harness.executors.ranks.groups import named_groups
from harness.executors.ranks.rank import Context, TaskResult
from harness.executors.ranks.real import RealGraph, bare_loop
from harness.graph import build, fake_world, is_collective, is_wait, resolve, start_of, target_name
from harness.graph.analysis import WAIT
from harness.ops import TABLE, infer_program
from harness.oracles import graphs
from harness.oracles.evidence import Evidence
from harness.spec.outcome import ErrorRecord, RankOutcome
from harness.spec.program import Program
from harness.spec.protocols import OptionValue, Subject
from harness.spec.verdict import Reason
from harness.subjects.registry import load_subject

__all__ = ["PRELOAD", "TRIAL", "Answer", "Form", "Question", "bare", "compiled", "decode_answer", "encode_form", "encode_question", "error_record", "judge", "outline", "outline_of", "probe"]

PRELOAD: Final = ("harness.worker", "torch._dynamo")
"""What ranks import before they are forked: these tasks, and what torch's fake tensors import when the first graph is built."""

TRIAL: Final = "small"
"""The numbers that real ranks run on: small integers, whose sums are exact in whichever order a backend adds them."""


class Question(Struct, frozen=True):
    """One case as it travels.

    Attributes:
        program: the Program.
        feature, subject, options: what to load.
        seed: of the inputs; the same as in lockstep.
        keep: send the tensors' bytes.
        compiler: of the task ``compiled``.
        with_pass: whether the compiler is to run the pass.
    """

    program: Program
    feature: str
    subject: str
    options: dict[str, str | int | float | bool | None]
    seed: int = 0
    keep: bool = False
    compiler: Compiler = "aot_eager"
    with_pass: bool = True


class Form(Struct, frozen=True):
    """A collective in the form in which a backend takes it or not.

    Attributes:
        target: the operator.
        dtypes: of its operands.
        reduce_op: or None.
        shape: ``()``, ``(0,)`` or, for any that has elements, ``(2,)``.
    """

    target: str
    dtypes: tuple[str, ...]
    reduce_op: str | None
    shape: tuple[int, ...]


class Answer(Struct, frozen=True, omit_defaults=True):
    """What one rank saw.

    Attributes:
        before: the original graph's run; None where it was not come to.
        after: the transformed graph's; None where there is none, or where it is equal to ``before`` in every record.
        num_fired: what the subject changed on this rank.
        outline: a digest of the transformed graph, see ``outline_of``; from the task ``outline`` only.
        applied: what the pass raised, and where.
        reasons: what is wrong with the transformed graph itself.
        failed: the collective that raised, or whose wait did.
        unsupported: why this rank cannot run the case.
    """

    before: RankOutcome | None = None
    after: RankOutcome | None = None
    num_fired: int = 0
    outline: str = ""
    applied: ErrorRecord | None = None
    reasons: tuple[Reason, ...] = ()
    failed: Form | None = None
    unsupported: str | None = None


_ENCODER: Final = msgspec.msgpack.Encoder()
_QUESTIONS: Final = msgspec.msgpack.Decoder(Question)
_FORMS: Final = msgspec.msgpack.Decoder(Form)
_ANSWERS: Final = msgspec.msgpack.Decoder(Answer)


def encode_question(question: Question) -> bytes:
    """As it travels to the ranks."""
    return _ENCODER.encode(question)


def decode_answer(data: bytes) -> Answer:
    """What a rank returned."""
    return _ANSWERS.decode(data)


def judge(payload: bytes, context: Context) -> TaskResult:
    """Run the original program and what the subject makes of it, on this rank."""
    question = _QUESTIONS.decode(payload)
    try:
        answer, is_clean = _judge(question, context)
    except Unsupported as error:
        answer, is_clean = Answer(unsupported=str(error)), True
    return TaskResult(_ENCODER.encode(answer), is_clean)


def bare(payload: bytes, context: Context) -> TaskResult:
    """Only build, pass, and the collectives of both graphs, each waited for where its graph does; the answer is the seconds they took.

    What a case costs beyond that is the harness's own.
    """
    question = _QUESTIONS.decode(payload)
    program, rank = question.program, context.rank
    subject = _subject(question.subject, question.feature, tuple(question.options.items()))
    begin = time.perf_counter()
    metas = infer_program(program)
    gm = build(program, rank, metas)
    built = time.perf_counter() - begin
    inputs = clone(_inputs(program, rank, question.seed), program, context.device)
    context.enter()
    with named_groups(program.groups, rank):
        loop = bare_loop(RealGraph(gm, device=context.device), inputs)
        context.meet()
        begin = time.perf_counter()
        subject.apply(gm, rank)
        loop()
        loop()
        spent = built + time.perf_counter() - begin
    return TaskResult(f"{spent:.9f}".encode())


def outline(payload: bytes, context: Context) -> TaskResult:
    """Only what the subject makes of the graph of rank 0, as a digest; nothing is run."""
    question = _QUESTIONS.decode(payload)
    program = question.program
    subject = _subject(question.subject, question.feature, tuple(question.options.items()))
    gm = build(program, 0)
    with fake_world(program.world_size, 0, program.groups):
        try:
            answer = Answer(outline=outline_of(subject.apply(gm, 0).graph))
        except Unsupported as error:
            answer = Answer(unsupported=str(error))
        except Exception as error:
            answer = Answer(applied=error_record(error))
    return TaskResult(_ENCODER.encode(answer))


def outline_of(gm: GraphModule) -> str:
    """A digest of a graph's nodes in order: names, operators, arguments, and metadata; equal for equal graphs in any process."""
    digest = hashlib.blake2b(digest_size=16)
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        geometry = (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else None
        name = node.op if node.op != "call_function" else target_name(node)
        digest.update(repr((node.name, name, _plain(node.args), _plain(dict(node.kwargs)), geometry)).encode())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return value


@lru_cache(maxsize=64)
def _subject(name: str, feature: str, options: tuple[tuple[str, OptionValue], ...]) -> Subject:
    return load_subject(name, feature=feature, options=dict(options))


def _judge(question: Question, context: Context) -> tuple[Answer, bool]:
    program, rank = question.program, context.rank
    subject = _subject(question.subject, question.feature, tuple(question.options.items()))
    context.at("build")
    gm = build(program, rank, None if program.divergent else infer_program(program))
    original = RealGraph(gm, device=context.device)
    inputs = _inputs(program, rank, question.seed)
    context.at("the case before, where the other ranks are waited for")
    context.enter()
    with named_groups(program.groups, rank):
        context.at("pass")
        try:
            applied = subject.apply(gm, rank)
        except Unsupported:
            raise
        except Exception as error:
            return Answer(applied=error_record(error)), False
        transformed: GraphModule = applied.graph
        unsound = graphs.graph_valid(Evidence(program, (), (), [transformed])) if applied.num_fired else ()
        if unsound:
            return Answer(num_fired=applied.num_fired, reasons=tuple(unsound)), False
        rewritten = RealGraph(transformed, views_may_copy=getattr(subject, "views_may_copy", False), device=context.device)
        own = clone(inputs, program, context.device)
        again = inputs if context.device == "cpu" else clone(inputs, program, context.device)
        before = original.run(own, lambda place: context.at(f"original: {place}"), keep=question.keep)
        if before.error is not None:
            untouched = RealGraph(build(program, rank), device=context.device)  # the pass may have erased the node that failed
            return Answer(before, num_fired=applied.num_fired, failed=_form(untouched, before.error)), False
        context.at("original: its end, where the other ranks are waited for")
        context.meet()
        after = rewritten.run(again, lambda place: context.at(f"transformed: {place}"), keep=question.keep)
    failed = None if after.error is None else _form(rewritten, after.error)
    return Answer(before, None if after == before else after, applied.num_fired, failed=failed), after.error is None


def compiled(payload: bytes, context: Context) -> TaskResult:
    """Run the original program eagerly, then through ``torch.compile`` with the subject's pass inside."""
    question = _QUESTIONS.decode(payload)
    try:
        answer, is_clean = _compiled(question, context)
    except Unsupported as error:
        answer, is_clean = Answer(unsupported=str(error)), False
    return TaskResult(_ENCODER.encode(answer), is_clean)


def _compiled(question: Question, context: Context) -> tuple[Answer, bool]:
    program, rank = question.program, context.rank
    subject = _subject(question.subject, question.feature, tuple(question.options.items()))
    context.at("build")
    gm = build(program, rank, infer_program(program))
    original = RealGraph(gm, device=context.device)
    inputs = _inputs(program, rank, question.seed)
    own, again = (clone(inputs, program, context.device) for _ in range(2))
    context.enter()
    with named_groups(program.groups, rank):
        before = original.run(own, lambda place: context.at(f"original: {place}"), keep=True)
        if before.error is not None:
            return Answer(before, failed=_form(original, before.error)), False
        context.at("original: its end, where the other ranks are waited for")
        context.meet()
        run = run_compiled(
            gm,
            again,
            compiler=question.compiler,
            own_pass=partial(_applied, subject, rank) if question.with_pass else None,
            switches=subject.switches,
            at=lambda place: context.at(f"transformed: {place}"),
        )
    if run.in_pass is not None:
        return Answer(before, num_fired=run.num_fired, applied=error_record(run.in_pass)), False
    return Answer(before, run.outcome, run.num_fired), run.outcome.error is None


def _applied(subject: Subject, rank: int, gm: GraphModule) -> tuple[GraphModule, int]:
    applied = subject.apply(gm, rank)
    return applied.graph, applied.num_fired


def _form(graph: RealGraph, error: ErrorRecord) -> Form | None:
    """What collective an error belongs to."""
    node = next((step.node for step in graph.steps if step.node.name == error.node), None)
    start = None if node is None else node if is_collective(node) else start_of(node) if is_wait(node) else None
    spec = None if start is None else TABLE[target_name(start)].collective
    if start is None or spec is None:
        return None
    operands = start.args[0] if spec.coalesced else [start.args[0]]
    metas = [m for n in operands if isinstance(n, Node) and isinstance(m := n.meta.get("val"), torch.Tensor)]  # type: ignore[union-attr]
    if not metas:
        return None
    reduce_op = None if spec.reduce_op is None else str(start.args[spec.reduce_op])
    shape = () if not metas[0].shape else (2,) if metas[0].numel() else (0,)
    return Form(target_name(start), tuple(sorted({str(m.dtype).removeprefix("torch.") for m in metas})), reduce_op, shape)


def encode_form(form: Form) -> bytes:
    """As it travels to the ranks."""
    return _ENCODER.encode(form)


def probe(payload: bytes, context: Context) -> TaskResult:
    """Try one collective alone, on ones, over all ranks; the answer is what the backend says against it, or nothing."""
    context.enter()
    form = _FORMS.decode(payload)
    spec = TABLE[form.target].collective
    assert spec is not None
    count = context.world_size
    rows = (form.shape[0] and count, *form.shape[1:]) if form.shape else ()
    operands = [torch.ones(rows, dtype=getattr(torch, d), device=context.device) for d in form.dtypes]
    args: list[Any] = [operands if spec.coalesced else operands[0]]
    if spec.kind == "all_to_all":
        args += [[rows[0] // count] * count] * 2
    elif spec.kind == "broadcast":
        args.append(0)
    args += [] if form.reduce_op is None else [form.reduce_op]
    args += [] if spec.group_size is None else [count]
    named = {} if spec.out is None else {spec.out: torch.ones(_gathered(rows, spec.kind, count), dtype=operands[0].dtype, device=context.device)}
    try:
        result = resolve(form.target)(*args, _world_name(), **named)
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            resolve(WAIT)(tensor)
    except Exception as error:
        return TaskResult(f"{type(error).__name__}: {error}".encode(), False)
    return TaskResult(b"")


def _world_name() -> str:
    world: Any = dist.group.WORLD
    return str(world.group_name)


def _gathered(rows: tuple[int, ...], kind: str, count: int) -> tuple[int, ...]:
    return (rows[0] * count if kind == "all_gather" else rows[0] // count, *rows[1:])


def _inputs(program: Program, rank: int, seed: int) -> list[torch.Tensor]:
    """This rank's, as ``harness.check`` draws them for its first trial in lockstep."""
    return draw_concrete(program, TRIAL, trial_seed(seed, 0), rank)


def error_record(error: Exception) -> ErrorRecord:
    """What a pass raised, and in which file and function."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return ErrorRecord(type(error).__name__, str(error), f"{place.filename.rsplit('/', 1)[-1]} in {place.name}")
