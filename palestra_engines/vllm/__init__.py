"""vLLM as an engine: a server of its own, in an environment of its own."""
