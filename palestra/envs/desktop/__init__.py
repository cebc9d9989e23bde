"""Environments on a desktop: a window on a screen of its own, acted on by mouse and keyboard."""

from palestra.envs.desktop.environment import DesktopEnvironment
from palestra.envs.desktop.tasks import desktop_tasks

__all__ = ["DesktopEnvironment", "desktop_tasks"]
