"""SGLang as an engine: a server that runs already."""
