"""Vision-language models: towers that turn pictures into embeddings, and how these replace token embeddings."""
