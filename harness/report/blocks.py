"""The fixed text of bug report scripts. Each block is plain Python that needs torch alone."""

from __future__ import annotations

from typing import Final

__all__ = [
    "APPLIED",
    "COMPARE",
    "FAKE_WORLD",
    "GRAPH_CHECKS",
    "JUDGE",
    "JUDGE_MANY",
    "LOCKSTEP",
    "LOCKSTEP_MAIN",
    "METADATA_JUDGE",
    "PROCESSES_MAIN",
]

FAKE_WORLD: Final = '''
@contextlib.contextmanager
def fake_world(rank):
    """torch.distributed as one rank sees it; nothing is communicated."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD_SIZE)
    try:
        yield make_groups()
    finally:
        dist.destroy_process_group()
'''

APPLIED: Final = """
def main():
    with fake_world(RANK) as groups:
        gm = trace(RANK, groups)
        print("the graph before the pass:", gm.graph, sep="\\n")
        try:
            apply_pass(gm)
        except Exception as error:
            traceback.print_exc()
            print(f"FAULT: the pass raises {type(error).__name__}: {error}")
            return 1
    print("no fault: the pass takes this graph")
    return 0
"""

_GRAPH_MAIN: Final = """
def main():
    faults = []
    for rank in range(WORLD_SIZE):
        with fake_world(rank) as groups:
            before = trace(rank, groups)
            after = apply_pass(trace(rank, groups))
            faults += [f"rank {rank}: {fault}" for fault in check(before.graph, after)]
    if not faults:
        print("no fault")
        return 0
    print("FAULT:", *faults, sep="\\n  ")
    print("the graph before the pass:", before.graph, "and after:", after.graph, sep="\\n")
    return 1
"""

_COLLECTIVES: Final = '''
def collectives(graph):
    """What a graph starts, in order: operator, group and reduce op, and the bytes of its input."""
    found = []
    for node in graph.nodes:
        name = getattr(node.target, "_opname", "")
        if getattr(node.target, "namespace", "") != "_c10d_functional" or name == "wait_tensor":
            continue
        sources = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
        num_bytes = sum(s.meta["val"].numel() * s.meta["val"].element_size() for s in sources)
        name = name.removesuffix("_out").removesuffix("_coalesced").rstrip("_")
        found.append(((name, *(a for a in node.args[1:] if isinstance(a, str))), num_bytes))
    return found
'''

GRAPH_CHECKS: Final = {
    "graph_valid": '''
def check(before, gm):
    """The graph lints: nothing is used before it is there."""
    try:
        gm.graph.lint()
    except Exception as error:
        yield f"graph.lint() raises {type(error).__name__}: {error}"
'''
    + "\n"
    + _GRAPH_MAIN,
    "order_kept": _COLLECTIVES
    + '''

def check(before, gm):
    """Collectives of one kind and group stay in order: each of the new ones takes the next of the old ones."""
    old, new = collectives(before), collectives(gm.graph)
    for key in dict(new):
        sizes, bucketed = [b for k, b in old if k == key and b], [b for k, b in new if k == key and b]
        reached = list(itertools.accumulate(sizes))
        if sum(sizes) == sum(bucketed) and not set(itertools.accumulate(bucketed)) <= set(reached):
            yield f"{' '.join(key)}: inputs of {sizes} bytes became {bucketed}, which is no run of them in order"
'''
    + "\n"
    + _GRAPH_MAIN,
    "collectives_conserved": _COLLECTIVES
    + '''

def check(before, gm):
    """For each kind and group as many bytes go in as before (padding of 16 bytes a collective is allowed)."""
    old, new = collectives(before), collectives(gm.graph)
    for key in {**dict(old), **dict(new)}:
        was, now = sum(b for k, b in old if k == key), sum(b for k, b in new if k == key)
        if not was <= now <= was + 16 * len(old):
            yield f"{' '.join(key)}: {was} bytes before, {now} after"
'''
    + "\n"
    + _GRAPH_MAIN,
    "caps_respected": _COLLECTIVES
    + '''

def check(before, gm):
    """A bucket of several collectives is no larger than the cap; an all_gather counts by its output."""
    single = {b for _, b in collectives(before)}
    for key, num_bytes in collectives(gm.graph):
        size = num_bytes * (WORLD_SIZE if "gather" in key[0] else 1)
        if num_bytes not in single and size > CAP_BYTES:
            yield f"{' '.join(key)}: a bucket of {size} bytes; the cap is {CAP_BYTES}"
'''
    + "\n"
    + _GRAPH_MAIN,
    "idempotent": _COLLECTIVES
    + '''

def check(before, gm):
    """Applying the pass a second time changes nothing more."""
    once = len(collectives(gm.graph))
    twice = len(collectives(apply_pass(gm).graph))
    if twice != once:
        yield f"{once} collectives after one application, {twice} after two"
'''
    + "\n"
    + _GRAPH_MAIN,
    "ranks_agree": _COLLECTIVES
    + '''

FIRST = []


def check(before, gm):
    """All ranks issue the same collectives in the same order."""
    mine = [(key[0], *key[2:], b) for key, b in collectives(gm.graph)]
    FIRST.append(mine)
    if mine != FIRST[0]:
        yield f"issues {mine}, rank 0 issues {FIRST[0]}"
'''
    + "\n"
    + _GRAPH_MAIN,
}

