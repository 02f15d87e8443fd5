"""What is taken for a run that goes round and round."""

from __future__ import annotations

from kvplan.core.livelock import Livelock


def test_the_same_state_again_is_a_circle() -> None:
    livelock = Livelock()
    for state in (["a"], ["b"]):
        livelock.note(state)
        assert not livelock.is_certain
    livelock.note(["a"])
    assert livelock.is_certain


def test_parts_of_a_state_do_not_run_into_each_other() -> None:
    livelock = Livelock()
    for state in (["a", "b"], ["ab"], ["a'b"], [("a", "b")], [["a", "b"]], [1, 2], [12], []):
        livelock.note(state)
        assert not livelock.is_certain, state


def test_after_something_happened_nothing_is_known() -> None:
    livelock = Livelock()
    livelock.note([])
    livelock.note([])
    livelock.clear()
    assert not livelock.is_certain
    livelock.note([])
    assert not livelock.is_certain
