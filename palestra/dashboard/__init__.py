"""The page that shows runs: read from their folders, served as JSON and static files.

It never writes. About a running job it only knows its store and `LiveState`.
"""
