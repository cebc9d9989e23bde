"""Spaces of Gymnasium as text, against Gymnasium's own membership test, and worlds with them, one and as vectors."""

from __future__ import annotations

import gymnasium
import numpy
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

from palestra.envs import SerialEnvironment
from palestra.errors import ConfigError
from palestra_inspect.environment_check import check_environment
from palestra_worlds import FrozenLake, GymnasiumEnvironment, GymnasiumVector
from palestra_worlds.gymnasium_spaces import NoText, action_of, instruction, observation_text
from unit.envs.playing import play, says

PAIR = Dict({"go": Discrete(2), "push": Box(-1, 1, (2,), dtype=numpy.float32)})


@pytest.mark.parametrize(
    ("space", "said", "found"),
    [
        (Box(-2, 2, (1,), dtype=numpy.float32), "I push with -1.5!", [-1.5]),
        (Box(-2, 2, (1,), dtype=numpy.float32), "2.5", None),
        (Box(-2, 2, (1,), dtype=numpy.float32), "hard", None),
        (Box(-2, 2, (2,), dtype=numpy.float32), "7, so 1e-1 and .5", [0.1, 0.5]),
        (Box(-2, 2, (2,), dtype=numpy.float32), "1", None),
        (Box(0, 255, (2, 2), dtype=numpy.uint8), "1 2 3 255", [[1, 2], [3, 255]]),
        (Box(0, 255, (1,), dtype=numpy.uint8), "256", None),
        (Box(0, 255, (1,), dtype=numpy.uint8), "-1", None),
        (Box(0, 255, (1,), dtype=numpy.uint8), "1.5", None),
        (MultiDiscrete([3, 2]), "2, 1", [2, 1]),
        (MultiDiscrete([3, 2]), "2, 2", None),
        (MultiBinary(3), "1 0 1", [1, 0, 1]),
        (Discrete(3, start=1), "3", 3),
        (Discrete(3, start=1), "0", None),
        (Discrete(3, start=1), "There are 3 ways, and 1 is shut.\nI take 2.", 2),
        (Discrete(3, start=1), "1.5", None),
        (PAIR, 'From {"go": 0} on, so:\n```json\n{"go": 1, "push": [0.5, -0.5]}\n```', {"go": 1, "push": [0.5, -0.5]}),
        (PAIR, 'I push.\n{\n "go": 1,\n "push": [0.5, -0.5]\n}', {"go": 1, "push": [0.5, -0.5]}),
        (Text(5), "hello", "hello"),
        (Text(5), "hello there", None),
        (Tuple([Discrete(2), Text(3)]), '[1, "ab"]', (1, "ab")),
        (Tuple([Discrete(2), Text(3)]), '[1, "abcd"]', None),
        (PAIR, '{"go": 1, "push": [0.5, -0.5]}', {"go": 1, "push": [0.5, -0.5]}),
        (PAIR, '{"go": 1, "push": [0.5, -1.5]}', None),
        (PAIR, '{"go": true, "push": [0.5, -0.5]}', None),
        (PAIR, '{"go": 1}', None),
        (PAIR, "go", None),
    ],
)
def test_a_reply_is_an_action_exactly_if_the_space_contains_it(space, said, found):
    action = action_of(space, said)
    if found is None:
        assert action is None
        return
    assert space.contains(action)
    plain = (
        {name: numpy.asarray(part).tolist() for name, part in action.items()} if isinstance(action, dict) else action
    )
    if isinstance(plain, numpy.ndarray):
        numpy.testing.assert_allclose(plain, numpy.asarray(found, dtype=plain.dtype))
    elif isinstance(plain, dict):
        assert plain == found
    else:
        assert plain == found


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (Box(-2, 2, (1,), dtype=numpy.float32), "Say 1 number from -2 to 2."),
        (
            Box(numpy.array([0, 1.0]), numpy.array([1.0, 5]), dtype=numpy.float64),
            "Say 2 numbers, at least 0, 1 and at most 1, 5.",
        ),
        (Box(-numpy.inf, numpy.inf, (2,)), "Say 2 numbers."),
        (MultiDiscrete([3, 2]), "Say 2 whole numbers, each at least 0 and below 3, 2."),
        (Discrete(3, start=1), "Say a number from 1 to 3."),
        (PAIR, "Say a JSON object of: go: Say a number from 0 to 1.; push: Say 2 numbers from -1 to 1."),
    ],
)
def test_an_agent_is_told_what_to_say(space, words):
    assert instruction(space) == words


