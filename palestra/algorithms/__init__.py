"""Algorithms: each turns rewards into advantages and names a loss. Both steps are pure functions."""
