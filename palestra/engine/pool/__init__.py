"""Several inference workers as one engine: `InferenceManager` places requests, replaces workers and hands out weights."""
