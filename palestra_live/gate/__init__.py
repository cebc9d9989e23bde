"""The gate: a new version of a live policy serves everyone only after it has won its comparison, and goes back."""
