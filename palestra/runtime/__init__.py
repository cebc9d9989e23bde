"""Wiring: a job in one process, `train` and `evaluate`, the console, and many jobs on a Ray cluster."""
