"""Environments on a desktop: a window on a screen of its own, acted on by mouse and keyboard."""

from palestra_screens.desktop.environment import DesktopEnvironment, desktop_tasks

__all__ = ["DesktopEnvironment", "desktop_tasks"]
