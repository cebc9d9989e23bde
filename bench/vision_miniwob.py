"""Whether a model that sees learns to act on a web page by its pixels: MiniWoB's page click-test, by screenshot.

    python bench/vision_miniwob.py [--runs sees-0 sees-1 sees-2 blindfolded-0] [--steps 48]

Each run is `recipes/click_by_sight.py`. `blindfolded`: every page is black, for the same model, trained as long. Prints
a line a run, writes a part of docs/learning.md, and exits with 1 if a run is on the wrong side of its target. Needs
Chromium, playwright and MiniWoB's pages.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from learning import ROOT
from sight import Kind, Trial, main

import palestra
from palestra.models.vision.tiny import TILE, make_tiny_vision

sys.path.insert(0, str(ROOT))
from recipes.click_by_sight import CELLS, GROUPS, Screen, demonstrate, held_out

_PLACE = """(() => {
  const { left, top, right, bottom } = document.querySelector("#area button").getBoundingClientRect();
  return [left, top, right, bottom];
})()"""


def play(kind: str, seed: int, steps: int, run: Path) -> palestra.TrainResult:
    """Run the recipe in the folder above `run`, where it makes its own."""
    os.chdir(run.parent)
    make_tiny_vision(Path("model"), width=128, longest=TILE, splits=False)
    result = demonstrate(steps, seed, "model", blindfolded=kind == "blindfolded")
    result.run_dir.rename(run)
    return result


def chance() -> float:
    """Return the most that naming the same cell on every held-out page can bring."""
    return asyncio.run(_best_cell())


async def _best_cell() -> float:
    hits = dict.fromkeys(CELLS, 0)
    screen = Screen()
    await screen.setup()
    try:
        for task in held_out():
            await screen.reset(task)
            left, top, right, bottom = await screen.opened().evaluate(_PLACE)
            for cell, (x, y) in CELLS.items():
                hits[cell] += left <= x < right and top <= y < bottom
    finally:
        await screen.close()
    return max(hits.values()) / len(held_out())


ABOUT = f"""
`recipes/click_by_sight.py`: {{steps}} steps of {GROUPS} problems x 8 episodes, GRPO, 4 epochs, a bonus of entropy of
0.1, a model of Idefics3's architecture with random weights (0.45 million), tower trained, a learning rate that falls
from 1e-3 to 0. The page, in headless Chromium, has a button somewhere, 35 to 100 pixels wide and high. The model gets a
screenshot of 160 x 160 pixels in black and white, which its processor makes 32 x 32 pixels, and names one of sixteen
cells; the mouse clicks in its middle, which is worth 1 on the button. {len(held_out())} problems that are not trained
on are played greedily. To a model that sees nothing all pages are alike: it names the same cell on each, and is right
on {{chance:.2f}} of them at most.
"""


if __name__ == "__main__":
    sys.exit(
        main(
            Trial(
                script="vision_miniwob",
                name="vision_miniwob",
                heading="Click on a web page by its pixels",
                about=ABOUT,
                measure="clicks on the button, 64 fresh pages",
                steps=48,
                kinds={
                    "sees": Kind(label="sees", about="The sampled rewards are those of training, with its randomness."),
                    "blindfolded": Kind(
                        label="blindfolded", about="Blindfolded, the same model is trained as long on black pages."
                    ),
                },
                blind="blindfolded",
                runs=[("sees", 0), ("sees", 1), ("sees", 2), ("blindfolded", 0)],
                target=0.8,
                chance=chance,
                play=play,
            )
        )
    )
