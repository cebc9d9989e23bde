"""Whether a model that sees learns to look around: it finds a named shape on a canvas, in at most four looks.

    python bench/vision_shapes.py [--runs sees-0 sees-1 sees-2 blindfolded-0] [--steps 20]
    python bench/vision_shapes.py --runs named-0 named-blindfolded-0 [--steps 160]

Each run is `recipes/find_shape.py`: of `sees` the cross is wanted on every canvas, of `named` any of the four shapes
(`--named`). `blindfolded`: every window is black, for the same model, trained as long. Prints a line a run, writes a
part of docs/learning.md for each of the two, and exits with 1 if a run is on the wrong side of its target.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from functools import partial
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
    result = demonstrate(steps, seed, "model", kind.startswith("named"), kind.endswith("blindfolded"))
    result.run_dir.rename(run)
    return result


def chance(named: bool) -> float:
    """Return the most that clicking at the same look, for each wanted shape, can bring on the held-out canvases."""
    places, canvas = defaultdict[str, Counter[int]](Counter), Canvas(named=named)
    for task in held_out():
        canvas.reset(task)
        places[canvas.wanted][canvas.shapes.index(canvas.wanted)] += 1
    return sum(max(looks.values()) for looks in places.values()) / len(held_out())


TRAINED = f"""
{{steps}} steps of {GROUPS} canvases x 8 episodes, GRPO, 4 epochs, a model of Idefics3's architecture with random
weights (0.45 million), tower trained, a learning rate that falls from 1e-3 to 0, a bonus of entropy of
""".strip()
ABOUT = f"""
`recipes/find_shape.py`: {TRAINED} 0.05.
A canvas has four windows with another shape in each. The agent is asked for the cross, sees one window a look, and
clicks on the window or looks at the next one; a click ends the episode, and is worth 1 on the cross. Earlier windows
stay in the conversation. 100 canvases that are not trained on are played greedily. To a model that sees nothing all
canvases are alike: it clicks at the same look in each, and is right in {{chance:.2f}} of them at most.
"""
ABOUT_NAMED = f"""
`recipes/find_shape.py --named`: {TRAINED} 0.1.
All else is as in the part above, but that the shape which is asked for is drawn for each canvas among all four, so that
the model has to learn which word means which shape. A model that reads the word and sees nothing clicks at one look for
each word, and is right in {{chance:.2f}} of the held-out canvases at most.
"""
SAMPLED = "The sampled rewards are those of training, with its randomness."
BLIND = "Blindfolded, the same model is trained as long on black windows."


if __name__ == "__main__":
    sys.exit(
        main(
            Trial(
                script="vision_shapes",
                name="vision_shapes",
                heading="Find the shape: pictures over several turns",
                about=ABOUT,
                measure="clicks on the named shape, 100 fresh canvases",
                steps=20,
                kinds={
                    "sees": Kind(label="sees", about=SAMPLED),
                    "blindfolded": Kind(label="blindfolded", about=BLIND),
                },
                blind="blindfolded",
                runs=[("sees", 0), ("sees", 1), ("sees", 2), ("blindfolded", 0)],
                target=0.8,
                chance=partial(chance, named=False),
                play=play,
            ),
            Trial(
                script="vision_shapes",
                name="vision_named_shapes",
                heading="Find the shape that is named, of four",
                about=ABOUT_NAMED,
                measure="clicks on the named shape, 100 fresh canvases",
                steps=160,
                kinds={
                    "named": Kind(label="named", about=SAMPLED),
                    "named-blindfolded": Kind(label="named, blindfolded", about=BLIND),
                },
                blind="named-blindfolded",
                runs=[("named", 0), ("named", 1), ("named", 2), ("named-blindfolded", 0)],
                target=0.8,
                chance=partial(chance, named=True),
                play=play,
            ),
        )
    )
