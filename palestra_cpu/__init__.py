"""Compiled kernels for models on a CPU; Palestra finds them by the entry point `palestra.kernels`."""
