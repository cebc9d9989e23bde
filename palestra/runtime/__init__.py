"""Wiring: a job in one process, `train` and `evaluate`, and the console."""
