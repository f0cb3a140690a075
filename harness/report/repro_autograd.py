"""The script of a finding about a program with a backward: it runs eagerly and compiled, and prints what differs, with torch alone."""

from __future__ import annotations

from typing import Final

from harness.errors import Unsupported
from harness.executors.inputs import draw_concrete
from harness.graph.source import source
from harness.spec.program import Program, TensorSpec, contiguous_stride, storage_numel
from harness.spec.verdict import Finding

__all__ = ["autograd_script"]

_DIRECT: Final = "aot_function(fn, nop, nop, default_partition, keep_inference_input_mutations=True)"

_RUN: Final = '''
def told(stage, kind, tensors):
    """One line a tensor: what is compared."""
    for i, t in enumerate(tensors):
        what = "none" if t is None else f"{t.tolist()}, requires_grad {t.requires_grad}, grad_fn {t.grad_fn is not None}"
        yield f"{kind} {i} after {stage}: {what}"


def run(is_compiled):
    """What there is after forward and after each backward, line by line; an error ends it."""
    tensors, args, held, leaves = inputs()
    before = [t._version for t in tensors]
    fn = @CALLABLE@
    lines = []
    try:
        outputs = (compiled(fn) if is_compiled else fn)(*args)
        roots = [t for t in (*outputs, *tensors) if t.grad_fn is not None]
        lines += [*told("forward", "output", outputs), *told("forward", "input", tensors)]
@HOOKS@        for number in range(@NUM_BACKWARD@ if roots and leaves else 0):
            generator = torch.Generator().manual_seed(1)
            seeds = [torch.randint(-3, 4, t.shape, generator=generator).to(t.dtype) for t in roots]
            last = number + 1 == @NUM_BACKWARD@
            grads = torch.autograd.grad(roots, leaves, seeds, retain_graph=not last, allow_unused=True)
            stage = f"backward {number + 1}"
            for kind, found in (("output", outputs), ("input", tensors), ("gradient", grads)):
                lines += told(stage, kind, found)
        lines += [f"input {i} has a new version: {t._version > v}" for i, (t, v) in enumerate(zip(tensors, before))]
        shared = [t.untyped_storage().data_ptr() for t in (*tensors, *outputs)]
        lines += [f"who shares memory: {[shared.index(s) for s in shared]}"]
    except Exception as error:
        lines.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    return lines


def main():
    eager, other = run(False), run(True)
    differing = [pair for pair in zip_longest(eager, other, fillvalue="(nothing)") if pair[0] != pair[1]]
    for old, new in differing:
        print(f"eager:    {old}\\ncompiled: {new}\\n")
    print(f"torch {torch.__version__}: {len(differing)} lines differ")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
'''


def autograd_script(finding: Finding) -> str:
    """The script's text; it ends with 1 where eager and compiled differ.

    Raises:
        Unsupported: the finding is not about in-place mutation in a backend of the installed torch, or is about a double backward.
    """
    program, backend = finding.program, finding.options.get("backend")
    if finding.signature.feature != "mutation" or not isinstance(backend, str):
        raise Unsupported(f"feature {finding.signature.feature} of {finding.subject}", None, "scripts with a backward show mutation in a backend of torch")
    assert program.autograd is not None
    if program.autograd.is_double:
        raise Unsupported("double backward", None, "scripts with a backward show single ones")
    compiled = _DIRECT if backend == "aot_autograd" else f"torch.compile(fn, backend={backend!r}, fullgraph=True, dynamic=False)"
    held = any(spec.role != "argument" for spec in program.inputs)
    run = _RUN.replace("@CALLABLE@", "Held(*held)" if held else "program").replace("@NUM_BACKWARD@", str(program.autograd.num_backward))
    text = source(program).removeprefix("import torch\n")
    imports = ["import sys", "from itertools import zip_longest", "", "import torch"]
    imports += ["from functorch.compile import aot_function, default_partition, nop"] if backend == "aot_autograd" else []
    hooks = [f"        {_double(f'outputs[{h.number}]')}\n" for h in program.autograd.hooks if h.of == "output"]
    reason = next((r.message for r in finding.verdict.reasons if r.status == "FAIL"), finding.signature.law)
    parts = [
        f'"""torch {finding.environment.get("torch", "")}, {backend}: {" ".join(reason.split())[:200]!r}"""',
        "\n".join(imports),
        text.strip("\n") + "\n",
        _inputs(program, finding.seed),
        f"def compiled(fn):\n    return {compiled}\n",
        run.strip("\n").replace("@HOOKS@", "".join(hooks)),
    ]
    return "\n\n".join(parts) + "\n"


def _double(name: str) -> str:
    return f"{name}.requires_grad and {name}.register_hook(lambda grad: grad * 2)"


def _inputs(program: Program, seed: int) -> str:
    """A function that makes the inputs anew: all of them, the arguments, what a module holds, and the leaves whose gradient is asked for."""
    assert program.autograd is not None
    lines = ["def inputs():", "    leaves = []"]
    for i, (spec, value) in enumerate(zip(program.inputs, draw_concrete(program, "small", seed, 0), strict=True)):
        lines += [f"    {line}" for line in _input(i, spec, f"torch.tensor({value.tolist()}, dtype=torch.{spec.dtype})", program)]
    lines += [f"    {_double(f'in{h.number}')}" for h in program.autograd.hooks if h.of == "input"]
    named = {role: ", ".join(f"in{i}" for i, s in enumerate(program.inputs) if (s.role == "argument") == (role == "args")) for role in ("args", "held")}
    every = ", ".join(f"in{i}" for i in range(len(program.inputs)))
    lines.append(f"    return [{every}], [{named['args']}], [{named['held']}], leaves")
    return "\n".join(lines) + "\n"


def _input(number: int, spec: TensorSpec, value: str, program: Program) -> list[str]:
    name, stride = f"in{number}", contiguous_stride(spec.shape) if spec.stride is None else spec.stride
    window = f"as_strided({spec.shape}, {stride}, {spec.storage_offset})"
    if spec.same_as is not None:
        return [f"{name} = in{spec.same_as}"]
    if spec.view_of is not None:
        base = program.inputs[spec.view_of]
        if not spec.requires_grad:
            return [f"{name} = in{spec.view_of}.detach().{window}"]
        if base.requires_grad:
            return [f"{name} = in{spec.view_of}.{window}"]
        return [f"{name} = in{spec.view_of}.detach().{window}.detach().requires_grad_()", f"leaves.append({name})"]
    is_plain = stride == contiguous_stride(spec.shape) and not spec.storage_offset
    numel = storage_numel(spec.shape, stride, spec.storage_offset)
    made = value if is_plain else f"torch.zeros({numel}, dtype=torch.{spec.dtype}).{window}.copy_({value}).detach()"
    if spec.role == "parameter":
        made = f"torch.nn.Parameter({made}, {spec.requires_grad})"
    elif spec.requires_grad and not spec.is_leaf:
        flat = made if is_plain else f"{made}.as_strided(({numel},), (1,), 0).clone()"
        return [f"leaf = {flat}.requires_grad_()", "leaves.append(leaf)", f"{name} = leaf.clone()" + ("" if is_plain else f".{window}")]
    elif spec.requires_grad:
        made += ".requires_grad_()"
    return [f"{name} = {made}", *([f"leaves.append({name})"] if spec.requires_grad else [])]
