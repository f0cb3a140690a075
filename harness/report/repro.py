"""A finding as a bug report's script: one Python file that needs torch alone and exits with 1 while the fault shows.

What the fault is decides how the script shows it. A pass that raises, or a graph that is wrong by itself, needs one
process and a fake process group. Wrong values, memory or metadata are shown by real ranks over gloo, in a process each;
where gloo lacks a dtype, or the fault is about memory in flight, ranks are threads and the script carries collectives
out itself.
"""

from __future__ import annotations

import re
import textwrap
from typing import Final, NamedTuple

from harness.errors import Unsupported
from harness.ops import REGISTERED_BY
from harness.report import blocks
from harness.report.repro_autograd import autograd_script
from harness.report.script import ScriptProgram, collective_dtypes, script_program
from harness.spec.verdict import Finding, Reason

__all__ = ["repro_script"]

_WIDTH: Final = 110
_MAX_PROCESSES: Final = 8
_NOT_IN_GLOO: Final = frozenset({"float8_e4m3fn", "float8_e5m2", "int16"})
_MODULES: Final = (
    "base64",
    "contextlib",
    "importlib",
    "itertools",
    "os",
    "queue",
    "sys",
    "tempfile",
    "threading",
    "time",
    "traceback",
)
_BUCKETING: Final = "torch._inductor.fx_passes.bucketing"
_FSDP: Final = "torch._inductor.fx_passes.fsdp"
_TORCH_PASSES: Final = {
    "all_gather": (_BUCKETING, "bucket_all_gather", True),
    "reduce_scatter": (_BUCKETING, "bucket_reduce_scatter", True),
    "all_reduce": (_BUCKETING, "bucket_all_reduce", True),
    "fsdp_all_gather": (_FSDP, "bucket_fsdp_all_gather", True),
    "fsdp_reduce_scatter": (_FSDP, "bucket_fsdp_reduce_scatter", True),
    "fsdp_all_reduce": (_FSDP, "bucket_fsdp_all_reduce", False),
}
"""Pass to module, function, and whether it takes a mode."""
_PIPELINE: Final = ("reduce_scatter", "all_reduce", "all_gather")
_DEFAULT_CAP_MB: Final = 2000.0

_WRONG: Final = {
    "applies": "raises {kind}",
    "runs": "gives a graph that raises {kind} when it runs",
    "equal_outputs": "changes the values that a graph returns",
    "equal_inputs": "changes what a graph leaves in its inputs",
    "equal_metadata": "changes the {kind} of what a graph returns",
    "equal_strides": "changes the strides of what a graph returns",
    "own_storage": "makes the outputs of a graph share memory",
    "same_aliasing": "changes which tensors share memory",
    "in_flight": "lets a collective's memory be touched before its wait",
    "graph_valid": "gives an invalid graph",
    "metadata_true": "leaves untrue metadata on a node",
    "ranks_agree": "lets ranks issue different collectives",
    "order_kept": "changes the order of collectives",
    "collectives_conserved": "loses or duplicates a collective",
    "caps_respected": "exceeds the bucket cap",
    "idempotent": "changes its own result when applied again",
}


class _Pass(NamedTuple):
    """The pass under test: its name for people, its imports, and the body of ``apply_pass``."""

    title: str
    imports: tuple[str, ...]
    source: str
    cap_bytes: int


def repro_script(finding: Finding) -> str:
    """The script's text; it ends with a newline.

    Raises:
        Unsupported: the finding is about our own reference model, which torch alone does not have, or breaks a law that
            a script can't show.
    """
    if finding.program.autograd is not None:
        return autograd_script(finding)
    law = finding.signature.law
    if law not in _WRONG:
        raise Unsupported(f"law {law}", None, f"repro scripts show {', '.join(_WRONG)}")
    reason = next((r for r in finding.verdict.reasons if r.law == law and r.status == "FAIL"), None)
    tested = _user_pass(finding.subject) if ":" in finding.subject else _torch_pass(finding)
    parts = script_program(finding.program)
    kind = finding.signature.kind
    if kind in ("Divergence", "Deadlock"):
        law = "ranks_agree"
    body, remarks = _body(finding, kind, law, parts)
    arguments = "**groups, rank=rank" if parts.takes_rank else "**groups"
    sections = [
        _constants(finding, law, reason, tested, parts, body),
        parts.program,
        parts.inputs,
        _make_groups(parts, finding.program.world_size),
        _TRACE,
        tested.source,
        body,
        'if __name__ == "__main__":\n    sys.exit(main())',
    ]
    code = "\n\n\n".join(section.strip("\n") for section in sections if section).replace("@ARGUMENTS@", arguments)
    return f"{_docstring(finding, reason, tested, remarks)}\n\n{_imports(code, tested)}\n\n{code}\n"


_TRACE: Final = '''
def trace(rank, groups):
    """`program` on one rank as an FX graph, with fake tensors in meta["val"]; nothing runs."""
    return make_fx(lambda *tensors: program(*tensors, @ARGUMENTS@), tracing_mode="fake")(*inputs(rank))
'''


