"""What ranks tell each other through shared pages."""

from __future__ import annotations

import os
import threading

import pytest

from harness.executors.ranks import board
from harness.executors.ranks.board import Turnstile, anonymous_file


@pytest.fixture(params=["futex", "sleep"])
def stiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Turnstile]:
    if request.param == "sleep":
        monkeypatch.setattr(board, "_FUTEX_CALL", None)
    elif board._FUTEX_CALL is None:
        pytest.skip("no futex is known on this machine")
    file = anonymous_file("test")
    made = [Turnstile(file, rank, 3) for rank in range(3)]
    os.close(file)
    return made


def test_ranks_wait_for_each_other(stiles: list[Turnstile]) -> None:
    """No rank leaves a meeting, or enters a case, before the last has come there."""
    seen: list[tuple[str, int]] = []

    def work(rank: int) -> None:
        for case in range(1, 200):
            assert stiles[rank].enter(case, 1)
            seen.append(("in", case))
            stiles[rank].meet(case)
            seen.append(("out", case))
            stiles[rank].done(case, stop=False)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and len(seen) == 3 * 2 * 199
    for case in range(1, 200):
        ins = [i for i, what in enumerate(seen) if what == ("in", case)]
        outs = [i for i, what in enumerate(seen) if what == ("out", case)]
        before = [i for i, what in enumerate(seen) if what == ("out", case - 1)]
        assert max(ins) < min(outs) and all(b < min(outs) for b in before)


def test_only_what_follows_a_stop_is_stopped(stiles: list[Turnstile]) -> None:
    """A rank that is slow to enter a case still does it, though another has stopped in that case; the next run begins anew."""
    for stile in stiles:
        stile.done(5, stop=False)
    stiles[0].done(6, stop=True)
    assert stiles[1].enter(6, 5) and stiles[2].enter(6, 5)
    stiles[1].done(6, stop=False)
    stiles[2].done(6, stop=False)
    assert not stiles[1].enter(7, 5)
    assert stiles[1].enter(8, 8) and stiles[2].enter(8, 8)
