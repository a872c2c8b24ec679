"""Slots: none is given out twice, and the rank with most room gets the next sequence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sampler.engine.front import Slot, Slots


@given(st.integers(1, 3), st.integers(1, 4), st.lists(st.booleans(), max_size=40))
def test_a_slot_is_held_by_one_sequence(ranks, each, takes):
    slots, held = Slots(ranks, each), []
    for take in takes:
        if take:
            slot = slots.take()
            assert (slot is None) == (len(held) == ranks * each)
            if slot is not None:
                assert slot not in held
                assert 0 <= slot.number < each
                held.append(slot)
        elif held:
            slots.give(held.pop(0))


def test_a_free_slot_cannot_be_given_back():
    with pytest.raises(ValueError, match="is free"):
        Slots(1, 2).give(Slot(0, 1))
