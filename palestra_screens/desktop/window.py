"""A program with one window: fields, boxes to tick, and buttons. Runs in a sandbox with its screen.

Its first argument is a description of the window as JSON, its second the descriptor of its answers. It starts the
screen, Xvfb, which draws into a file of the working folder. For each line of its input, a JSON object, it writes one
line of JSON:

{}: the window's contents, which button was pressed first, and the fields at that moment. {"xdotool": [arguments],
"seconds": limit}: the exit code of xdotool, or null, and its output. {"picture": true}: the screen as an X window dump,
in base64.

It imports nothing of Palestra, which is missing in the sandbox.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tkinter
from functools import partial
from typing import Any


def _main() -> None:
    """Show the window, and answer until the input ends."""
    description: dict[str, Any] = json.loads(sys.argv[1])
    width, height = description["size"]
    os.environ["DISPLAY"] = f":{_start_screen(width, height)}"
    answers = open(int(sys.argv[2]), "w", encoding="utf-8")  # noqa: SIM115 - open as long as the program
    root = tkinter.Tk()
    root.geometry(f"{width}x{height}+0+0")
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
        line = sys.stdin.readline()
        if not line:
            root.destroy()
            return
        request: dict[str, Any] = json.loads(line)
        if "xdotool" in request:
            found = _xdotool(request["xdotool"], request["seconds"])
        elif "picture" in request:
            with open("Xvfb_screen0", "rb") as picture:
                found = {"picture": base64.b64encode(picture.read()).decode()}
        else:
            found = state()
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    def state() -> dict[str, Any]:
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
        return {"widgets": shown, **result}

    root.update()
    root.tk.createfilehandler(sys.stdin, tkinter.READABLE, answer)
    root.mainloop()


def _start_screen(width: int, height: int) -> str:
    """Start Xvfb, which ends with the sandbox, and return the number of its display."""
    reading, writing = os.pipe()
    screen = ("-screen", "0", f"{width}x{height}x24", "-fbdir", ".", "-nolisten", "tcp")
    subprocess.Popen(["Xvfb", "-displayfd", str(writing), *screen], pass_fds=[writing])
    os.close(writing)
    with open(reading, encoding="utf-8") as number:
        return number.readline().strip()


def _xdotool(arguments: list[str], seconds: float) -> dict[str, Any]:
    """Run xdotool; return its exit code, or None after a timeout, and its output."""
    try:
        done = subprocess.run(["xdotool", *arguments], capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"code": None, "said": ""}
    return {"code": done.returncode, "said": done.stderr[:500]}


if __name__ == "__main__":
    _main()
