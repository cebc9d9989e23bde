"""Commands of base servers."""
