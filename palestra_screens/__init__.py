"""Environments in which a model acts through programs of the machine: a browser, a desktop, a terminal."""

from palestra_screens.browser import BrowserEnvironment, MiniWoB
from palestra_screens.desktop import DesktopEnvironment
from palestra_screens.terminal import TerminalEnvironment

__all__ = ["BrowserEnvironment", "DesktopEnvironment", "MiniWoB", "TerminalEnvironment"]
