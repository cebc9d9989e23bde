"""Environments in a browser: web pages that an agent reads and acts on, and the tasks of MiniWoB++."""

from palestra_screens.browser.environment import BrowserEnvironment
from palestra_screens.browser.miniwob import MiniWoB

__all__ = ["BrowserEnvironment", "MiniWoB"]
