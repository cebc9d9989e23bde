"""What turns rewards into a gradient: an algorithm gives advantages and names a loss; both are pure functions."""
