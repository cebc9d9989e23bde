from __future__ import annotations

import tomllib
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.config import JobConfig, dump_config, parse_config
from palestra.config.budget import (
    JUDGE,
    TEACHER,
    UNITS,
    TokenPrice,
    device_count,
    exact_money,
    shown_money,
    token_prices,
    units_of,
    unpriced_servers,
    unused_prices,
)
from palestra.errors import ConfigError

RUBRIC = {"kind": "rubric", "url": "http://h:8000", "criteria": [{"name": "good", "text": "Good?"}]}
FREE = {"tokens": {"h:8000": [0, 0]}}


@given(amount=st.floats(0, 1e9), divisor=st.sampled_from([1, 10**6, 3_600_000]))
def test_no_amount_is_charged_too_low_and_none_more_than_a_unit_too_high(amount, divisor):
    exact = Decimal(repr(amount)) * UNITS / divisor
    assert 0 <= units_of(amount, divisor) - exact <= 1 + exact * Decimal("1e-27")


@given(units=st.integers(-(10**40), 10**40))
def test_money_is_written_exactly_and_rounded_for_people(units):
    assert Decimal(exact_money(units)).scaleb(15) == units or len(str(units)) > 28
    shown = Decimal(shown_money(units).replace(",", ""))
    assert abs(shown * UNITS - units) <= UNITS // 200 + abs(units) // 10**25


def test_a_price_has_the_name_of_a_policy_a_model_or_a_server():
    config = parse_config(
        {
            "policies": {"policy": {}, "other": {"frozen": True, "model": "big/model"}},
            "judge": RUBRIC,
            "prices": {"tokens": {"big/model": [1, 2], "http://h:8000": [0.5, 1.5], "nobody": [1, 1]}},
        }
    )
    assert token_prices(config) == {
        "other": TokenPrice(UNITS // 10**6, 2 * UNITS // 10**6),
        JUDGE: TokenPrice(UNITS // (2 * 10**6), 3 * UNITS // (2 * 10**6)),
    }
    assert unused_prices(config) == ["nobody"]
    assert list(unpriced_servers(config)) == []
    assert parse_config(tomllib.loads(dump_config(config))).prices == config.prices


def test_each_server_without_a_price_is_named_in_one_line():
    teacher = {"name": "distill", "teacher_server": {"url": "http://t:1"}}
    config = parse_config({"judge": RUBRIC | {"model": "m"}, "algorithm": teacher, "prices": {"device_hour": 1}})
    found = dict(unpriced_servers(config))
    assert found.keys() == {"judge", "algorithm.teacher_server"}
    assert all("\n" not in text and "prices.tokens" in text for text in found.values())
    assert "'http://h:8000' or 'm'" in found["judge"]
    assert token_prices(config) == {}
    priced = parse_config({"algorithm": teacher, "prices": {"tokens": {"t:1": [1, 0]}}})
    assert token_prices(priced) == {TEACHER: TokenPrice(UNITS // 10**6, 0)}
    assert list(unpriced_servers(JobConfig())) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budget": {}}, "budget limits"),
        ({"budget": {"money": 1}}, "needs prices"),
        ({"budget": {"money": 1}, "prices": {}, "judge": RUBRIC}, "'http://h:8000'"),
        ({"budget": {"tokens": 1024}}, "1,025"),
        ({"budget": {"hours": 0}}, "hours"),
        ({"budget": {"money": float("inf")}, "prices": {}}, "money"),
        ({"prices": {"device_hour": -1}}, "device_hour"),
        ({"prices": {"tokens": {"m": [1]}}}, "prices.tokens"),
    ],
)
def test_a_budget_that_can_not_be_kept_is_refused_in_one_line(changes, said):
    with pytest.raises(ConfigError, match=said) as error:
        parse_config(changes)
    assert "\n" not in str(error.value)


def test_prices_and_budget_may_change_when_a_run_is_resumed():
    changed = parse_config({"budget": {"money": 3, "tokens": 10**6}, "prices": FREE})
    assert changed.digest() == JobConfig().digest()


def test_devices_are_those_of_the_trainer_and_of_workers():
    assert device_count(JobConfig()) == 1
    assert device_count(parse_config({"trainer": {"devices": 2}})) == 2
    assert device_count(parse_config({"engine": {"replicas": 3}})) == 4
    assert device_count(parse_config({"kind": "inference", "engine": {"replicas": 3}})) == 3
