"""A program with one window, made of a description: fields, boxes to tick, and buttons. Runs in a process of its own.

Its argument is the description as JSON. For each line of its input the program writes one line of JSON: what is in its
window, which button was pressed first, and what the fields held at that moment. It imports nothing of Palestra, so that
it starts quickly.
"""

from __future__ import annotations

import json
import os
import sys
import tkinter
from functools import partial
from typing import Any


def main() -> None:
    """Show the window, and answer until the input ends."""
    description: dict[str, Any] = json.loads(sys.argv[1])
    root = tkinter.Tk()
    root.geometry(f"{description['width']}x{description['height']}+0+0")
    widgets: list[tuple[str, str, tkinter.Widget, Any]] = []
    result: dict[str, Any] = {"pressed": None, "values": {}}

    def values() -> dict[str, Any]:
        return {name: variable.get() for _, name, _, variable in widgets if variable is not None}

    def press(name: str) -> None:
        if result["pressed"] is None:
            result.update(pressed=name, values=values())

    for row, name in enumerate(description["fields"]):
        text = tkinter.StringVar(root)
        tkinter.Label(root, text=name).grid(row=row, column=0, sticky="w")
        entry = tkinter.Entry(root, textvariable=text, width=18)
        entry.grid(row=row, column=1)
        widgets.append(("field", name, entry, text))
    for row, name in enumerate(description["boxes"], len(description["fields"])):
        ticked = tkinter.BooleanVar(root)
        box = tkinter.Checkbutton(root, text=name, variable=ticked)
        box.grid(row=row, column=0, columnspan=2, sticky="w")
        widgets.append(("box", name, box, ticked))
    bar = tkinter.Frame(root)
    bar.grid(row=99, column=0, columnspan=2, sticky="w")
    for name in description["buttons"]:
        button = tkinter.Button(bar, text=name, command=partial(press, name))
        button.pack(side="left")
        widgets.append(("button", name, button, None))

    def answer(*_: object) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            root.destroy()
            return
        root.winfo_pointerxy()  # a question to the screen, whose answer comes after all events that came before
        root.update()
        shown = [
            {
                "kind": kind,
                "name": name,
                "value": None if variable is None else variable.get(),
                "x": widget.winfo_rootx() + widget.winfo_width() // 2,
                "y": widget.winfo_rooty() + widget.winfo_height() // 2,
            }
            for kind, name, widget, variable in widgets
        ]
        sys.stdout.write(json.dumps({"widgets": shown, **result}) + "\n")
        sys.stdout.flush()

    root.update()
    root.tk.createfilehandler(sys.stdin, tkinter.READABLE, answer)
    root.mainloop()


if __name__ == "__main__":
    main()
