"""The page that shows runs: read from their folders, served as JSON and as files of the package.

It writes nothing, and knows of a running job only what its store has and what `LiveState` says.
"""
