"""Grammars that constrain replies.

Engines, sessions and trainers use `pool.Grammars`. This package imports nothing by itself, so that its child process
stays small.
"""
