"""Serves the Tinker API: training loops that are written by hand, with adapters that are made as they are asked for.

`TinkerService` is the whole of it for one process: models and samplers over a `Trainer` and an `Engine`, futures, and a
journal on the disk from which everything is restored after a kill. `routes` is its HTTP.
"""
