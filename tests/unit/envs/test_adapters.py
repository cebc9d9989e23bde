"""What users of Gymnasium have is taken as it is: a class, an instance, a name."""

from __future__ import annotations

from functools import partial

import gymnasium
import pytest
from gymnasium.spaces import Discrete

from palestra import JobConfig, RolloutSpec, check_environment, train
from palestra.envs.catalog import adapted
from palestra.errors import ConfigError, InvalidEnvironment
from palestra.runtime.arguments import Play, resolve_rollout
from palestra_worlds.gymnasium import GymnasiumEnvironment


class Corridor(gymnasium.Env):
    """A corridor of four fields, at whose right end there is a reward."""

    observation_space, action_space = Discrete(4), Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.at = 0
        return self.at, {}

    def step(self, action):
        self.at = max(self.at + (1 if action else -1), 0)
        return min(self.at, 3), float(self.at == 3), self.at >= 3, False, {}


def played(maker) -> list[float]:
    world = maker()
    world.reset({"seed": 1})
    return [world.step("1")[1] for _ in range(3)]


FACTORIES = {"lambda": lambda: Corridor(), "partial": partial(gymnasium.wrappers.TimeLimit, Corridor(), 9)}


@pytest.mark.parametrize("given", [Corridor, Corridor(), *FACTORIES.values()], ids=["class", "instance", *FACTORIES])
def test_a_class_and_an_instance_make_worlds_of_their_own(given):
    maker = adapted(given)
    assert isinstance(maker(), GymnasiumEnvironment)
    assert adapted(maker) is maker
    assert maker()._world is not maker()._world
    assert played(maker) == [0.0, 0.0, 1.0]
    spec = resolve_rollout(JobConfig(), Play(environment=given))
    assert played(spec.environment) == [0.0, 0.0, 1.0]
    check_environment(given, [{"seed": 1}], actions=["1"])


def test_a_name_and_an_instance_of_it_are_made_as_gymnasium_makes_them():
    made = gymnasium.make("FrozenLake-v1", is_slippery=False, max_episode_steps=7)
    for given, slippery, limit in (("FrozenLake-v1", True, 100), (made, False, 7)):
        world = adapted(given)()._world
        assert world is not made
        assert world.spec.max_episode_steps == limit
        assert world.spec.kwargs.get("is_slippery", True) == slippery


def test_what_no_adapter_knows_stays_as_it_is():
    for other in ("gomoku", "no-such-world", GymnasiumEnvironment, None, 7):
        assert adapted(other) is other


def test_a_function_that_makes_no_environment_says_what_it_made():
    for made in (None, Corridor, "gomoku", 7):
        with pytest.raises(InvalidEnvironment, match=f"returned a {type(made).__name__}, which is no environment"):
            adapted(lambda made=made: made)()


@pytest.mark.parametrize(
    ("name", "said"), [("CartPole-v9", "`v1`"), ("CartPol-v1", "`CartPole`"), ("no.such:A-v0", "no")]
)
def test_a_name_that_looks_like_one_of_gymnasium_is_refused_with_those_that_there_are(name, said):
    with pytest.raises(ConfigError, match=f"Gymnasium has no '{name}': .*{said}"):
        adapted(name)


def test_an_instance_that_can_not_be_copied_is_refused_with_the_remedy():
    world = Corridor()
    world.lock = (_ for _ in ())  # a generator can't be copied
    with pytest.raises(ConfigError, match=r"`lambda.*Corridor\(…\)`"):
        adapted(world)()


@pytest.mark.slow
def test_a_gymnasium_class_is_trained(tmp_path):
    config = JobConfig.model_validate(
        {
            "model": "tiny-random",
            "steps": 1,
            "run_dir": tmp_path / "run",
            "rollout": {"group_size": 2, "groups_per_step": 1},
            "policies": {"policy": {"sampling": {"max_tokens": 2}}},
        }
    )
    result = train(environment=Corridor, tasks=[{"seed": n} for n in range(2)], config=config, quiet=True)
    assert result.state == "completed"
    assert isinstance(RolloutSpec(environment=Corridor).environment(), GymnasiumEnvironment)