_SAME: Final = '''
torch.set_printoptions(precision=9, threshold=64)


def same(a, b):
    """Whether two tensors are equal bit for bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
'''

_SHARES: Final = '''
def shares(a, b):
    """Whether two tensors live in one storage."""
    return a.untyped_storage().nbytes() > 0 and a.untyped_storage()._cdata == b.untyped_storage()._cdata
'''

COMPARE: Final = {
    "runs": '''
def compare(before, expected, after, seen):
    """That the rewritten graph runs at all is the point."""
    return iter(())
''',
    "equal_outputs": _SAME
    + '''

def compare(before, expected, after, seen):
    """The rewritten graph returns what `program` returns, bit for bit."""
    for i, (e, s) in enumerate(zip(expected, seen)):
        if not same(e, s):
            yield f"output {i}: expected {e}, seen {s}"
''',
    "equal_inputs": _SAME
    + '''

def compare(before, expected, after, seen):
    """The rewritten graph leaves in its inputs what `program` leaves there."""
    for i, (e, s) in enumerate(zip(before, after)):
        if not same(e, s):
            yield f"input {i} afterwards: expected {e}, seen {s}"
''',
    "equal_metadata": '''
def compare(before, expected, after, seen):
    """Outputs have the dtype and shape that `program` gives them."""
    if len(expected) != len(seen):
        yield f"expected {len(expected)} outputs, seen {len(seen)}"
    for i, (e, s) in enumerate(zip(expected, seen)):
        if (e.dtype, e.shape) != (s.dtype, s.shape):
            yield f"output {i}: expected {e.dtype}{list(e.shape)}, seen {s.dtype}{list(s.shape)}"
''',
    "equal_strides": '''
def compare(before, expected, after, seen):
    """Outputs have the strides that `program` gives them."""
    for i, (e, s) in enumerate(zip(expected, seen)):
        matters = [d for d, size in enumerate(e.shape) if size != 1 and e.numel()]
        if e.shape == s.shape and [e.stride(d) for d in matters] != [s.stride(d) for d in matters]:
            yield f"output {i}: expected strides {e.stride()}, seen {s.stride()}"
''',
    "own_storage": _SHARES
    + '''

def compare(before, expected, after, seen):
    """Outputs that have storages of their own in `program` have them in the rewritten graph, and keep no more alive."""
    for j in range(len(seen)):
        for i in range(j):
            if shares(seen[i], seen[j]) and not shares(expected[i], expected[j]):
                size = seen[j].untyped_storage().nbytes()
                version = seen[j]._version
                seen[i].zero_()
                counter = " and one version counter" if seen[j]._version != version else ""
                yield f"outputs {i} and {j}: expected storages of their own, seen one of {size} bytes{counter}"
        was, now = expected[j].untyped_storage().nbytes(), seen[j].untyped_storage().nbytes()
        if now > was:
            yield f"output {j}: expected a storage of {was} bytes, seen one of {now} kept alive"
''',
    "same_aliasing": _SHARES
    + '''

def compare(before, expected, after, seen):
    """Outputs share memory with inputs and with each other exactly where they do in `program`."""
    old, new = [*before, *expected], [*after, *seen]
    names = [*(f"input {i}" for i in range(len(before))), *(f"output {i}" for i in range(len(expected)))]
    for j in range(len(new)):
        for i in range(j):
            had, has = shares(old[i], old[j]), shares(new[i], new[j])
            if had and not has or has and not had and i < len(before):
                yield f"{names[i]} and {names[j]}: expected {'one storage' if had else 'two storages'}, seen the other"
''',
}

