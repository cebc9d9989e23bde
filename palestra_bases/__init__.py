"""One base model in memory for many jobs, each of which trains adapters of it; and the Tinker API on such models."""
