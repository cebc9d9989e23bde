"""What a trainer over several devices does not do is refused by name, before anything is loaded."""

from __future__ import annotations

import pytest

from palestra.config import JobConfig, TrainerConfig, parse_config
from palestra.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine": {"kind": "fake"}}, "trainer.devices is 2, and engine.kind = 'fake' trains no model"),
        ({"algorithm": {"name": "ppo"}}, "algorithm.name = 'ppo' has a critic"),
        ({"algorithm": {"name": "sac"}}, "algorithm.name = 'sac' has a critic"),
        (
            {"policies": {"a": {"algorithm": {"name": "a2c"}}}},
            "policies.a.algorithm.name = 'a2c' has a critic",
        ),
        ({"policies": {"a": {"base": "ws://h:1", "adapter": {"rank": 4}}}}, "trainer.devices is set, and the policies"),
        ({"trainer": {"cpu_offload": True, "device": "cpu"}}, "trainer.cpu_offload is for several CUDA devices"),
        ({"trainer": {"cpu_offload": True, "devices": 1}}, "trainer.cpu_offload is for several CUDA devices"),
        ({"trainer": {"devices": 0}}, "trainer.devices"),
    ],
)
def test_what_can_not_be_is_refused(settings, said):
    settings = settings | {"trainer": {"devices": 2} | settings.get("trainer", {})}
    with pytest.raises(ConfigError) as refused:
        parse_config(settings)
    assert said in str(refused.value)


def test_several_policies_and_adapters_may_be_trained():
    several = {"a": {"adapter": {"rank": 4}}, "b": {}}
    parse_config({"policies": several, "roles": {"x": "b"}, "trainer": {"devices": 2}})


def test_a_run_may_go_on_with_other_devices_unless_it_is_deterministic():
    one, two = TrainerConfig(), TrainerConfig(devices=2, activation_checkpointing=True)
    assert JobConfig(trainer=one).digest() == JobConfig(trainer=two).digest()
    exact = JobConfig(deterministic=True, trainer=one).digest()
    assert JobConfig(deterministic=True, trainer=two).digest() != exact
    assert JobConfig(deterministic=True, trainer=TrainerConfig(stuck_seconds=5.0)).digest() == exact
