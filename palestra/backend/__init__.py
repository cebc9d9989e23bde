"""A base server's engine and trainer over a socket: the server's side, and their proxies in a job's process.

The package loads no torch: the server passes in engine and trainer, and a job's process has neither.
"""
