"""Several inference workers as one engine: placement, replacement, weights for all of them."""