def _body(finding: Finding, kind: str, law: str, parts: ScriptProgram) -> tuple[str, list[str]]:
    """The blocks that judge, and what the docstring has to say about them."""
    if law == "applies":
        return blocks.FAKE_WORLD + "\n" + blocks.APPLIED, []
    if law in blocks.GRAPH_CHECKS:
        return blocks.FAKE_WORLD + "\n" + blocks.GRAPH_CHECKS[law], []
    remarks = [] if parts.has_own_values else ["The values are made up here; any ordinary ones show it."]
    prelude = _POISON if kind == "poison" else ""
    why = _why_threads(finding, law)
    if why is None:
        judge = blocks.METADATA_JUDGE if law == "metadata_true" else blocks.COMPARE[law] + "\n"
        if law != "metadata_true":
            judge += blocks.JUDGE_MANY if _needs_seeds(kind, parts) else blocks.JUDGE
        remarks.append("Every rank is a process; they talk over gloo.")
        return prelude + judge + "\n" + blocks.PROCESSES_MAIN, remarks
    if law == "metadata_true":
        raise Unsupported(f"law {law}", None, f"no script for it where {why}")
    remarks.append(f"Every rank is a thread, and the script carries the collectives out itself: {why}.")
    compared = blocks.COMPARE["equal_outputs" if law == "in_flight" else law]
    rest = (blocks.FAKE_WORLD, blocks.LOCKSTEP, blocks.LOCKSTEP_MAIN)
    return prelude + "\n".join((compared, *rest)), remarks


def _why_threads(finding: Finding, law: str) -> str | None:
    """Why real processes over gloo can't show the fault, or None where they can."""
    if law == "in_flight":
        return "on a real backend this fault shows by luck only"
    missing = sorted(collective_dtypes(finding.program) & _NOT_IN_GLOO)
    if missing:
        return f"gloo carries no {', '.join(missing)}"
    if finding.program.world_size > _MAX_PROCESSES:
        return f"{finding.program.world_size} processes are too many"
    return None


def _needs_seeds(kind: str, parts: ScriptProgram) -> bool:
    """Whether few of all ordinary values show the fault."""
    return kind == "reassociated" and not parts.has_own_values


_POISON: Final = """
# Memory that nobody has written holds NaN or the largest integer, so that reading it shows.
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True

"""


def _torch_pass(finding: Finding) -> _Pass:
    name, mode, cap_mb = (finding.options.get(key) for key in ("pass", "mode", "cap_mb"))
    if finding.subject != "inductor" or (name not in _TORCH_PASSES and name != "post_grad"):
        named = f"subject {finding.subject} {dict(finding.options)}"
        raise Unsupported(named, None, "a script with torch alone can show torch's own passes and a user's")
    steps = _PIPELINE if name == "post_grad" else (str(name),)
    cap = "None" if cap_mb is None else f"lambda bucket_index: {_megabytes(float(cap_mb))}"
    lines = []
    for step in steps:
        _, function, takes_mode = _TORCH_PASSES[step]
        given = "all" if step == "all_reduce" else mode
        lines.append(f'{function}(gm, {cap}, "{given}")' if takes_mode else f"{function}(gm, {cap})")
    imports = [f"from {_TORCH_PASSES[step][0]} import {_TORCH_PASSES[step][1]}" for step in steps]
    imports = (
        [f"from {_BUCKETING} import {', '.join(_TORCH_PASSES[s][1] for s in sorted(steps))}"]
        if len(steps) > 1
        else imports
    )
    source = [
        "def apply_pass(gm):",
        '    """What Inductor\'s post-grad passes do."""',
        *(f"    {line}" for line in lines),
        "    stable_topological_sort(gm.graph)",
        "    gm.recompile()",
        "    return gm",
    ]
    first = _TORCH_PASSES[steps[0]][1]
    title = "Inductor's post-grad bucketing" if len(steps) > 1 else first
    title += f' in mode "{mode}"' if mode != "all" and all(_TORCH_PASSES[s][2] for s in steps) else ""
    imports.append("from torch._inductor.fx_passes.post_grad import stable_topological_sort")
    limit = _DEFAULT_CAP_MB if cap_mb is None else float(cap_mb)
    return _Pass(title, tuple(imports), "\n".join(source), int(limit * 2**20))


def _megabytes(cap_mb: float) -> str:
    """A cap in MiB, as a number of bytes where it is a whole one."""
    num_bytes = cap_mb * 2**20
    return f"{int(num_bytes)} / 2**20" if num_bytes.is_integer() and not cap_mb.is_integer() else repr(cap_mb)


