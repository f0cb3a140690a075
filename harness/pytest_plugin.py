"""The pytest plug-in: Hypothesis profiles, options and fixtures for real ranks, and workers that do not disturb each other.

``HARNESS_PROFILE`` chooses the profile: ``ordinary``, ``ci`` (the same examples each time) or ``nightly`` (many more). Each pytest-xdist worker has one thread, one compile thread and a compile cache of its own; what
the environment says already is left as it is.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from harness.executors.ranks import RankPool

__all__: list[str] = []

settings.register_profile("ordinary", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("ordinary"), derandomize=True)
settings.register_profile("nightly", parent=settings.get_profile("ordinary"), max_examples=5_000)
settings.load_profile(os.environ.get("HARNESS_PROFILE", "ordinary"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which real ranks the tests use."""
    group = parser.getgroup("harness", "compiler-harness")
    group.addoption("--backend", choices=("gloo", "nccl"), default="gloo", help="what real ranks communicate over (gloo)")
    group.addoption("--world-size", type=int, default=2, help="how many real ranks, where a test does not say (2)")


def pytest_configure(config: pytest.Config) -> None:
    """Markers, and the environment of this worker."""
    config.addinivalue_line("markers", "multirank(world_size=None, backend=None): runs on real ranks; takes the fixture ranks")
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "soak: runs for long; only with -m soak")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "run")
        cache = os.path.join(tempfile.gettempdir(), f"harness-inductor-{run}-{worker}")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        config.add_cleanup(lambda: shutil.rmtree(cache, ignore_errors=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Soak tests only run when asked for; the others stay in the order in which they were collected."""
    if "soak" not in (config.getoption("markexpr") or ""):
        chosen = [item for item in items if item.get_closest_marker("soak") is None]
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("soak") is not None])
        items[:] = chosen


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """``-n auto``: as many workers as can each lease a device a rank, or as cores and memory carry."""
    from harness.capability import auto_num_workers

    return auto_num_workers(config.getoption("world_size"), use_cuda=config.getoption("backend") == "nccl")


class RankPools:
    """The pools of one test process, by world size and backend; each lives until the end."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._pools: dict[tuple[int, str], RankPool] = {}

    def get(self, world_size: int, backend: str) -> RankPool:
        """The pool; the test is skipped, with the reason, where this machine cannot have it."""
        from harness.capability import why_not_backend
        from harness.executors.ranks import RankPool
        from harness.executors.ranks.leases import cuda_identities, lease
        from harness.worker import PRELOAD

        key = (world_size, backend)
        if key not in self._pools:
            reason = why_not_backend(backend, world_size)
            if reason is not None:
                pytest.skip(f"Unsupported: {reason}")
            devices = ["cpu"] * world_size
            if backend == "nccl":
                self.close()  # its devices are leased anew
                devices = [f"cuda:{i}" for i in self._stack.enter_context(lease(cuda_identities(), world_size))]
            self._pools[key] = self._stack.enter_context(RankPool(world_size, backend=backend, devices=devices, preload=PRELOAD))
        return self._pools[key]

    def close(self) -> None:
        """End all pools and give up all devices."""
        self._pools.clear()
        self._stack.close()


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[RankPools]:
    """All pools of real ranks of this test process."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture
def ranks(request: pytest.FixtureRequest, rank_pools: RankPools) -> RankPool:
    """A pool of real ranks, shared by all tests of this process; the marker ``multirank`` says of which size and over what."""
    marker = request.node.get_closest_marker("multirank")
    named = {} if marker is None else dict(zip(("world_size", "backend"), marker.args, strict=False)) | marker.kwargs
    world_size = named.get("world_size") or request.config.getoption("world_size")
    return rank_pools.get(world_size, named.get("backend") or request.config.getoption("backend"))
