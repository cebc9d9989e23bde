"""Whether a model that sees learns to look around: it finds a named shape on a canvas, in at most four looks.

    python bench/vision_shapes.py [--runs sees-0 sees-1 sees-2 blindfolded-0] [--steps 20]

Each run is `recipes/find_shape.py`. `blindfolded`: every window is black, for the same model, trained as long. Prints a
line a run, writes a part of docs/learning.md, and exits with 1 if a run is on the wrong side of its target.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

from learning import ROOT
from sight import Kind, Trial, main

import palestra
from palestra.models.vision.tiny import TILE, make_tiny_vision

sys.path.insert(0, str(ROOT))
from recipes.find_shape import GROUPS, Canvas, demonstrate, held_out


def play(kind: str, seed: int, steps: int, run: Path) -> palestra.TrainResult:
    """Run the recipe in the folder above `run`, where it makes its own."""
    os.chdir(run.parent)
    make_tiny_vision(Path("model"), width=128, longest=TILE, splits=False)
    result = demonstrate(steps, seed, "model", blindfolded=kind == "blindfolded")
    result.run_dir.rename(run)
    return result


def chance() -> float:
    """Return the most that clicking at the same look in every held-out canvas can bring."""
    places, canvas = Counter[int](), Canvas()
    for task in held_out():
        canvas.reset(task)
        places[canvas.shapes.index(canvas.wanted)] += 1
    return max(places.values()) / places.total()


ABOUT = f"""
`recipes/find_shape.py`: {{steps}} steps of {GROUPS} canvases x 8 episodes, GRPO, 4 epochs, a bonus of entropy of 0.05,
a model of Idefics3's architecture with random weights (0.45 million), tower trained, a learning rate that falls from
1e-3 to 0. A canvas has four windows with another shape in each. The agent is asked for the cross, sees one window a
look, and clicks on the window or looks at the next one; a click ends the episode, and is worth 1 on the cross. Earlier
windows stay in the conversation. 100 canvases that are not trained on are played greedily. To a model that sees
nothing all canvases are alike: it clicks at the same look in each, and is right in {{chance:.2f}} of them at most.
"""


if __name__ == "__main__":
    sys.exit(
        main(
            Trial(
                script="vision_shapes",
                heading="Find the shape: pictures over several turns",
                about=ABOUT,
                measure="clicks on the named shape, 100 fresh canvases",
                steps=20,
                kinds={
                    "sees": Kind(label="sees", about="The sampled rewards are those of training, with its randomness."),
                    "blindfolded": Kind(
                        label="blindfolded", about="Blindfolded, the same model is trained as long on black windows."
                    ),
                },
                blind="blindfolded",
                runs=[("sees", 0), ("sees", 1), ("sees", 2), ("blindfolded", 0)],
                target=0.8,
                chance=chance(),
                play=play,
            )
        )
    )
