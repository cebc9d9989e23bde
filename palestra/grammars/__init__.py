"""Grammars that replies have to match.

`pool.Grammars` is what engines, sessions and trainers use. This package imports nothing by itself: the process that
it starts stays small.
"""
