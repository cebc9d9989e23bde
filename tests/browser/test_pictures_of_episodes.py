"""Pictures of an episode on the page, in a real browser: their pixels, between the texts that they were sent with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from browser.test_page import visit
from PIL import Image
from unit.vision.seeing import image_processor, processor

from palestra.config import TINY_QWEN_VL, TINY_VISION

pytestmark = pytest.mark.browser

# One episode is enough to look at; the model is random, so that its replies mean nothing.
SEEING = """
import numpy as np
import palestra


class Colors(palestra.Environment):
    max_steps = 2

    def reset(self, task):
        self.turn = 0
        return ["first", square(255, 0, 0, 30), "then", square(0, 0, 255, 50), "last"], {{}}

    def step(self, action):
        self.turn += 1
        return square(0, 255, 0, 20), float(len(action)), self.turn == 2, False, {{}}


def square(red, green, blue, side):
    found = np.full((side, side, 3), (red, green, blue), np.uint8)
    found[side // 3 :, side // 2 :] = 0
    return found


config = palestra.JobConfig(
    name="seeing",
    run_dir={folder!r},
    model={model!r},
    steps=1,
    engine={{"threads": 1}},
    trainer={{"threads": 1}},
    policies={{"policy": {{"max_context": 1024, "sampling": {{"max_tokens": 4}}}}}},
    rollout={{"group_size": 2, "groups_per_step": 1}},
    evaluation={{"every_steps": 0}},
)
palestra.train(environment=Colors, tasks=[{{"n": 0}}], config=config)
"""
# What a message of the page shows, from top to bottom: texts, and width, height and the first pixel of pictures.
SHOWN = """message => [...message.querySelectorAll(':scope > pre, :scope > figure.picture img')].map(part => {
    if (part.tagName === 'PRE') return part.textContent;
    const drawn = Object.assign(document.createElement('canvas'), {width: 1, height: 1}).getContext('2d');
    drawn.drawImage(part, 0, 0);
    return [part.naturalWidth, part.naturalHeight, ...drawn.getImageData(0, 0, 1, 1).data.slice(0, 3)];
})"""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Path:
    """A run whose environment shows pictures."""
    return made(tmp_path_factory.mktemp("seeing") / "seeing", TINY_VISION)


def made(folder: Path, model: str) -> Path:
    script = SEEING.format(folder=str(folder), model=model)
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    return folder


def test_pictures_are_drawn_between_the_texts_beside_which_they_were_sent(seeing, dashboard, open_page):
    link, _ = dashboard(seeing)
    page = open_page(link, height=2000)
    visit(page, "#/run/seeing/episode/train-000000-00")
    page.wait_for_function(
        "() => { const all = [...document.querySelectorAll('img.picture')];"
        " return all.length === 3 && all.every(one => one.naturalWidth > 0) }"
    )
    first, second = page.locator(".message.user").all()
    assert first.evaluate(SHOWN) == ["first", [30, 30, 255, 0, 0], "then", [50, 50, 0, 0, 255], "last"]
    assert second.evaluate(SHOWN) == [[20, 20, 0, 255, 0]]
    page.wait_for_selector("figure.picture figcaption:has-text('50 × 50 pixels')")


def test_a_picture_whose_file_is_gone_is_named_and_the_rest_is_shown(seeing, dashboard, open_page):
    (gone,) = (path for path in (seeing / "pictures").glob("??/*") if png_width(path) == 30)
    kept = gone.read_bytes()
    gone.unlink()
    try:
        link, _ = dashboard(seeing)
        page = open_page(link, height=2000)
        visit(page, "#/run/seeing/episode/train-000000-00")
        page.wait_for_selector(f"figcaption:has-text('{gone.name[:12]}…: ')")
        page.wait_for_function("() => document.querySelectorAll('img.picture').length === 2")
    finally:
        gone.write_bytes(kept)


def png_width(path: Path) -> int:
    """Return the width of a PNG, as its header says."""
    return int.from_bytes(path.read_bytes()[16:20], "big")


# Rows and columns of the drawn grid, size and all pixels of a picture as the model got it.
SEEN = """place => {
    const picture = place.querySelector('img');
    const size = {width: picture.naturalWidth, height: picture.naturalHeight};
    const drawn = Object.assign(document.createElement('canvas'), size);
    const context = drawn.getContext('2d');
    context.drawImage(picture, 0, 0);
    const data = context.getImageData(0, 0, drawn.width, drawn.height).data;
    return [place.querySelectorAll('i.across').length + 1, place.querySelectorAll('i.down').length + 1,
            drawn.width, drawn.height, [...data].filter((_, n) => n % 4 !== 3)];
}"""


def test_the_pixels_that_the_model_got_are_shown_with_the_grid_of_its_tiles(seeing, dashboard, open_page):
    cells, words, seen = first_seen(seeing, dashboard, open_page)
    assert (cells, words) == ([2, 2], "as 2 × 2 tiles of 32 × 32 pixels, and the whole in one")
    (tiles,) = processor().image_processor(images=[[red(seeing)]], return_tensors="np")["pixel_values"]
    got = np.rint((tiles * 0.5 + 0.5) * 255).astype(np.uint8).transpose(0, 2, 3, 1)
    assert seen.shape == (64, 64, 3)
    for number, tile in enumerate(got[:-1]):  # the last is the whole
        top, left = 32 * (number // 2), 32 * (number % 2)
        assert np.array_equal(seen[top : top + 32, left : left + 32], tile)


def test_the_pixels_that_a_model_without_tiles_got_are_shown_with_the_grid_of_its_embeddings(
    tmp_path, dashboard, open_page
):
    run = made(tmp_path / "seeing", TINY_QWEN_VL)
    (rows, columns), words, seen = first_seen(run, dashboard, open_page)
    theirs = image_processor(TINY_QWEN_VL)
    found = theirs(images=red(run), return_tensors="np")
    patch, merged = theirs.patch_size, theirs.merge_size
    side = patch * merged
    assert found["image_grid_thw"][0].tolist() == [1, merged * rows, merged * columns]
    assert words == (
        f"as {columns * side} × {rows * side} pixels, in {rows} × {columns} squares of {side} × {side} with an "
        "embedding each"
    )
    # The first patch of the tower is the corner of the first square, [channels, frames, patch, patch].
    pixels = found["pixel_values"][0].reshape(3, -1, patch, patch)[:, 0].transpose(1, 2, 0)
    wanted = np.rint((pixels * np.array(theirs.image_std) + np.array(theirs.image_mean)) * 255).astype(np.uint8)
    assert seen.shape == (rows * side, columns * side, 3)
    assert np.array_equal(seen[:patch, :patch], wanted)


def first_seen(run: Path, dashboard, open_page) -> tuple[list[int], str, np.ndarray]:
    """Return the grid of the first picture as the page shows what the model got of it, the words, and its pixels."""
    link, _ = dashboard(run)
    page = open_page(link, height=2000)
    visit(page, "#/run/seeing/episode/train-000000-00")
    page.wait_for_function("() => document.querySelectorAll('details.seen').length === 3")
    first = page.locator("details.seen").first
    first.locator("summary").click()
    page.wait_for_function(
        "() => { const one = document.querySelector('div.cutpicture img'); return one && one.naturalWidth > 0 }"
    )
    rows, columns, width, height, pixels = first.locator("div.cutpicture").evaluate(SEEN)
    seen = np.array(pixels, np.uint8).reshape(height, width, 3)
    return [rows, columns], first.locator("p").text_content(), seen


def red(run: Path) -> Image.Image:
    """Return the first picture of the episode."""
    (path,) = (path for path in (run / "pictures").glob("??/*") if png_width(path) == 30)
    with Image.open(path) as image:
        return image.convert("RGB")
