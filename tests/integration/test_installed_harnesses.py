"""The coding agents that are installed here play their scripted task; `make harnesses` installs them all."""

from __future__ import annotations

import pytest

from palestra.errors import ConfigError
from palestra_harness import known_harnesses
from palestra_harness.checking import check_harness, lines_of

# What a context of 8,192 tokens leaves a lean form room for, with its first prompt.
MOST_OF_LEAN = 4096


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", sorted(known_harnesses()))
async def test_an_installed_harness_plays_with_the_tokens_that_were_sampled(name):
    harness = known_harnesses()[name]
    try:
        harness.find_program()
    except ConfigError as error:
        pytest.skip(str(error))
    found = await check_harness(harness)
    assert found.speaks, lines_of(found)
    assert not found.forks, lines_of(found)
    if name.endswith("-lean"):
        assert found.first_tokens < MOST_OF_LEAN