def test_observations_are_short_numbers_with_their_names():
    assert observation_text(numpy.array([0.12345678, -3.0, 2e9], dtype=numpy.float32)) == "0.1235, -3, 2e+09"
    assert observation_text(numpy.array([1.5, 2]), ("place", "speed")) == "place 1.5, speed 2"
    assert observation_text(numpy.array([[1, 2], [3, 4]])) == "1 2\n3 4"
    assert observation_text({"a": 3, "b": (numpy.array(2), "text")}) == "a: 3\nb: 2\ntext"
    with pytest.raises(NoText, match=r"shape.*210.*160.*3"):
        observation_text(numpy.zeros((210, 160, 3), dtype=numpy.uint8))


def test_a_world_of_numbers_is_played_and_checked():
    features = ("x", "y", "speed")
    environment = GymnasiumEnvironment("Pendulum-v1", features=features, max_episode_steps=3)
    text, _ = environment.reset({"seed": 1})
    told, seen = text.split("\n")
    assert told == "Say 1 number from -2 to 2."
    reference = gymnasium.make("Pendulum-v1", max_episode_steps=3)
    expected, _ = reference.reset(seed=1)
    assert seen == ", ".join(f"{name} {float(v):.4f}".rstrip("0") for name, v in zip(features, expected, strict=True))
    _, reward, *_ = reference.step(numpy.array([1.5], dtype=numpy.float32))
    assert environment.step("1.5")[1] == reward
    shown, reward, *_, info = environment.step("3")
    assert shown.startswith("That was no possible action; another one was taken.\n")
    assert (reward < -1, info["impossible"]) == (True, True)
    environment.close()
    check_environment(
        lambda: GymnasiumEnvironment("Pendulum-v1", max_episode_steps=5), [{"seed": 1}], ["0.5", "-2", "left"]
    )


@pytest.mark.parametrize("working", ["", "Up is a hole and left is the wall, 4 steps to go.\n", "down? No: "])
def test_a_direction_is_followed_with_working_before_it_as_without(working):
    environment = FrozenLake()
    environment.reset({"map": ["SFG", "HHH", "HHH"], "seed": 1})
    assert environment.step(f"{working}right")[0] == "S@G\nHHH\nHHH"
    assert environment.step(f"{working}Right!")[1:3] == (1.0, True)


def test_of_names_that_begin_alike_the_longer_one_is_meant():
    environment = GymnasiumEnvironment("CartPole-v1", actions=("push", "push right"))
    environment.reset({"seed": 1})
    world = gymnasium.make("CartPole-v1")
    world.reset(seed=1)
    assert environment.step("Not push but push right")[0] == observation_text(world.step(1)[0])


def test_what_can_not_be_said_or_shown_is_refused():
    class Graphs(gymnasium.Env):
        action_space = gymnasium.spaces.Graph(Discrete(2), None)
        observation_space = Discrete(2)

    gymnasium.register("Graphs-v0", Graphs, disable_env_checker=True)
    with pytest.raises(ConfigError, match=r"said.*text"):
        GymnasiumEnvironment("Graphs-v0")
    with pytest.raises(ConfigError, match="no such"):
        GymnasiumEnvironment("no such")
    with pytest.raises(ConfigError, match="a vector"):
        GymnasiumVector("NoSuch-v9")


async def test_each_world_of_a_vector_is_that_of_the_single_form():
    steps, environment = 30, GymnasiumVector("CartPole-v1", worlds=3, vectorization_mode="sync")
    turns: dict[str, int] = {}

    def act(observation):
        turn = turns[observation.agent] = turns.get(observation.agent, -1) + 1
        return says(str((turn + len(observation.agent)) % 2) if observation.agent != "world-2" else "1")

    seen = await play(environment, {"seed": 11}, act)
    for number in range(3):
        mine = [one for one in seen if one.agent == f"world-{number}"]
        world = gymnasium.make("CartPole-v1")
        expected, _ = world.reset(seed=11 + number)
        assert mine[0].content[0].text.endswith(observation_text(expected))
        for turn in range(steps):
            move = 1 if number == 2 else (turn + len("world-0")) % 2
            expected, _, terminated, truncated, _ = world.step(move)
            if terminated or truncated:
                break
            assert mine[turn + 1].content[0].text.endswith(observation_text(expected))
        total = sum(one.reward or 0.0 for one in mine)
        assert total == turn + 1 if terminated else total >= steps
    await environment.close()