def _user_pass(subject: str) -> _Pass:
    where, _, attribute = subject.rpartition(":")
    if where.endswith(".py"):
        loading = [
            f"    here = (pathlib.Path({where!r}), pathlib.Path(__file__).parent / {where!r})",
            "    path = next((p for p in here if p.is_file()), here[0])",
            '    spec = importlib.util.spec_from_file_location("tested", path)',
            "    module = importlib.util.module_from_spec(spec)",
            "    spec.loader.exec_module(module)",
        ]
        imports: tuple[str, ...] = ("import importlib.util", "import pathlib")
    else:
        loading = [f"    module = importlib.import_module({where!r})"]
        imports = ()
    source = [
        "def apply_pass(gm):",
        f'    """Apply {attribute} of {where}, which changes the graph in place or returns another."""',
        *loading,
        f"    result = module.{attribute}(gm)",
        "    gm = result if isinstance(result, torch.fx.GraphModule) else gm",
        "    gm.recompile()",
        "    return gm",
    ]
    return _Pass(f"{attribute} of {where}", imports, "\n".join(source), 0)


def _constants(
    finding: Finding, law: str, reason: Reason | None, tested: _Pass, parts: ScriptProgram, body: str
) -> str:
    lines = ["aten = torch.ops.aten"] if "aten." in parts.program else []
    lines += ["c10d = torch.ops._c10d_functional"] if "c10d." in parts.program else []
    lines.append(f"WORLD_SIZE = {finding.program.world_size}")
    if law == "applies":
        lines.append(f"RANK = {reason.rank if reason is not None and reason.rank is not None else 0}")
    elif law == "caps_respected":
        lines.append(f"CAP_BYTES = {tested.cap_bytes}")
    elif law not in blocks.GRAPH_CHECKS:
        lines.append("TIMEOUT_SECONDS = 120")
        if "NUM_SEEDS" in body:
            lines.append("NUM_SEEDS = 100")
    lines.append(f"GROUPS = {_parts(parts)}  # the ranks that talk with each other, by the name of the group")
    return "\n".join(lines)


def _parts(parts: ScriptProgram) -> str:
    named = (f'"{name}": {[list(part) for part in groups]}' for name, groups in parts.groups.items())
    return "{" + ", ".join(named) + "}"


def _make_groups(parts: ScriptProgram, world_size: int) -> str:
    if all(groups == (tuple(range(world_size)),) for groups in parts.groups.values()):
        return '''def make_groups():
    """The names that torch gives to the process groups."""
    return {name: dist.group.WORLD.group_name for name in GROUPS}'''
    return '''def make_groups():
    """The names that torch gives to this rank's process groups; every rank makes all groups, in the same order."""
    names = {}
    for name, parts in GROUPS.items():
        for part in parts:
            group = dist.group.WORLD if part == list(range(WORLD_SIZE)) else dist.new_group(part)
            if dist.get_rank() in part:
                names[name] = group.group_name
    return names'''


def _imports(code: str, tested: _Pass) -> str:
    plain = {f"import {name}" for name in _MODULES if re.search(rf"(?<![\w.]){name}\.", code)}
    plain.update(line for line in tested.imports if line.startswith("import "))
    if "import importlib.util" in plain:
        plain.discard("import importlib")
    packages = ["import torch", "import torch.distributed as dist"]
    used = [m for namespace, m in REGISTERED_BY.items() if namespace == "_c10d_functional" or f"torch.ops.{namespace}." in code]
    packages += [f"import {module}  # registers the operators" for module in used]
    packages += ["import torch.multiprocessing as mp"] if "mp.get_context" in code else []
    froms = [line for line in tested.imports if line.startswith("from ")]
    froms.append("from torch.fx.experimental.proxy_tensor import make_fx")
    if "FakeStore" in code:
        froms.append("from torch.testing._internal.distributed.fake_pg import FakeStore")
    return "\n".join(sorted(plain)) + "\n\n" + "\n".join((*packages, *sorted(froms)))


def _docstring(finding: Finding, reason: Reason | None, tested: _Pass, remarks: list[str]) -> str:
    signature = finding.signature
    title = f"{tested.title} {_WRONG[signature.law].format(kind=signature.kind)}."
    paragraphs = [title]
    if reason is not None:
        seen = " ".join((reason.seen or "").split())
        message = " ".join(reason.message.split())
        paragraphs.append(f"Seen: {message}" + (f". In full: {seen[:400]}" if seen and seen not in message else ""))
        if reason.expected not in (None, "no error"):
            allowed = f" Allowed: {reason.allowed}." if reason.allowed else ""
            paragraphs.append(f"Expected: {' '.join(str(reason.expected).split())[:400]}.{allowed}")
    environment = finding.environment
    named = [f"{name} {environment[name]}" for name in ("torch", "python", "platform") if name in environment]
    paragraphs.append(f"With {', '.join(named)}." if named else "")
    paragraphs += [" ".join(remarks)] if remarks else []
    paragraphs.append(
        "Run it with Python and torch alone; it exits with 1 while the fault shows, with 0 once it is mended."
    )
    text = "\n\n".join(textwrap.fill(p, _WIDTH, break_long_words=False) for p in paragraphs if p)
    return '"""' + text.replace("\\", "\\\\").replace('"""', "'''") + '\n"""'
