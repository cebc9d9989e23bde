"""Inspects jobs, runs and code of users: checks before a run, and commands that show what a run did."""
