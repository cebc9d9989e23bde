"""Engines that are servers of other projects: their processes, what is sent to them, and what is believed of it."""
