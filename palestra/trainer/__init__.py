"""Trainers: master weights and optimizers of policies, gradients of batches, and checkpoints."""
