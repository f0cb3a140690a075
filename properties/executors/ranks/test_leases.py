"""Leases: no device is held twice, several are taken together, and a holder that ends gives them up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.capability import auto_num_workers, num_cuda_devices, why_not_backend
from harness.executors.ranks.leases import NoDevice, lease

DEVICES = ("GPU-a", "GPU-b", "GPU-c")
HOLD = """
import sys, time
from pathlib import Path
from harness.executors.ranks.leases import lease
with lease(("GPU-a", "GPU-b", "GPU-c"), 2, folder=Path(sys.argv[1])) as held:
    print(*held, flush=True)
    time.sleep(60)
"""


def test_no_device_is_held_twice(tmp_path: Path) -> None:
    """Leases side by side are disjoint; one that asks for too many waits in vain, and holds none meanwhile."""
    with lease(DEVICES, 2, folder=tmp_path) as first:
        with pytest.raises(NoDevice, match="2 of 3 devices"), lease(DEVICES, 2, wait_s=0.2, folder=tmp_path):
            pass
        with lease(DEVICES, 1, wait_s=0.2, folder=tmp_path) as second:
            assert not set(first) & set(second)
    with lease(DEVICES, 3, wait_s=0.2, folder=tmp_path) as everything:
        assert everything == (0, 1, 2)


def test_another_process_is_respected_until_it_dies(tmp_path: Path) -> None:
    """Devices that another process holds are left alone, and free again as soon as it is killed."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline().split() == ["0", "1"]
        with lease(DEVICES, 1, wait_s=0.2, folder=tmp_path) as held:
            assert held == (2,)
        other.kill()
    with lease(DEVICES, 3, wait_s=5.0, folder=tmp_path) as everything:
        assert len(everything) == 3


def test_more_than_there_are_is_refused_at_once(tmp_path: Path) -> None:
    """Asking for more devices than exist does not wait."""
    with pytest.raises(NoDevice, match="needs 4 devices, found 3"), lease(DEVICES, 4, folder=tmp_path):
        pass


def test_too_few_cuda_devices_are_named() -> None:
    """What a machine lacks is said with numbers: needed and found."""
    found = num_cuda_devices()
    reason = why_not_backend("nccl", found + 1)
    assert reason is not None and (f"needs {found + 1} CUDA device" in reason and reason.endswith(f"found {found}") or "no nccl" in reason)
    assert why_not_backend("gloo", 64) is None and "must be gloo or nccl" in str(why_not_backend("mpi", 2))


def test_there_is_a_worker_at_least() -> None:
    """The number of workers is at least one, and no more than the cores without CUDA."""
    assert 1 <= auto_num_workers(2, use_cuda=False)
    assert auto_num_workers(64, use_cuda=True) >= 1


@pytest.mark.gpu
@pytest.mark.multirank(1, "nccl")
def test_nccl_at_world_size_1(request: pytest.FixtureRequest) -> None:
    """With one GPU a program runs over NCCL at world size 1 and agrees with lockstep."""
    ranks = request.getfixturevalue("ranks")
    from harness.check import check
    from harness.subjects.registry import load_subject
    from properties.executors.ranks.test_pool import sums

    verdict = check(sums(1), load_subject("reference"), ranks=ranks)
    assert verdict.status == "PASS", verdict.reasons
