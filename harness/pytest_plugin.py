"""The pytest plug-in: Hypothesis profiles, chosen by the environment variable ``HARNESS_PROFILE``, and one thread a worker."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

__all__: list[str] = []

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("ordinary", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", parent=settings.get_profile("ordinary"), max_examples=5_000)
settings.load_profile(os.environ.get("HARNESS_PROFILE", "ordinary"))
