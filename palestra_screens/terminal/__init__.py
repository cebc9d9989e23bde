"""Environments in a terminal: a shell in a sandbox, and tasks scored by the files left in it."""

from palestra_screens.terminal.environment import TerminalEnvironment
from palestra_screens.terminal.tasks import terminal_tasks

__all__ = ["TerminalEnvironment", "terminal_tasks"]