def test_a_vector_keeps_to_what_environments_have_to_do():
    check_environment(
        lambda: GymnasiumVector("CartPole-v1", worlds=2), [{"seed": 1}], ["0", "1", "left"], max_steps=200
    )


class Losing(gymnasium.Env):
    """Each move costs: the first one 1, the others 10; ten moves."""

    action_space = Discrete(3)
    observation_space = Discrete(11)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 10
        return self.left, {}

    def step(self, action):
        self.left -= 1
        return self.left, -10.0 if action else -1.0, self.left == 0, False, {}


def played(environment, said: str) -> float:
    environment.reset({"seed": 3})
    paid, over = 0.0, False
    while not over:
        _, reward, over, cut, _ = environment.step(said)
        paid, over = paid + reward, over or cut
    return paid


gymnasium.register("Losing-v0", Losing)


@pytest.mark.parametrize("name", ["Losing-v0", "Pendulum-v1", "MountainCar-v0", "CartPole-v1"])
def test_no_impossible_reply_is_better_than_to_play(name):
    limit = {} if name == "Losing-v0" else {"max_episode_steps": 10}
    environment = GymnasiumEnvironment(name, **limit)
    legal = "0.5" if name == "Pendulum-v1" else "0"
    assert played(environment, "hm") < played(environment, legal)
    assert played(environment, "hm") == played(environment, "99 bottles")  # by the task's seed alone


def test_that_ending_an_episode_pays_is_a_warning():
    with pytest.warns(UserWarning, match=r"ends.*0.*earns.*-1"):
        check_environment(lambda: GymnasiumEnvironment("Losing-v0", impossible_reward=0.0), [{}], ["0", "hm"])
    check_environment(lambda: GymnasiumEnvironment("Losing-v0"), [{}], ["0", "hm"])


def test_actions_are_told_and_a_model_can_be_held_to_them():
    environment = GymnasiumEnvironment("Losing-v0", enforce=True)
    assert environment.reset({})[0].splitlines()[0] == "Say a number from 0 to 2."
    assert environment.choices == ("0", "1", "2")
    named = GymnasiumEnvironment("Losing-v0", actions=("wait", "left", "right"), enforce=True)
    assert named.reset({})[0].splitlines()[0] == "Say wait, left or right."
    assert named.choices == ("wait", "left", "right")
    serial = SerialEnvironment(named)
    assert (serial.gives_choices, serial.moves) == (True, named.choices)
    with pytest.raises(ConfigError, match="no list"):
        GymnasiumEnvironment("Pendulum-v1", enforce=True)


async def test_replies_in_copies_of_a_world_are_no_better_when_impossible():
    totals = {}
    for said in ("0", "hm"):
        episode = await play(
            GymnasiumVector("Losing-v0", worlds=2), {"seed": 1}, lambda observation, said=said: says(said)
        )
        totals[said] = sum(step.reward or 0.0 for step in episode)
    assert totals["hm"] < totals["0"]


class Doubled(gymnasium.RewardWrapper):
    """Like most users' wrappers, it does not record its arguments."""

    def reward(self, reward):
        return 2 * reward


def test_a_wrapped_instance_is_copied():
    made = GymnasiumEnvironment(Doubled(gymnasium.make("Losing-v0")))
    made.reset({})
    assert made.step("0")[1] == -2
    with pytest.raises(ConfigError, match="render_mode"):
        GymnasiumEnvironment(Doubled(gymnasium.make("Losing-v0")), observation="render")


@pytest.mark.parametrize("number", ["1" * 400, "1e300"])
def test_a_number_that_its_type_does_not_have_is_no_action(number):
    endless = Dict({"push": Box(-numpy.inf, numpy.inf, (1,), dtype=numpy.float32)})
    assert action_of(endless, f'{{"push": [{number}]}}') is None
    assert action_of(endless["push"], "1e300") is None
