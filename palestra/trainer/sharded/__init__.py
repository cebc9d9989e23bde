"""A trainer whose weights, gradients and moments are shared out over processes, called ranks: FSDP2 of torch."""
