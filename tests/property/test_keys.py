"""A key opens what it was made for; whatever else somebody makes up opens nothing."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from palestra.errors import Unauthorized
from palestra.server.auth import EpisodeKey, KeyRing

RING = KeyRing(lambda: b"s" * 32, "job")
episodes = st.text(alphabet="train-0123456789.adhoc", min_size=1, max_size=24)
fences = st.integers(0, 10**9 - 1)


@given(episodes, fences)
def test_every_key_opens_exactly_its_episode_and_fence(episode, fence):
    assert RING.check(RING.episode_key(episode, fence)) == EpisodeKey(episode, fence)


@given(episodes, fences, episodes, fences)
def test_two_claims_never_have_one_key(a, f, b, g):
    assume((a, f) != (b, g))
    assert RING.episode_key(a, f) != RING.episode_key(b, g)


@given(episodes, fences, st.data())
def test_a_key_with_one_character_changed_added_or_taken_away_opens_nothing(episode, fence, data):
    key = RING.episode_key(episode, fence)
    place = data.draw(st.integers(0, len(key) - 1))
    letter = data.draw(st.characters(exclude_categories=("Cs",)))
    mangled = data.draw(
        st.sampled_from([key[:place] + letter + key[place + 1 :], key[:place] + letter + key[place:]])
        | st.just(key[:place] + key[place + 1 :])
    )
    assume(mangled != key)
    with pytest.raises(Unauthorized):
        RING.check(mangled)


@given(st.text(max_size=80, alphabet=st.characters(exclude_categories=("Cs",))))
def test_made_up_text_opens_nothing(text):
    for key in (text, f"pe-{text}", f"pe-e.1.{text}", f"pj-{text}"):
        with pytest.raises(Unauthorized):
            RING.check(key)


@given(episodes, fences, st.binary(min_size=1, max_size=40), st.text(min_size=1, max_size=10))
def test_a_key_of_another_secret_or_job_opens_nothing(episode, fence, secret, job):
    assume((secret, job) != (b"s" * 32, "job"))
    with pytest.raises(Unauthorized):
        RING.check(KeyRing(lambda: secret, job).episode_key(episode, fence))