JUDGE: Final = '''
def judge(rank):
    """What is wrong on one rank: the rewritten graph beside eager `program`."""
    groups = make_groups()
    gm = apply_pass(trace(rank, groups))
    before, after = inputs(rank), inputs(rank)
    expected = program(*before, @ARGUMENTS@)
    try:
        seen = gm(*after)
    except Exception as error:
        return [f"the rewritten graph raises {type(error).__name__}: {error}"]
    return list(compare(before, expected, after, seen))
'''

JUDGE_MANY: Final = '''
def judge(rank):
    """What is wrong on one rank: the rewritten graph beside eager `program`, with the first inputs that show it."""
    groups = make_groups()
    gm = apply_pass(trace(rank, groups))
    faults = []
    for seed in range(NUM_SEEDS):
        before, after = inputs(rank, seed), inputs(rank, seed)
        found = list(compare(before, program(*before, @ARGUMENTS@), after, gm(*after)))
        faults = faults or [f"seed {seed}, {fault}" for fault in found]
    return faults
'''

PROCESSES_MAIN: Final = """
def worker(rank, folder, results):
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    try:
        results.put((rank, judge(rank)))
        dist.barrier()
    except Exception:
        traceback.print_exc()
        results.put((rank, None))
    finally:
        dist.destroy_process_group()


def main():
    context = mp.get_context("spawn")
    results = context.Queue()
    by_rank = {}
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=worker, args=(rank, folder, results)) for rank in range(WORLD_SIZE)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + TIMEOUT_SECONDS
        try:
            for _ in processes:
                rank, said = results.get(timeout=max(deadline - time.monotonic(), 0.1))
                by_rank[rank] = said
        except queue.Empty:
            print(f"only ranks {sorted(by_rank)} ended within {TIMEOUT_SECONDS} s: one died, or hangs in a collective")
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
    if None in by_rank.values():
        print("the script itself failed, see above")
        return 2
    faults = [f"FAULT: rank {rank}, {fault}" for rank in sorted(by_rank) for fault in by_rank[rank]]
    print(*faults or ["no fault"], sep="\\n")
    return 1 if faults or len(by_rank) < WORLD_SIZE else 0
"""

