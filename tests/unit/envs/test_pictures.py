"""Observations and results of tools with pictures: what an environment returns is what the agent is shown."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from palestra.envs import Environment, SerialEnvironment
from palestra.envs.acting import ActingEnvironment, Progress
from palestra.errors import ConfigError, EnvironmentFailed, InvalidEnvironment
from palestra.pictures.parts import Picture
from palestra.pictures.pixels import decode_picture
from palestra.tools import FunctionTool, ToolManager
from palestra.types.messages import ChatMessage, FunctionCall, ImagePart, Observation, TextPart, ToolCall, text_message
from palestra_inspect.environment_check import check_environment
from palestra_remote.observations import message_of, observation_of
from palestra_remote.wire import Observed
from palestra_worlds import GymnasiumEnvironment

RED = np.full((6, 8, 3), (200, 30, 30), np.uint8)


class Shows(Environment):
    """Shows what its class says, and after the first action what the task says."""

    blocking = False
    first: object = "text"

    def reset(self, task):
        return self.first, {}

    def step(self, action):
        return self.first, 1.0, True, False, {}


async def shown(value):
    environment = SerialEnvironment(type("Shown", (Shows,), {"first": value})())
    await environment.reset({})
    first = await environment.observe()
    environment.act(first.id, text_message("assistant", "x"))
    last = await environment.observe()
    assert first.content == last.content
    (message,) = first.content
    assert message.role == "user"
    return message.content


async def test_an_array_an_image_and_a_file_are_the_same_picture():
    file = io.BytesIO()
    Image.fromarray(RED).save(file, "PNG")
    parts = [(await shown(value))[0] for value in (RED, Image.fromarray(RED))]
    assert parts[0] == parts[1]
    for part in (*parts, (await shown(file.getvalue()))[0]):
        assert isinstance(part, Picture)
        assert np.array_equal(np.asarray(decode_picture(part.data)), RED)


async def test_texts_and_pictures_keep_their_order():
    first, picture, last = await shown(["look:", RED, "what is it?"])
    assert (first.text, last.text) == ("look:", "what is it?")
    assert isinstance(picture, Picture)
    assert await shown("text") == (TextPart(text="text"),)


@pytest.mark.parametrize("value", [3, {"picture": RED}, [3], RED.astype(np.float32), None])
async def test_other_values_are_refused_by_name(value):
    with pytest.raises(InvalidEnvironment, match="a picture"):
        await shown(value)


def test_the_check_plays_an_environment_with_pictures():
    check_environment(type("Pictures", (Shows,), {"first": ["look", RED]}), [{}])


def look(what: str) -> object:
    """Look.

    Args:
        what: At what.
    """
    return {"red": RED, "both": ["here", RED], "numbers": np.zeros(3), "list": ["a", "b"], "text": "plain"}[what]


async def test_tools_return_pictures():
    manager = ToolManager([FunctionTool(look)], max_result_chars=200)
    kinds = ("red", "both", "numbers", "list", "text")
    calls = [ToolCall(id=k, function=FunctionCall(name="look", arguments=f'{{"what": "{k}"}}')) for k in kinds]
    red, both, numbers, texts, text = [result.message for result in await manager.execute_calls(calls)]
    assert red.content == (Picture.of(RED),)
    assert red.tool_call_id == "red"
    assert both.content == (TextPart(text="here"), Picture.of(RED))
    assert numbers.text.startswith("[0")
    assert texts.text == '["a","b"]'
    assert text.text == "plain"


def test_a_picture_with_its_file_is_the_same_part_in_a_set_as_without_it():
    picture = Picture.of(RED)
    stored = ImagePart(digest=picture.digest)
    assert stored == picture
    assert {ChatMessage(role="user", content=(part,)) for part in (stored, picture)} == {
        ChatMessage(role="user", content=(stored,))
    }


def test_a_picture_travels_with_its_file_once():
    picture = Picture.of(RED)
    seen = Observation(id="o1", parents=(), agent="a", content=(ChatMessage(role="user", content=(picture,)),))
    sent, known = set(), set()
    first = message_of(seen, alone=True, survives_failure=False, sent=sent)
    again = message_of(seen, alone=True, survives_failure=False, sent=sent)
    assert first["pictures"] == {picture.digest: base64.b64encode(picture.data).decode()}
    assert "pictures" not in again
    messages = [Observed(number=k, **one) for k, one in enumerate((first, again), 1)]
    found = [observation_of(message, 0.0, known).content[0].content[0] for message in messages]
    assert isinstance(found[0], Picture)
    assert found[0].data == picture.data
    assert type(found[1]) is ImagePart
    with pytest.raises(EnvironmentFailed, match="not sent"):
        observation_of(messages[1], 0.0, set())
    for wrong, said in (("AAAA", "digest that"), ("§", "no base64")):
        damaged = messages[0].model_copy(update={"pictures": {picture.digest: wrong}})
        with pytest.raises(EnvironmentFailed, match=said):
            observation_of(damaged, 0.0, set())


class Screen(ActingEnvironment):
    """A screen that turns red at a click."""

    answers = False

    def __init__(self) -> None:
        super().__init__([FunctionTool(self.click)], actions="tools", max_steps=3, tool_seconds=5)
        self.clicks = 0

    async def click(self) -> str:
        """Click."""
        self.clicks += 1
        return "done"

    async def start(self, task):
        self.clicks = 0
        return "Click twice."

    async def observe(self):
        return Picture.of(RED if self.clicks else RED // 2)

    async def progress(self, answer):
        return Progress(reward=float(self.clicks == 2), over=self.clicks == 2)

    def check_alive(self) -> None:
        pass


async def test_an_acting_environment_shows_its_screen_after_the_results_of_calls():
    screen = Screen()
    goal, first = (await screen.reset({}))[0]
    assert goal == "Click twice."
    assert first == Picture.of(RED // 2)
    call = ToolCall(id="c", function=FunctionCall(name="click", arguments="{}"))
    action = ChatMessage(role="assistant", tool_calls=(call,))
    result, seen = (await screen.step_message(action))[0]
    assert (result.role, result.text) == ("tool", "done")
    assert seen.content == (Picture.of(RED),)
    spoken, *_ = await screen.step_message(text_message("assistant", "hm"))
    assert spoken[0].text.startswith("That is no action")
    assert spoken[0].content[1] == Picture.of(RED)


gymnasium = pytest.importorskip("gymnasium")


class Field(gymnasium.Env):
    """A field of pixels, of which the action lights one."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 1}  # noqa: RUF012

    def __init__(self, render_mode=None, pixels=True):
        self.render_mode = render_mode
        box = gymnasium.spaces.Box(0, 255, (4, 5, 3), np.uint8)
        self.observation_space = box if pixels else gymnasium.spaces.Discrete(20)
        self.action_space = gymnasium.spaces.Discrete(20)
        self.lit, self.pixels = 0, pixels

    def seen(self):
        field = np.zeros((4, 5, 3), np.uint8)
        field[self.lit // 5, self.lit % 5] = 255
        return field

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.lit = 0
        return (self.seen() if self.pixels else 0), {}

    def step(self, action):
        self.lit = int(action)
        return (self.seen() if self.pixels else self.lit), 1.0, True, False, {}

    def render(self):
        return np.repeat(np.repeat(self.seen(), 8, 0), 8, 1)


@pytest.fixture
def field():
    gymnasium.register("PalestraField-v0", entry_point=Field)
    yield "PalestraField-v0"
    gymnasium.registry.pop("PalestraField-v0")


async def test_observations_of_gymnasium_are_shown_as_pictures_or_rendered(field):
    for settings, size in (
        ({"observation": "picture"}, (5, 4)),
        ({"observation": "render", "pixels": False}, (40, 32)),
    ):
        environment = SerialEnvironment(GymnasiumEnvironment(field, rules="Light one.", **settings))
        await environment.reset({"seed": 1})
        observation = await environment.observe()
        text, picture = observation.content[0].content
        assert text.text == "Light one."
        assert decode_picture(picture.data).size == size
        environment.act(observation.id, text_message("assistant", "7"))
        (last,) = (await environment.observe()).content[0].content
        pixels = np.asarray(decode_picture(last.data))[:: size[1] // 4, :: size[0] // 5]
        assert np.flatnonzero(pixels[..., 0]).tolist() == [7]


def test_observations_that_are_no_pictures_are_refused_by_name(field):
    with pytest.raises(ConfigError, match="are Discrete"):
        GymnasiumEnvironment(field, observation="picture", pixels=False)
    with pytest.raises(InvalidEnvironment, match=r"observation.*'picture'"):
        GymnasiumEnvironment(field).reset({})
