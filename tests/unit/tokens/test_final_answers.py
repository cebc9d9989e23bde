from __future__ import annotations

from palestra.tokens import TokenTrie, calls_of_final_answers
from unit.building import make_chat


def final(*chats) -> set[int]:
    return set(calls_of_final_answers(TokenTrie(chats), chats))


def test_no_calls_have_no_answer():
    assert final() == set()


def test_all_calls_of_one_conversation_led_to_its_end():
    first = make_chat(prompt=(1,), completion=(2,))
    second = make_chat(index=1, parent=first, prompt=(3,), completion=(4,))
    assert final(first, second) == {0, 1}


def test_an_attempt_that_was_not_gone_on_from_is_left_out():
    first = make_chat(prompt=(1,), completion=(2,))
    given_up = make_chat(index=1, parent=first, prompt=(3,), completion=(4,))
    after_it = make_chat(index=2, parent=given_up, prompt=(5,), completion=(6,))
    again = make_chat(index=3, parent=first, prompt=(7,), completion=(8,))
    assert final(first, given_up, after_it, again) == {0, 3}


def test_what_was_said_before_the_history_was_rewritten_is_left_out():
    first = make_chat(prompt=(1,), completion=(2,))
    summarised = make_chat(index=1, prompt=(1, 9), completion=(4,))
    assert final(first, summarised) == {1}


def test_a_reply_of_which_only_a_part_is_kept_is_left_out():
    first = make_chat(prompt=(1,), completion=(2, 3))
    cut = make_chat(index=1, prompt=(1, 2, 9), completion=(4,))
    assert final(first, cut) == {1}


def test_every_agent_has_an_answer_of_its_own():
    planner = make_chat(prompt=(1,), completion=(2,), agent="planner")
    search = make_chat(index=1, prompt=(5,), completion=(6,), agent="planner/search")
    search_again = make_chat(index=2, prompt=(7,), completion=(8,), agent="planner/search")
    answer = make_chat(index=3, parent=planner, prompt=(3,), completion=(4,), agent="planner")
    assert final(planner, search, search_again, answer) == {0, 2, 3}


def test_a_call_of_another_agent_that_the_answer_goes_on_from_led_to_it():
    draft = make_chat(prompt=(1,), completion=(2,), agent="writer")
    other_draft = make_chat(index=1, prompt=(1,), completion=(3,), agent="writer")
    review = make_chat(index=2, parent=draft, prompt=(4,), completion=(5,), agent="critic")
    assert final(draft, other_draft, review) == {0, 1, 2}


def test_equal_samples_stand_in_the_answer_alike():
    one = make_chat(prompt=(1,), completion=(2,))
    same = make_chat(index=1, prompt=(1,), completion=(2,))
    answer = make_chat(index=2, parent=same, prompt=(3,), completion=(4,))
    assert final(one, same, answer) == {0, 1, 2}


def test_the_last_call_is_that_with_the_highest_index_not_the_last_in_the_list():
    one = make_chat(index=5, prompt=(1,), completion=(2,))
    other = make_chat(index=3, prompt=(1,), completion=(4,))
    assert final(one, other) == final(other, one) == {5}
