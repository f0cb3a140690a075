"""Repro scripts are whole Python files, say what is wrong, and show the fault with torch alone."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from harness.check import check, signatures
from harness.errors import Unsupported
from harness.findings import environment, load_program
from harness.graph import trace as trace_program
from harness.ledger import golden_folder
from harness.ops import REGISTERED_BY, infer_program
from harness.report.repro import repro_script
from harness.report.script import script_program
from harness.spec.meta import TensorMeta
from harness.spec.program import Group, GroupArg, Op, Program, Ref, TensorSpec, contiguous_stride
from harness.spec.protocols import OptionValue
from harness.spec.verdict import Finding, Reason, Signature, Verdict
from harness.strategies.collectives import collective_programs
from harness.subjects.registry import load_subject

QUICK = settings(max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck))
GRAPH_LAWS = (
    "graph_valid",
    "order_kept",
    "collectives_conserved",
    "caps_respected",
    "idempotent",
    "ranks_agree",
)
RUN_LAWS = (
    "runs",
    "equal_outputs",
    "equal_inputs",
    "equal_metadata",
    "equal_strides",
    "own_storage",
    "same_aliasing",
    "in_flight",
    "metadata_true",
)


def _finding(
    program: Program, law: str, kind: str = "values", subject: str = "inductor", **options: OptionValue
) -> Finding:
    if subject == "inductor":
        options = {"pass": "all_gather", "mode": "default", "cap_mb": None, **options}
    reason = Reason(law, "FAIL", kind, 'a "message" with \\ and """', rank=0, expected="this", seen="that")
    return Finding(
        signature=Signature("bucketing", f"{subject}:x", law, kind),
        program=program,
        subject=subject,
        options=options,
        verdict=Verdict("FAIL", (reason,)),
        environment=environment(),
        command="",
    )


def _real_finding(name: str, **options: OptionValue) -> Finding:
    program = load_program(golden_folder() / "corpus" / "bucketing" / f"{name}.json")
    subject = load_subject("inductor", feature="bucketing", options={"cap_mb": None, **options})
    verdict = check(program, subject)
    _, signature = signatures(verdict, subject)[0]
    options_stored = dict(subject.options)
    return Finding(signature, program, "inductor", options_stored, verdict, environment(), "")


def _run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script elsewhere, where the project is not on the path."""
    (folder / "repro.py").write_text(script)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "repro.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={**kept, "OMP_NUM_THREADS": "1"},
    )


def _imported(script: str) -> set[str]:
    tree = ast.parse(script)
    names = [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def _undefined(script: str) -> set[str]:
    """Names that the script uses and nothing in it defines."""
    tree = ast.parse(script)
    defined = set(dir(__builtins__)) if not isinstance(__builtins__, dict) else set(__builtins__)
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defined.update((a.asname or a.name).partition(".")[0] for a in node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return used - defined - {"__file__", "__name__"}


@given(
    collective_programs(world_sizes=(2, 4)),
    st.sampled_from(("applies", *GRAPH_LAWS, *RUN_LAWS)),
    st.sampled_from(("values", "poison", "reassociated", "Divergence")),
    st.sampled_from(("inductor", "folder/my_pass.py:swap", "package.module:swap")),
)
@QUICK
def test_script_is_whole(program: Program, law: str, kind: str, subject: str) -> None:
    """Any finding gives a script that compiles, imports torch and standard modules alone, and defines all it uses."""
    finding = _finding(program, law, kind, subject)
    try:
        script = repro_script(finding)
    except Unsupported as error:
        assume(False)
        raise AssertionError from error
    compile(script, "repro.py", "exec")
    assert _imported(script) <= {*sys.stdlib_module_names, "torch"}
    assert not _undefined(script)
    assert max(len(line) for line in script.splitlines() if "Ref" not in line) < 2000
    assert "@" not in "".join(line for line in script.splitlines() if "contextmanager" not in line)
    assert ast.get_docstring(ast.parse(script))


@given(collective_programs(world_sizes=(2,), max_collectives=3, max_ops=8))
@settings(QUICK, max_examples=15, phases=(Phase.generate,))
def test_script_program_is_the_program(program: Program) -> None:
    """Traced again, `program` of a script starts and awaits the same, and returns the same shapes and dtypes."""
    parts = script_program(program)
    assume(all(groups == ((0, 1),) for groups in parts.groups.values()))
    code = f"import torch\naten, c10d = torch.ops.aten, torch.ops._c10d_functional\n{parts.program}\n{parts.inputs}"
    imports = "".join(f"import {m}\n" for n, m in REGISTERED_BY.items() if f"torch.ops.{n}." in code)
    scope: dict[str, Any] = {}
    exec(imports + code, scope)
    given_inputs = scope["inputs"](0)
    assert [tuple(t.shape) for t in given_inputs] == [spec.shape for spec in program.inputs]
    for spec, tensor in zip(program.inputs, given_inputs, strict=True):
        assert tensor.stride() == (contiguous_stride(spec.shape) if spec.stride is None else spec.stride)
        assert tensor.storage_offset() == spec.storage_offset

    def call(*tensors: Any) -> Any:
        extra = {"rank": dist.get_rank()} if parts.takes_rank else {}
        return scope["program"](*tensors, **dict.fromkeys(parts.groups, dist.group.WORLD.group_name), **extra)

    traced = trace_program(call, lambda rank, _: scope["inputs"](rank), 2)
    assert _communicates(traced) == _communicates(program)
    assert _returns(traced) == _returns(program)


def _communicates(program: Program) -> list[str]:
    return [op.target for op in program.ops if op.target.startswith("_c10d_functional.")]


def _returns(program: Program) -> list[tuple[tuple[int, ...], str]]:
    metas = infer_program(program)
    found = []
    for ref in program.outputs:
        meta = metas[ref.value]
        item = meta if isinstance(meta, TensorMeta) else meta[ref.item or 0]
        found.append((item.shape, item.dtype))
    return found


def test_stored_values_are_in_the_script() -> None:
    """Values that a finding brings are written out, the same for every rank where they are the same."""
    data = (bytes([0, 0, 128, 63, 0, 0, 0, 64]), bytes([0, 0, 64, 64, 0, 0, 128, 64]))
    start = Op("_c10d_functional.all_reduce.default", (Ref(0), "sum", GroupArg("world")))
    wait = Op("_c10d_functional.wait_tensor.default", (Ref(1),))
    spec = TensorSpec((2,), "float32", data=data)
    program = Program(2, (Group("world", ((0, 1),)),), (spec,), (start, wait), (Ref(2),))
    text = script_program(program).inputs
    assert (
        "[torch.tensor([1.0, 2.0], dtype=torch.float32), torch.tensor([3.0, 4.0], dtype=torch.float32)][rank]" in text
    )
    same = msgspec.structs.replace(program, inputs=(msgspec.structs.replace(spec, data=(data[0], data[0])),))
    assert "a = torch.tensor([1.0, 2.0], dtype=torch.float32)\n" in script_program(same).inputs


def test_program_reads_as_a_person_writes() -> None:
    """Names say what a value is: letters for inputs, the collective's participle, and done once waited for."""
    program = load_program(golden_folder() / "corpus/bucketing/bucketing-single-user.json")
    assert script_program(program).program == "\n".join(
        (
            "def program(a, b, *, world):",
            '    scattered = c10d.reduce_scatter_tensor(a, "sum", 2, world)',
            "    scattered_done = c10d.wait_tensor(scattered)",
            '    scattered_2 = c10d.reduce_scatter_tensor(b, "sum", 2, world)',
            "    scattered_2_done = c10d.wait_tensor(scattered_2)",
            "    return (scattered_done, scattered_2_done, scattered)",
        )
    )


