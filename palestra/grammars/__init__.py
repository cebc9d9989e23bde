"""Grammars that replies have to match, compiled and walked in processes of their own, within bounds.

`pool.Grammars` is what engines, sessions and trainers use. This package imports nothing by itself: the processes that
it starts stay small.
"""
