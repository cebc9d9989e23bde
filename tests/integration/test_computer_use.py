"""The loop of computer use, whole: screenshot in, click or text out, screenshot in, with Chromium and with a screen.

The engine in the place of a model acts by the pixels of the newest picture of its prompt, which it finds by the
digest in the run's folder, and by nothing else. So every part of the way has to carry the right picture: environment,
store, prompt, and engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machine import require
from numpy.typing import NDArray
from seeing import SeeingRenderer
from unit.building import one_policy
from unit.envs.browser.pages import site

from palestra.config import parse_config
from palestra.engine.base import EngineRequest
from palestra.engine.fake import FakeEngine
from palestra.envs import Progress
from palestra.grammars.pool import Grammars
from palestra.pictures.blobs import FOLDER, Blobs
from palestra.pictures.pixels import decode_picture
from palestra.rollout import RolloutSpec
from palestra.runtime import local
from palestra.runtime.local import local_job
from palestra.runtime.parts import Parts
from palestra.session import PolicyRuntime
from palestra.trainer.fake import FakeTrainer
from palestra.types.calls import SampledTokens
from palestra.types.records import Task
from palestra_screens import BrowserEnvironment, DesktopEnvironment
from palestra_screens.browser.page import BrowserPage

pytestmark = pytest.mark.browser
Pixels = NDArray[np.uint8]
RED, BLUE = (220, 20, 20), (20, 20, 220)
PAGE = """<!doctype html><style>body {{ margin: 0; background: white }} div {{ position: absolute }}
input {{ position: absolute; border: 0; outline: 0; font: 20px monospace; background: rgb(20, 20, 220) }}</style>
<div id=red style="left:{x}px;top:{y}px;width:30px;height:20px;background:rgb(220,20,20)"></div>
<script>
red.addEventListener("mousedown", () => {{
  const field = document.createElement("input");
  Object.assign(field.style, {{left: "{y}px", top: "{x}px", width: "60px", height: "30px", color: "rgb(20, 20, 220)"}});
  red.remove(); document.body.append(field);
}});
</script>"""
PLACES = [(40, 120), (150, 30)]


class FindIt(BrowserEnvironment):
    """A red box; in its place comes a blue field, into which the word has to be written."""

    async def begin(self, page: BrowserPage, task: Mapping[str, Any]) -> str:
        await page.goto(task["url"])
        return "Click on red, then on blue, then write."

    async def progress(self, answer: str | None) -> Progress:
        value = await self.opened().page.evaluate("() => document.querySelector('input')?.value ?? ''")
        return Progress(reward=float(value == "ada"), over=value == "ada")


def centre(pixels: Pixels, colour: tuple[int, int, int]) -> tuple[int, int] | None:
    """The middle of all pixels of a colour, from the left and from the top; None: there are none."""
    found = np.argwhere((pixels == np.array(colour, np.uint8)).all(-1))
    if len(found) < 50:
        return None
    top, left = found.mean(0).round().astype(int).tolist()
    return left, top


class Looking(FakeEngine):
    """Says what a function says that sees the newest picture of the prompt."""

    def __init__(self, pictures: Blobs, says: Callable[[list[Pixels]], str], stop: int) -> None:
        super().__init__(lambda ids, sampling: ())
        self._pictures, self._says, self._stop = pictures, says, stop
        self.seen: list[list[str]] = []

    async def generate(self, request: EngineRequest):
        digests = [span.digest for span in request.prompt.media]
        self.seen.append(digests)
        shown = [np.asarray(decode_picture(self._pictures.get(digest))) for digest in digests]
        ids = (*self._says(shown).encode(), self._stop)
        yield SampledTokens(ids=ids, logprobs=(-1.0,) * len(ids), version=self.version(request.policy))


async def played(folder: Path, environment: Any, says: Callable[[list[Pixels]], str], tasks: list[dict[str, Any]]):
    """Train a step with two episodes a task; returns the trajectories, and what the engine saw."""
    renderer = SeeingRenderer()
    engine = Looking(Blobs(folder / FOLDER), says, renderer.stop_ids[0])

    def built(config: Any, *_: Any) -> Parts:
        runtime = PolicyRuntime(
            name="policy",
            config=config.policies["policy"],
            renderer=renderer,
            engine=engine,
            grammars=Grammars(),
        )
        return Parts(engine=engine, trainer=FakeTrainer(2), policies=one_policy(runtime))

    settings = {
        "run_dir": str(folder),
        "engine": {"kind": "fake"},
        "server": {"port": 0},
        "steps": 1,
        "policies": {"policy": {"max_context": 8192}},
        "rollout": {"group_size": 2, "groups_per_step": len(tasks)},
        "environment": {"max_concurrency": 1},
        "evaluation": {"every_steps": 0},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "build_parts", built)
        async with local_job(parse_config(settings), lambda *_: None, RolloutSpec(environment=environment)) as job:
            store = job.plane.store
            await store.tasks.push("train", [Task(task_id=str(n), data=task) for n, task in enumerate(tasks)], "tasks")
            await store.tasks.seal()
            await asyncio.wait_for(job.run(), 120)
            names = [f"train-{group:06d}-{sample:02d}" for group in range(len(tasks)) for sample in range(2)]
            return await store.calls.trajectories(names), engine.seen


def checked(trajectories: Any, seen: list[list[str]], turns: int) -> None:
    """Each call goes on from the one before, with one screenshot more, and the recorded pictures are those seen."""
    recorded = [[span.digest for span in chat.all_media] for found in trajectories for chat in found.chats]
    assert sorted(recorded) == sorted(seen)
    for found in trajectories:
        assert found.episode.rewards == {"agent": 1.0}
        assert len(found.chats) == turns
        for number, chat in enumerate(found.chats):
            assert chat.fork is None
            assert len(chat.all_media) == number + 1
            if number:
                before = found.chats[number - 1]
                assert chat.parent is before
                assert chat.shared == before.tokens


async def test_a_page_is_found_clicked_and_written_into_by_its_screenshots_alone(tmp_path):
    require("chromium")

    def says(shown: list[Pixels]) -> str:
        if (red := centre(shown[-1], RED)) is not None:
            return f"click_at {red[0]} {red[1]}"
        blue = centre(shown[-1], BLUE)
        assert blue is not None
        if centre(shown[-2], RED) is not None:  # the field is new
            return f"click_at {blue[0]} {blue[1]}"
        return "write ada"

    with site({f"/{n}": PAGE.format(x=x, y=y) for n, (x, y) in enumerate(PLACES)}) as pages:
        tasks = [{"url": f"http://{pages.host}/{n}"} for n in range(len(PLACES))]
        trajectories, seen = await played(
            tmp_path,
            lambda: FindIt(hosts=[pages.host], observation="screenshot", actions="text", size=(240, 200), max_steps=6),
            says,
            tasks,
        )
    checked(trajectories, seen, turns=3)


async def test_a_window_is_filled_in_by_its_screenshots_alone(tmp_path):
    require("Xvfb", "xdotool", "bwrap")
    task = {
        "prompt": "Write Ada into Name. Then press Save.",
        "fields": ["Name"],
        "boxes": [],
        "buttons": ["Save"],
        "expected": {"pressed": "Save", "values": {"Name": "Ada"}},
    }

    def says(shown: list[Pixels]) -> str:
        white = (shown[0] == 255).all(-1)
        widths = white.sum(1)
        field = np.flatnonzero(widths > widths.max() // 2)  # its rows: nothing else is so wide and white
        row = int(field.mean())
        if len(shown) == 1:
            return f"click {int(np.flatnonzero(white[row]).mean())} {row}"
        if len(shown) == 2:
            return "type Ada"
        assert (shown[1] != shown[2]).any(-1).sum() > 20  # the letters
        below = (shown[2] < 100).all(-1)
        below[: field.max() + 5] = False  # what is dark below the field is the button's text
        top, left = np.argwhere(below).mean(0).round().astype(int).tolist()
        return f"click {left} {top}"

    trajectories, seen = await played(
        tmp_path,
        lambda: DesktopEnvironment(observation="screenshot", actions="text", max_steps=6),
        says,
        [task],
    )
    checked(trajectories, seen, turns=3)
