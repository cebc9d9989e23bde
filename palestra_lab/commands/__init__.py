"""Commands of comparisons and matrices."""
