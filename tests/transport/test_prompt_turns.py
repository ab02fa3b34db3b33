"""The order in which prompts are taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transport.ids import RequestId
from transport.prompt_turns import BYTES_PER_SECOND, PromptTurns


def taken(turns: PromptTurns[str]) -> list[str]:
    order = []
    while (item := turns.first()) is not None:
        assert turns.pop(RequestId(item)) == item
        order.append(item)
    return order


def test_a_shorter_prompt_is_taken_first_unless_the_longer_one_has_waited():
    turns: PromptTurns[str] = PromptTurns()
    size = 10 * BYTES_PER_SECOND
    turns.add(RequestId("long"), "long", 0.0, size)
    turns.add(RequestId("short"), "short", 5.0, 10)
    turns.add(RequestId("late"), "late", 11.0, 10)
    assert taken(turns) == ["short", "long", "late"]


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans(), st.integers(0, 9)), max_size=400)
)
def test_it_holds_what_was_added_and_not_taken(steps):
    turns: PromptTurns[str] = PromptTurns()
    held: dict[str, tuple[int, int]] = {}
    for number, (name, is_added, arrived) in enumerate(steps):
        if is_added:
            turns.add(RequestId(name), name, arrived, 0)
            held[name] = (arrived, number)
        else:
            assert turns.pop(RequestId(name)) == (name if name in held else None)
            held.pop(name, None)
        assert len(turns) == len(held)
        assert turns.first() == min(held, key=lambda n: held[n], default=None)
    assert taken(turns) == sorted(held, key=lambda n: held[n])
