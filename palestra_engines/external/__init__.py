"""Engines that are servers of other projects: their processes, requests, and validation of their answers."""
