"""`palestra compare`: a grid of runs, executed one after the other, and the page of their results."""
