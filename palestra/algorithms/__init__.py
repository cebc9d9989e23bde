"""What turns rewards into a gradient. An algorithm is pure functions; the trainer never asks for its name."""
