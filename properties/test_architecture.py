"""Who may import whom, as tests: downward only, models never judge themselves, and nothing light drags torch in."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent / "harness"
LAYERS = (
    {"cli", "pytest_plugin"},
    {"conformance", "casefile"},
    {"hunt"},
    {"report"},
    {"levels"},
    {"check", "ledger", "findings"},
    {"on_saved_tensors"},
    {"on_compiler", "on_autograd"},
    {"on_ranks", "twin"},
    {"worker"},
    {"subjects"},
    {"reference", "strategies", "executors", "oracles"},
    {"graph", "capability"},
    {"ops"},
    {"spec"},
    {"errors"},
)
"""From the top down; packages of one layer do not import each other, but for ``report``, which is data for the command line."""
ISLANDS = {"reference", "strategies", "executors", "oracles"}
NO_TORCH = ("errors", "spec", "ops", "ledger", "findings", "subjects.registry", "cli", "strategies", "oracles", "")
PRIVATE_ALLOWED = {"subjects", "graph", "executors"}
EXTENSION_POINTS = {"torch.utils._python_dispatch", "torch.utils._pytree"}
"""Made for others to build upon, though no public name leads there."""
HYPOTHESIS_ALLOWED = {"strategies", "hunt", "conformance", "pytest_plugin"}


class Import(NamedTuple):
    module: str
    name: str
    at_top: bool


def modules(root: Path = ROOT) -> Iterator[tuple[str, Path]]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        yield ".".join(p for p in parts if p != "__init__"), path


def imports(source: str) -> list[Import]:
    """Every import of a source, and whether it runs when the module is imported (not inside a function or TYPE_CHECKING)."""
    found: list[Import] = []

    def visit(node: ast.AST, at_top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inner = at_top and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                inner = False
            if isinstance(child, ast.Import):
                found.extend(Import(a.name, "", at_top) for a in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                found.extend(Import(child.module, a.name, at_top) for a in child.names)
            visit(child, inner)

    visit(ast.parse(source), True)
    return found


def level(package: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if package in layer)


def upward(module: str, source: str) -> list[str]:
    """Imports within the harness that go up a layer, or sideways to another package of the same one."""
    own = module.partition(".")[0]
    if not own:
        return []
    bad = []
    for found in imports(source):
        if found.module.split(".")[0] != "harness" or not found.at_top:
            continue
        other = found.module.split(".")[1] if "." in found.module else found.name
        if other != own and other and level(other) <= level(own):
            bad.append(f"{module} imports {found.module}")
    return bad


def test_every_package_has_a_layer() -> None:
    """Each module belongs to a layer, so that no part escapes the rules."""
    known = set().union(*LAYERS)
    assert {m.partition(".")[0] for m, _ in modules() if m} <= known


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda v: str(v) if isinstance(v, str) else "")
def test_imports_go_down(module: str, path: Path) -> None:
    """No module imports one of a higher layer, or of another package of its own layer."""
    assert not upward(module, path.read_text())


def test_the_rule_sees_an_upward_import() -> None:
    """An upward and a sideways import, planted, are both seen."""
    assert upward("ops.core", "from harness.graph import build") and upward("oracles.x", "import harness.executors.plan")
    assert not upward("graph.build", "from harness.ops import TABLE")


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda v: str(v) if isinstance(v, str) else "")
def test_judges_do_not_know_the_models(module: str, path: Path) -> None:
    """Oracles and executors never import the reference models, at any place in their code."""
    if module.partition(".")[0] in ("oracles", "executors"):
        assert not [f for f in imports(path.read_text()) if f.module.startswith("harness.reference")]


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda v: str(v) if isinstance(v, str) else "")
def test_private_torch_names_stay_behind_probes(module: str, path: Path) -> None:
    """Modules of torch whose names begin with an underscore are imported only where the harness touches torch's inside."""
    private = [f.module for f in imports(path.read_text()) if f.module.startswith("torch.") and "._" in f.module and f.module not in EXTENSION_POINTS]
    assert not private or module.partition(".")[0] in PRIVATE_ALLOWED


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda v: str(v) if isinstance(v, str) else "")
def test_hypothesis_stays_where_programs_are_drawn(module: str, path: Path) -> None:
    """hypothesis is imported only by strategies, the hunt, conformance and the pytest plug-in."""
    uses = any(f.module.split(".")[0] == "hypothesis" for f in imports(path.read_text()))
    assert not uses or module.partition(".")[0] in HYPOTHESIS_ALLOWED


@pytest.mark.parametrize("module", NO_TORCH)
def test_light_modules_import_no_torch(module: str) -> None:
    """Importing a module that a controller of several torch installations needs leaves torch out, also through others."""
    name = f"harness.{module}".rstrip(".")
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, timeout=60).returncode == 0


def test_help_imports_no_torch() -> None:
    """``harness --help`` answers without torch."""
    code = "import sys; sys.argv = ['harness', '--help']\ntry:\n    from harness.cli import main; main()\nexcept SystemExit: pass\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, timeout=60, capture_output=True).returncode == 0
