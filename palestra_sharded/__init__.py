"""A trainer whose weights, gradients and moments are sharded over processes, called ranks, by torch's FSDP2."""
