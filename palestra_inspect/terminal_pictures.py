"""A run's pictures in a terminal."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.control import Control
from rich.segment import ControlType, Segment
from rich.style import Style
from rich.text import Text

from palestra.errors import NotFound, PalestraError
from palestra.pictures.blobs import Blobs
from palestra.pictures.containers import OF_A_RUN
from palestra.pictures.pixels import decode_picture, encode_picture
from palestra.renderers.picture_layout import PictureLayout, apart

if TYPE_CHECKING:
    from PIL.Image import Image

Protocol = Literal["kitty", "iterm"]
_CHUNK = 4096  # characters of base64 in one of kitty's commands


def protocol_of(environment: Mapping[str, str]) -> Protocol | None:
    """Return the terminal's picture protocol, from environment variables, or None.

    tmux and screen only pass pictures on if configured to, so there is none inside them.
    """
    term, program = environment.get("TERM", ""), environment.get("TERM_PROGRAM", "")
    if "TMUX" in environment or term.startswith(("screen", "tmux")):
        return None
    if "kitty" in term or "KITTY_WINDOW_ID" in environment or program == "ghostty":
        return "kitty"
    if program in {"iTerm.app", "WezTerm"} or environment.get("LC_TERMINAL") == "iTerm2":
        return "iterm"
    return None


@dataclass(frozen=True)
class TerminalPicture:
    """A run's picture as a line with a link to its file, and the picture below if the terminal supports it.

    It has exactly the pixels that the model got, with gaps between tiles or embedding squares, if the run has recorded
    the model's image settings; otherwise it is the decoded picture.
    """

    pictures: Blobs
    digest: str
    protocol: Protocol | None
    layout: PictureLayout | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the line, and the picture as a control segment, which is omitted for files and pipes."""
        try:
            image = decode_picture(self.pictures.get(self.digest), OF_A_RUN)
            shown, got = self._shown(image)
        except NotFound:
            yield Text(f"[picture {self.digest}, whose file is gone]", style="red")
            return
        except PalestraError as error:
            yield Text(f"[picture {self.digest}: {error}]", style="red")
            return
        path = self.pictures.path(self.digest).absolute()
        link = Style(link=path.as_uri(), underline=True)
        yield Text(f"[picture {image.width} × {image.height}{got}: {path}]", style=link)
        if self.protocol is not None and console.is_terminal:
            commands = "".join(_commands(self.protocol, encode_picture(shown)))
            yield Segment(f"{commands}\n", None, Control((ControlType.CARRIAGE_RETURN,)).segment.control)

    def _shown(self, image: Image) -> tuple[Image, str]:
        """Return the pixels to show, and a description of how the model got them."""
        if (layout := self.layout) is None:
            return image, ""
        return apart(layout.seen(image), layout.cells(*image.size)), f", {layout.in_words(*image.size)}"


def _commands(protocol: Protocol, png: bytes) -> Iterator[str]:
    """Yield escape sequences that show a picture at the cursor."""
    encoded = base64.b64encode(png).decode()
    if protocol == "iterm":
        yield f"\x1b]1337;File=inline=1;size={len(png)}:{encoded}\x07"
        return
    pieces = [encoded[start : start + _CHUNK] for start in range(0, len(encoded), _CHUNK)]
    for number, piece in enumerate(pieces):
        head = "a=T,f=100," if number == 0 else ""
        yield f"\x1b_G{head}m={int(number < len(pieces) - 1)};{piece}\x1b\\"
