"""Decides which job starts where: pure functions of queue, running jobs, machines, quotas and time."""
