"""Models that see: towers that turn pictures into embeddings, and where these stand among the embeddings of tokens."""