LOCKSTEP: Final = '''
class Rank(torch.fx.Interpreter):
    """Runs one rank's graph in a thread of its own.

    A collective happens when it is waited for, the latest moment allowed; until then its output holds a number that it
    never should.
    """

    board, barriers, lock = {}, {}, threading.Lock()

    def __init__(self, gm, rank, members):
        super().__init__(gm)
        self.rank, self.members = rank, members  # the ranks of each group, by its name
        self.pending, self.started = {}, {}

    def call_function(self, target, args, kwargs):
        if getattr(target, "namespace", "") != "_c10d_functional":
            return super().call_function(target, args, kwargs)
        if target._opname == "wait_tensor":
            self.finish(args[0])
            return args[0]
        return self.start(target._opname, args, kwargs)

    def start(self, name, args, kwargs):
        group = next(a for a in reversed(args) if isinstance(a, str) and a in self.members)
        sources = list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]]
        size = len(self.members[group])
        if "out" in kwargs:
            results = [kwargs["out"]]
        elif name.endswith("_"):
            results = sources
        else:
            rows = {"all_gather": lambda n: n * size, "reduce_scatter": lambda n: n // size}
            change = next((f for kind, f in rows.items() if name.startswith(kind)), None)
            shapes = [s.shape if change is None else (change(s.shape[0]), *s.shape[1:]) for s in sources]
            results = [torch.empty(shape, dtype=s.dtype) for shape, s in zip(shapes, sources)]
            for result in results:
                result.copy_(torch.full(result.shape, float("nan") if result.is_floating_point() else 113))
        number = self.started[group] = self.started.get(group, 0) + 1
        key = (name, tuple(self.members[group]), number)
        for result in results:
            self.pending[result.untyped_storage()._cdata] = (key, args, sources, results)
        return results if isinstance(args[0], (list, tuple)) else results[0]

    def finish(self, result):
        key, args, sources, results = self.pending.get(result.untyped_storage()._cdata, (None, None, None, None))
        if key is None:
            return
        for done in results:
            self.pending.pop(done.untyped_storage()._cdata, None)
        ranks = key[1]
        with self.lock:
            self.board.setdefault(key, {})[self.rank] = [s.clone() for s in sources]
            barrier = self.barriers.setdefault(key, threading.Barrier(len(ranks)))
        barrier.wait(TIMEOUT_SECONDS)
        for i, target in enumerate(results):
            parts = [self.board[key][rank][i] for rank in ranks]
            target.copy_(carry_out(key[0], args, parts, ranks.index(self.rank)).reshape(target.shape))
        barrier.wait(TIMEOUT_SECONDS)


def carry_out(name, args, parts, me):
    """What rank number `me` of a group receives when its ranks give `parts`."""
    if name.startswith("all_gather"):
        return torch.cat(parts)
    if name.startswith("broadcast"):
        return parts[args[1]]
    if name.startswith("all_to_all"):
        return torch.cat([part.chunk(len(parts))[me] for part in parts])
    operation = args[1]
    total = parts[0].clone()
    for part in parts[1:]:
        if operation in ("sum", "avg"):
            total += part
        elif operation == "product":
            total *= part
        else:
            total = (torch.maximum if operation == "max" else torch.minimum)(total, part)
    if operation == "avg":
        total /= len(parts)
    return total.chunk(len(parts))[me] if name.startswith("reduce_scatter") else total


def run(graphs, members):
    """All ranks at once; their inputs afterwards and their outputs."""
    given, results, errors = [inputs(rank) for rank in range(WORLD_SIZE)], {}, {}

    def rank_main(rank):
        try:
            results[rank] = Rank(graphs[rank], rank, members[rank]).run(*given[rank])
        except Exception as error:
            errors[rank] = f"{type(error).__name__}: {error}"

    Rank.board.clear(), Rank.barriers.clear()
    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(WORLD_SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)
    return given, results, errors
'''

LOCKSTEP_MAIN: Final = """
def main():
    originals, rewritten, members = [], [], []
    for rank in range(WORLD_SIZE):
        with fake_world(rank) as groups:
            originals.append(trace(rank, groups))
            rewritten.append(apply_pass(trace(rank, groups)))
            by_name = {name: next(part for part in GROUPS[key] if rank in part) for key, name in groups.items()}
            members.append(by_name)
    before, expected, errors = run(originals, members)
    if errors:
        print("the program itself does not run:", errors)
        return 2
    after, seen, errors = run(rewritten, members)
    faults = [f"rank {rank}, the rewritten graph raises {error}" for rank, error in errors.items()]
    for rank in sorted(seen):
        faults += [f"rank {rank}, {fault}" for fault in compare(before[rank], expected[rank], after[rank], seen[rank])]
    print(*([f"FAULT: {fault}" for fault in faults] or ["no fault"]), sep="\\n")
    return 1 if faults else 0
"""

METADATA_JUDGE: Final = '''
def described(tensor):
    """Dtype, shape and the strides that matter: a dimension of size 1 has any, an empty tensor has none."""
    strides = [step for step, size in zip(tensor.stride(), tensor.shape) if size != 1] if tensor.numel() else []
    return f"{tensor.dtype}{list(tensor.shape)} strides {strides}"


class Checked(torch.fx.Interpreter):
    """Runs a graph and compares what each node gives with what its meta["val"] says."""

    def __init__(self, gm):
        super().__init__(gm)
        self.faults = []

    def run_node(self, node):
        result = super().run_node(node)
        said = node.meta.get("val")
        if isinstance(said, torch.Tensor) and isinstance(result, torch.Tensor):
            expected, seen = described(said), described(result)
            if expected != seen:
                self.faults.append(f"{node.name}: meta says {expected}, executes as {seen}")
        return result


def judge(rank):
    """The nodes of one rank's rewritten graph whose metadata is not what executes."""
    checked = Checked(apply_pass(trace(rank, make_groups())))
    checked.run(*inputs(rank))
    return checked.faults
'''
