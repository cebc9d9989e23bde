"""Weights of models and the forward pass, which the engine and the trainer share so that both round alike."""
