"""What no engine is asked: prompts that are no list of the model's tokens, and numbers out of their range."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from palestra.engine.base import check_prompt, check_sampling
from palestra.errors import InvalidRequest
from palestra.types.calls import SAMPLING_RANGES, MediaSpan, SamplingParams, TokenSequence

PLAIN = SamplingParams(temperature=1.0, max_tokens=5, seed=2**64 - 1)


@pytest.mark.parametrize("ids", [[], [259], [-1], [1] * 9, [[1, 2], [3, 4]], [[1]], 5])
def test_a_prompt_is_a_list_of_tokens(ids):
    with pytest.raises(InvalidRequest) as caught:
        check_prompt(TokenSequence(np.array(ids, np.int32)), 259, 8, sees=False)
    assert caught.value.field == "prompt"


def test_a_model_of_text_gets_no_pictures():
    seen = TokenSequence(np.array([1, 258], np.int32), (MediaSpan(1, 1, "digest"),))
    check_prompt(seen, 259, 8, sees=True)
    with pytest.raises(InvalidRequest):
        check_prompt(seen, 259, 8, sees=False)


@pytest.mark.parametrize("field", SAMPLING_RANGES)
def test_numbers_have_ranges(field):
    least, most = SAMPLING_RANGES[field]
    for good in (least, most):
        check_sampling(replace(PLAIN, **{field: good}), 259)
    for bad in (least - 1, most * 2 + 1, 10**400, float("inf"), float("-inf"), float("nan")):
        with pytest.raises(InvalidRequest) as caught:
            check_sampling(replace(PLAIN, **{field: bad}), 259)
        assert caught.value.field == field


def test_every_number_of_a_request_has_a_range():
    numbers = {one.name for one in fields(SamplingParams) if one.type in ("int", "float")}
    assert numbers == SAMPLING_RANGES.keys()


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ({"logit_bias": ((259, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((5, float("nan")),)}, "logit_bias"),
        ({"logit_bias": ((5, 1e9),)}, "logit_bias"),
        ({"logit_bias": ((5, 1.0),) * 1025}, "logit_bias"),
        ({"stop_ids": (-1,)}, "stop_token_ids"),
        ({"stop_ids": (2**70,)}, "stop_token_ids"),
        ({"stop_ids": (5,) * 1025}, "stop_token_ids"),
    ],
)
def test_tokens_are_those_of_the_model(how, field):
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(replace(PLAIN, **how), 259)
    assert caught.value.field == field
