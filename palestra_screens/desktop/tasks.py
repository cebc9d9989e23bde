"""Tasks for a window, drawn from a seed: fill in fields, tick boxes, press a button."""

from __future__ import annotations

import random
from typing import Any

from palestra.envs.task_splits import Split, draw_tasks

_FIELDS = ("Name", "City", "Street", "Phone", "Colour", "Date")
_BOXES = ("Urgent", "Gift", "Copy", "Private")
_BUTTONS = ("Save", "Send", "Cancel", "Delete", "Later")
_TEXTS = ("Ada", "Oslo", "Elm 4", "5550", "blue", "May 7", "Kim", "Lima", "Main 12", "1234", "green", "June 1")


def desktop_tasks(split: Split, count: int, seed: int) -> list[dict[str, Any]]:
    """Draw windows with instructions. The splits share no seed.

    Keys: `id`, `prompt`, `fields`, `boxes`, `buttons` (the window's parts) and `expected` (the button to press, and the
    window's contents then).
    """
    return draw_tasks(split, count, seed, _draw)


def _draw(outer: random.Random) -> dict[str, Any]:
    number = outer.randrange(2**31)
    source = random.Random(number)
    fields, boxes = source.sample(_FIELDS, 2), source.sample(_BOXES, 1)
    buttons = source.sample(_BUTTONS, 3)
    name, text, button = source.choice(fields), source.choice(_TEXTS), source.choice(buttons)
    ticked = source.random() < 0.5
    tick = f" Tick {boxes[0]}." if ticked else ""
    values = {**dict.fromkeys(fields, ""), **dict.fromkeys(boxes, ticked), name: text}
    return {
        "id": f"window-{number}",
        "prompt": f"Write {text} into {name}.{tick} Then press {button}.",
        **{"fields": fields, "boxes": boxes, "buttons": buttons},
        "expected": {"pressed": button, "values": values},
    }
