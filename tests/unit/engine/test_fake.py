from __future__ import annotations

from palestra.engine.fake import FakeEngine, digits_script
from palestra.types.calls import SamplingParams
from unit.building import engine_request, ids


def sampling(seed: int, **kw) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "max_tokens": 100, "seed": seed} | kw))


def test_digits_are_drawn_from_the_seed_and_end_with_the_stop_token():
    script = digits_script(12, 258)
    replies = [tuple(script(ids(1), sampling(seed))) for seed in range(300)]
    assert all(reply[-1] == 258 for reply in replies)
    assert all(48 <= token <= 57 for reply in replies for token in reply[:-1])
    assert all(1 <= len(reply) <= 12 for reply in replies)
    assert len({len(reply) for reply in replies}) > 5
    assert replies[3] == tuple(script(ids(9, 9), sampling(3)))


async def test_a_reply_is_cut_at_max_tokens():
    engine = FakeEngine(lambda prompt, _: [*prompt.tolist(), 7, 8, 9])
    pieces = [p async for p in engine.generate(engine_request(ids(1, 2), sampling(0, max_tokens=3), "p"))]
    assert [p.ids for p in pieces] == [(1, 2, 7)]
    assert pieces[0].logprobs == (-1.0,) * 3
