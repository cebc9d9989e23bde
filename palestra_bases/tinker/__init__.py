"""Serves the Tinker API: hand-written training loops, with adapters created on request.

`TinkerService` is the core for one process: models and samplers over a `Trainer` and an `Engine`, futures, and a
journal on disk from which everything is restored after a kill. `routes` is its HTTP interface.
"""
