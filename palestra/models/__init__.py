"""Weights and the forward pass, shared by inference and training."""
