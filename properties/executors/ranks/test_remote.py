"""Ranks that torchrun started: two "nodes" on this machine, each with an agent of its own, that meet through loopback."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from torch.distributed import TCPStore

from harness.check import BUCKETING_LAWS, check
from harness.cli import main
from harness.executors.ranks.mailbox import SECRET, Mailbox, RemoteRanks, address_of, secret_from
from harness.executors.ranks.messages import Done
from harness.executors.ranks.pool import PoolBroken
from harness.executors.ranks.remote import RemotePool
from harness.on_ranks import check_on_ranks
from harness.subjects.registry import load_subject
from harness.worker import Question, decode_answer, encode_question
from properties.benchmarks.spawned import gathers

ROOT = Path(__file__).parents[3]
FAULTS = "harness.subjects.faults.ranks:"
IDENTITY = "properties.executors.ranks.test_pool:identity"
NUM_NODES = 2
_END_S = 30


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def torchrun(controller: str, secret: str, rendezvous: int, folder: Path, node: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={NUM_NODES}", "--nproc-per-node=1", "--max-restarts=100"]
    command += ["--rdzv-backend=c10d", "--rdzv-id=harness", f"--rdzv-endpoint=127.0.0.1:{rendezvous}", "--monitor-interval=0.1"]
    command += ["-m", "harness.executors.ranks.worker", "--controller", controller]
    environment = {**os.environ, SECRET: secret, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / f"node-{node}").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemotePool]:
    folder, secret = tmp_path_factory.mktemp("nodes"), secrets.token_hex(16)
    with RemotePool("127.0.0.1", 0, secret, deadline_s=4.0) as made:
        host, port = made.address
        rendezvous = free_port()
        agents = [torchrun(f"{host}:{port}", secret, rendezvous, folder, node) for node in range(NUM_NODES)]
        try:
            made.start()
            yield made
            made.close()
            for agent in agents:
                agent.wait(_END_S)
        finally:
            for agent in agents:
                agent.terminate()
                agent.wait(_END_S)
    assert [agent.returncode for agent in agents] == [0] * NUM_NODES, [f.read_text()[-2000:] for f in sorted(folder.iterdir())]


@pytest.mark.multirank(world_size=2)
def test_two_nodes_judge_as_one_machine_does(pool: RemotePool) -> None:
    """A batch is judged over both nodes: the reference's passes fire, and a planted fault is seen."""
    assert (pool.world_size, pool.backend) == (NUM_NODES, "gloo")
    verdicts = check_on_ranks([gathers(n) for n in (2, 3, 4)], load_subject("reference"), pool, laws=BUCKETING_LAWS)
    assert [(v.status, v.num_fired > 0) for v in verdicts] == [("PASS", True)] * 3, verdicts
    verdict = check(gathers(2), load_subject(FAULTS + "wrong_on_one"), ranks=pool)
    assert verdict.status == "FAIL", verdict


@pytest.mark.multirank(world_size=2)
@pytest.mark.parametrize(("name", "kind"), [("hang", "hang"), pytest.param("die", "rank_died", marks=pytest.mark.soak), pytest.param("raise_on_one", "divergence", marks=pytest.mark.soak)])
def test_a_fault_is_what_it_was_and_the_ranks_come_back(pool: RemotePool, name: str, kind: str) -> None:
    """The case has its fault, with where each rank was; torchrun starts new ranks, and the next case runs."""
    before = pool.num_healed
    questions = [encode_question(Question(gathers(2), "bucketing", subject, {})) for subject in (IDENTITY, FAULTS + name, IDENTITY)]
    first, faulty, last = pool.run("judge", questions)
    assert first.fault is None and last.fault is None
    assert faulty.fault is not None and faulty.fault.kind == kind, faulty
    assert pool.num_healed == before + 1
    if kind == "hang":
        assert any("pass" in state.place and "hang" in state.stack for state in faulty.fault.ranks), faulty.fault
    assert all(p is not None and decode_answer(p).before is not None for r in (first, last) for p in r.payloads)


def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


def test_a_peer_without_the_secret_reads_and_writes_nothing() -> None:
    """Neither a message nor its name can be read by another secret, a message of another is not taken, nor one under another name."""
    shared = store()
    ours, theirs = Mailbox(shared, "a" * 32), Mailbox(shared, "b" * 32)
    ours.put("order", Done(7, b"what is to be done"))
    assert ours.take("order", Done) == Done(7, b"what is to be done")
    assert theirs.take("order", Done) is None
    keys = shared.list_keys() if hasattr(shared, "list_keys") else []
    held = [shared.get(key) for key in keys if "init" not in key]
    assert not any(b"order" in value or b"what is" in value for value in held) and not any("order" in key for key in keys)
    own_place = ours._place("order")
    shared.set(own_place, b"forged")
    assert ours.take("order", Done) is None
    ours.put("other", Done(8, b""))
    shared.set(own_place, shared.get(ours._place("other")))
    assert ours.take("order", Done) is None
    ours.drop(["other"])
    assert not ours.has(["other"])


def test_only_the_address_asked_for_is_listened_at() -> None:
    """On loopback nothing is reachable from elsewhere; an address that is taken is refused."""
    with RemotePool("127.0.0.1", 0, "c" * 32, start_s=0.1) as pool:
        host, port = pool.address
        tables = [table.read_text() for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if table.exists()]
        rows = [line.split() for table in tables for line in table.splitlines()[1:]]
        assert [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
        with pytest.raises(RemoteRanks, match="cannot be listened at"):
            RemotePool(host, port, "c" * 32)
        with pytest.raises(PoolBroken, match="no ranks came"):
            pool.start()


@pytest.mark.parametrize(("secret", "address", "said"), [("", "127.0.0.1:0", "0 characters"), ("x" * 16, "nowhere", "must be as 127.0.0.1:29600")])
def test_wrong_use_is_one_line(secret: str, address: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No secret, or no address, is refused with exit status 2."""
    monkeypatch.setenv(SECRET, secret)
    result = CliRunner().invoke(main, ["hunt", "--cases", "1", "--ranks", address, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2 and said in result.output, result.output


def test_addresses_and_secrets() -> None:
    """Both are read, or refused with what would be right."""
    assert address_of("[::1]:80") == ("::1", 80) and address_of("host:0") == ("host", 0)
    for wrong in ("host", ":80", "host:99999", "host:x"):
        with pytest.raises(RemoteRanks, match="must be as"):
            address_of(wrong)
    assert secret_from({SECRET: "s" * 16}) == "s" * 16
