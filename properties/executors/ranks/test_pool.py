"""The pool of real ranks: every fault is reported as what it was, and the next case runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.check import check
from harness.errors import WrongWorld
from harness.executors.ranks import RankPool
from harness.executors.ranks.pool import PoolBroken
from harness.on_ranks import check_on_ranks
from harness.check import BUCKETING_LAWS
from harness.spec.program import Group, GroupArg, Op, Program, Ref, TensorSpec
from harness.spec.verdict import Verdict
from harness.subjects.registry import load_subject
from harness.worker import PRELOAD, Question, decode_answer, encode_question

WAIT = "_c10d_functional.wait_tensor.default"
DEADLINE_S = 2.0
ROOT = Path(__file__).parents[3]


def sums(world_size: int, numel: int = 4) -> Program:
    """Two all_reduces of two inputs."""
    world = GroupArg("everyone")
    start = "_c10d_functional.all_reduce.default"
    ops = (Op(start, (Ref(0), "sum", world)), Op(WAIT, (Ref(2),)), Op(start, (Ref(1), "max", world)), Op(WAIT, (Ref(4),)))
    inputs = (TensorSpec((numel,), "float32"), TensorSpec((2, 3), "float32"))
    return Program(world_size, (Group("everyone", (tuple(range(world_size)),)),), inputs, ops, (Ref(3), Ref(5)))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    preload = (*PRELOAD, "harness.subjects.faults.ranks", __name__)
    with RankPool(2, preload=preload, deadline_s=DEADLINE_S) as made:
        yield made


def judged(pool: RankPool, fault: str) -> Verdict:
    return unless_busy(pool, sums(2), f"harness.subjects.faults.ranks:{fault}")


def unless_busy(pool: RankPool, program: Program, subject: str) -> Verdict:
    """The verdict; while the ranks get too little of a core, which the pool says, once more, and no more than thrice."""
    for _ in range(3):
        verdict = check(program, load_subject(subject), ranks=pool)
        if not any(reason.kind == "machine" for reason in verdict.reasons):
            return verdict
    pytest.skip(f"this machine is busy: {verdict.reasons[0].message}")


def assert_whole(pool: RankPool) -> None:
    """The next case runs on all ranks."""
    verdict = unless_busy(pool, sums(2), "reference")
    assert (verdict.status, verdict.strength) == ("PASS", "tested"), verdict.reasons


def test_a_right_pass(pool: RankPool) -> None:
    """What does nothing wrong passes, and says that it was tested, not proved."""
    assert_whole(pool)
    subject = load_subject("reference")
    fired = [check(sums(2), variant, ranks=pool).num_fired for variant in subject.variants()]
    assert len(fired) > 4


@pytest.mark.parametrize(
    ("fault", "law", "kind", "says"),
    [
        ("die", "applies", "rank_died", "SIGKILL"),
        ("die_in_graph", "runs", "rank_died", "exit status 3"),
        ("hang", "applies", "hang", "rank 1 is stuck at pass"),
        ("spin", "applies", "hang", "rank 1 is stuck at pass"),
        ("leave_out", "runs", "hang", "rank 0 is stuck at transformed: wait_tensor"),
        ("raise_on_one", "applies", "RuntimeError", "raises RuntimeError on rank 1"),
        ("raise_on_all", "applies", "RuntimeError", "raises RuntimeError on rank 0"),
        ("exhaust_memory", "applies", "RuntimeError", "on rank 1"),
        ("wrong_on_one", "equal_metadata", "shape", "on rank 1"),
    ],
)
def test_faults_are_reported_as_what_they_are(pool: RankPool, fault: str, law: str, kind: str, says: str) -> None:
    """A rank that dies, hangs, raises, runs out of memory or errs fails the law that it breaks, and the pool is whole again."""
    verdict = judged(pool, fault)
    reason = verdict.reasons[0]
    assert (verdict.status, reason.law, reason.kind) == ("FAIL", law, kind), verdict
    assert says in reason.message
    assert_whole(pool)


def test_a_hang_is_reported_in_time_with_stacks(pool: RankPool) -> None:
    """A hang is reported within its deadline and 2 s, with the stack of every stuck rank; the next case runs within 3 s."""
    payload = encode_question(Question(sums(2), "bucketing", "harness.subjects.faults.ranks:leave_out", {}))
    pool.start()
    begin = time.monotonic()
    (result,) = pool.run("judge", [payload])
    assert time.monotonic() - begin < DEADLINE_S + 2.0
    assert result.fault is not None and result.fault.kind == "hang"
    stuck = [state for state in result.fault.ranks if state.status == "stuck"]
    assert [state.rank for state in stuck] == [0] and "in run" in stuck[0].stack and "real.py" in stuck[0].stack
    begin = time.monotonic()
    assert_whole(pool)
    assert time.monotonic() - begin < 3.0


def test_a_hang_comes_with_the_flight_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the user's environment turns torch's flight recorder on, a stuck rank says which collective is not complete; the verdict has it all."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    with RankPool(2, preload=(*PRELOAD, "harness.subjects.faults.ranks"), deadline_s=DEADLINE_S) as recording:
        verdict = unless_busy(recording, sums(2), "harness.subjects.faults.ranks:leave_out")
    (stuck,) = [rank for rank in verdict.reasons[0].ranks if "stuck" in rank]
    assert "real.py" in stuck and '"gloo:all_reduce"' in stuck and '"input_sizes": [[2, 3]]' in stuck, stuck


def test_a_batch_goes_on_after_a_fault(pool: RankPool) -> None:
    """In a batch each case has its own result, in order, whatever became of the one before."""
    names = ["identity", "die", "identity", "raise_on_all", "raise_on_one", "identity"]
    questions = []
    for name in names:
        subject = "harness.subjects.faults.ranks:" + name if name != "identity" else "properties.executors.ranks.test_pool:identity"
        questions.append(encode_question(Question(sums(2), "bucketing", subject, {})))
    results = pool.run("judge", questions)
    kinds = [None if r.fault is None else r.fault.kind for r in results]
    assert kinds == [None, "rank_died", None, None, "divergence", None]
    whole = [[decode_answer(p) for p in r.payloads if p is not None] for r in results]
    assert all(a.before is not None and a.after is None for i in (0, 2, 5) for a in whole[i])
    assert all(a.applied is not None for a in whole[3]) and len(whole[3]) == 2


def identity(gm: object) -> None:
    """Changes nothing."""


def test_a_program_that_does_not_run_is_nobodys_fault(pool: RankPool) -> None:
    """Where the original program hangs, the pass is not accused: no rank goes on to the transformed graph and meets what was left."""
    world = GroupArg("everyone")
    start = "_c10d_functional.all_reduce.default"
    ops = (
        Op(start, (Ref(0), "sum", world)),
        Op(WAIT, (Ref(2),)),
        Op(start, (Ref(1), "sum", world), ranks=(0,)),
        Op(WAIT, (Ref(4),), ranks=(0,)),
    )
    inputs = (TensorSpec((4,), "float32"), TensorSpec((9,), "float32"))
    program = Program(2, (Group("everyone", ((0, 1),)),), inputs, ops, (Ref(3),), divergent=True)
    verdict = unless_busy(pool, program, "properties.executors.ranks.test_pool:identity")
    assert verdict.status == "INCONCLUSIVE" and verdict.reasons[0].kind == "hang", verdict
    assert "the program itself does not run" in verdict.reasons[0].message and "rank 0 is stuck at original: wait_tensor" in verdict.reasons[0].message
    assert_whole(pool)


def test_what_the_backend_refuses_is_named_also_where_the_pass_erased_it(pool: RankPool) -> None:
    """Two float8 gathers that our bucketing merges: gloo refuses the first, and the verdict says which collective and dtype that is."""
    gather = "_c10d_functional.all_gather_into_tensor.default"
    world = GroupArg("everyone")
    ops = (Op(gather, (Ref(0), 2, world)), Op(gather, (Ref(1), 2, world)), Op(WAIT, (Ref(2),)), Op(WAIT, (Ref(3),)))
    inputs = (TensorSpec((4,), "float8_e5m2"), TensorSpec((2,), "float8_e5m2"))
    verdict = unless_busy(pool, Program(2, (Group("everyone", ((0, 1),)),), inputs, ops, (Ref(4), Ref(5))), "reference")
    assert [r.kind for r in verdict.reasons] == ["unsupported"] and "all_gather_into_tensor.default of float8_e5m2" in verdict.reasons[0].message, verdict


def test_another_world_size_is_refused(pool: RankPool) -> None:
    """A program for 3 ranks does not run on 2."""
    with pytest.raises(WrongWorld, match="3 ranks on a pool of 2"):
        check_on_ranks([sums(3)], load_subject("reference"), pool, laws=BUCKETING_LAWS)


def test_what_does_not_import_is_said() -> None:
    """A module to preload that does not exist breaks the pool with its name, and leaves no process."""
    pool = RankPool(2, preload=("no_such_module",))
    with pytest.raises(PoolBroken, match="no_such_module does not import"):
        pool.start()
    assert pool.server_pid is None


def test_a_rank_killed_by_hand(pool: RankPool) -> None:
    """A rank that somebody kills while a case runs is reported as died; the verdict is that of new ranks."""
    pool.start()
    threading.Timer(0.5, os.kill, (pool.pids[0], signal.SIGKILL)).start()
    (result,) = pool.run("judge", [encode_question(Question(sums(2), "bucketing", "harness.subjects.faults.ranks:hang", {}))])
    assert result.fault is not None and result.fault.kind == "rank_died" and "rank 0 died" in result.fault.message
    assert [state.signal for state in result.fault.ranks if state.status == "died"] == [signal.SIGKILL]
    pool.start()
    threading.Timer(0.5, os.kill, (pool.pids[0], signal.SIGKILL)).start()
    verdict = judged(pool, "hang")
    assert (verdict.status, verdict.reasons[0].law, verdict.reasons[0].kind) == ("FAIL", "applies", "hang"), verdict
    assert_whole(pool)


def test_the_server_killed_by_hand(pool: RankPool) -> None:
    """Where the server dies the machine is at fault, not the case, and the pool starts anew."""
    pool.start()
    server = pool.server_pid
    assert server is not None
    threading.Timer(0.5, os.kill, (server, signal.SIGKILL)).start()
    (result,) = pool.run("judge", [encode_question(Question(sums(2), "bucketing", "harness.subjects.faults.ranks:hang", {}))])
    assert result.fault is not None and result.fault.kind == "machine" and "server" in result.fault.message
    assert_whole(pool)


def test_nothing_is_left_when_the_controller_is_killed(tmp_path: Path) -> None:
    """A controller ended by SIGKILL leaves no process and no file."""
    code = """
import sys, time
from harness.executors.ranks import RankPool
pool = RankPool(2, preload=())
pool.start()
print(*pool.pids, pool.server_pid, flush=True)
time.sleep(60)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, env=environment, text=True) as controller:
        assert controller.stdout is not None
        pids = [int(word) for word in controller.stdout.readline().split()]
        assert len(pids) == 3 and list(tmp_path.iterdir())
        controller.send_signal(signal.SIGKILL)
    end = time.monotonic() + 10
    while time.monotonic() < end and (any(_is_running(pid) for pid in pids) or list(tmp_path.iterdir())):
        time.sleep(0.05)
    assert not [pid for pid in pids if _is_running(pid)] and not list(tmp_path.iterdir())


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
