from __future__ import annotations

import asyncio
import hashlib

import numpy as np
import pytest

from palestra.session.registry import CallRegistry, call_seed, prompt_digest
from palestra.types.messages import GenerationRequest
from unit.building import ids, make_chat

PROMPT = prompt_digest(ids(1, 2, 3))


def seeds(*occurrences: int) -> list[int]:
    return [call_seed(7, "e", PROMPT, occurrence) for occurrence in occurrences]


def test_equal_prompts_have_the_seeds_of_their_occurrences_and_numbers_in_order():
    registry = CallRegistry(7, "e", ())
    made = [registry.reserve(PROMPT) for _ in range(3)]
    assert [seed for _, seed in made] == seeds(0, 1, 2)
    assert [index for index, _ in made] == [0, 1, 2]
    assert registry.reserve(prompt_digest(ids(9)))[1] == call_seed(7, "e", prompt_digest(ids(9)), 0)


def test_a_seed_that_was_released_is_the_next_ones_and_its_number_stays_a_gap():
    registry = CallRegistry(7, "e", ())
    made = [registry.reserve(PROMPT) for _ in range(3)]
    registry.free(*made[1], PROMPT)
    registry.free(*made[0], PROMPT)
    again = [registry.reserve(PROMPT) for _ in range(3)]
    assert [seed for _, seed in again] == seeds(0, 1, 3)
    assert [index for index, _ in again] == [3, 4, 5]


def test_a_seed_is_freed_by_the_call_that_has_it_and_by_no_other():
    """The call of a worker that died was cancelled late: its seed is that of the next worker's call by then."""
    registry = CallRegistry(7, "e", ())
    first = registry.reserve(PROMPT)
    registry.free(*first, PROMPT)
    second = registry.reserve(PROMPT)
    assert second == (1, first[1])
    registry.free(*first, PROMPT)
    registry.free(*first, PROMPT)
    assert registry.reserve(PROMPT)[1] == seeds(1)[0]


def test_a_registry_of_recorded_calls_goes_on_where_they_end():
    first = make_chat(index=4, prompt=[1], completion=[2])
    registry = CallRegistry(7, "e", [first])
    assert registry.next_step == first.time_step + 1
    assert registry.reserve(PROMPT)[0] == 5


async def test_what_is_being_written_is_waited_for_and_what_was_delivered_is_not_found():
    registry = CallRegistry(7, "e", ())
    chat = make_chat(index=0, prompt=[1], completion=[2])
    request = GenerationRequest(policy=chat.policy, digest=chat.request_digest)
    written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    registry.recording(chat, written)
    asked = asyncio.ensure_future(registry.undelivered(request))
    await asyncio.sleep(0)
    assert not asked.done()
    written.add_done_callback(lambda done: registry.recorded(chat, done, kept=True))
    written.set_result(None)
    assert await asked == {0: chat}
    assert await registry.undelivered(request) == {0: chat}
    registry.delivered(chat)
    assert await registry.undelivered(request) == {}


async def test_what_could_not_be_written_is_not_found():
    registry = CallRegistry(7, "e", ())
    chat = make_chat(index=0, prompt=[1], completion=[2])
    written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    registry.recording(chat, written)
    registry.recorded(chat, written, kept=False)
    assert await registry.undelivered(GenerationRequest(policy=chat.policy, digest=chat.request_digest)) == {}


@pytest.mark.parametrize("tokens", [0, 1, 511, 512, 513, 1023, 1024, 5000])
def test_the_digest_of_a_prompt_of_any_length_is_that_of_all_its_bytes(tokens):
    prompt = np.arange(tokens, dtype=np.int32) * 65_537
    expected = hashlib.blake2b(prompt.astype("<i4").tobytes(), digest_size=16, key=b"judge").digest()
    assert prompt_digest(prompt, "judge") == expected
