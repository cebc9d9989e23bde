"""The embedded engine: continuous batching over transformers models in a thread of this process."""