def test_own_model_has_no_script() -> None:
    """A finding against our reference model is refused, since torch alone does not have it."""
    program = load_program(golden_folder() / "corpus/bucketing/bucketing-single-user.json")
    with pytest.raises(Unsupported, match="reference"):
        repro_script(_finding(program, "applies", subject="reference"))


def test_script_of_a_raising_pass_shows_it(tmp_path: Path) -> None:
    """A pass of torch that raises does so in the script, with status 1 and its message; torch alone is needed."""
    finding = _real_finding("bucketing-single-user", **{"pass": "reduce_scatter", "mode": "custom_ops"})
    result = _run(repro_script(finding), tmp_path)
    assert result.returncode == 1, result.stderr
    assert "FAULT: the pass raises AssertionError: Expected single user" in result.stdout


def test_script_over_gloo_shows_shared_storage(tmp_path: Path) -> None:
    """Outputs that share a storage are shown by real ranks, with status 1 and both ranks named."""
    finding = _real_finding("bucketing-shared-storage", **{"pass": "all_reduce", "mode": "all"})
    result = _run(repro_script(finding), tmp_path)
    assert result.returncode == 1, result.stderr
    for rank in (0, 1):
        assert f"FAULT: rank {rank}, outputs 0 and 1: expected storages of their own" in result.stdout


def test_mended_pass_gives_status_0(tmp_path: Path) -> None:
    """Once the fault is gone the same script exits with 0: here a user's pass that drops a wait, and then does not."""
    (tmp_path / "mine.py").write_text(
        "def drop(gm):\n"
        "    wait = next((n for n in gm.graph.nodes if 'wait_tensor' in str(n.target)), None)\n"
        "    wait.replace_all_uses_with(wait.args[0])\n"
        "    gm.graph.erase_node(wait)\n"
    )
    program = load_program(golden_folder() / "corpus/bucketing/bucketing-shared-storage.json")
    script = repro_script(_finding(program, "in_flight", "read_output", "mine.py:drop"))
    broken = _run(script, tmp_path)
    assert broken.returncode == 1, broken.stderr
    assert "FAULT: rank 1, output 0" in broken.stdout
    (tmp_path / "mine.py").write_text("def drop(gm):\n    return gm\n")
    mended = _run(script, tmp_path)
    assert (mended.returncode, mended.stdout) == (0, "no fault\n"), mended.stderr
