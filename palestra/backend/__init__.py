"""A base server's engine and trainer over a socket: the server's side, and what stands for both in a job's process.

The room loads no torch: the server is given an engine and a trainer, and a job's process has neither.
"""
