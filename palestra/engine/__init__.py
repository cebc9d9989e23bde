"""Engines: they sample the tokens of replies from the newest weights of each policy."""
