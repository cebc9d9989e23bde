"""Master weights, gradients and checkpoints."""
