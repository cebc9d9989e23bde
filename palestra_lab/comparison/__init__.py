"""`palestra compare`: a grid of runs, one after the other, and the page that says what they show."""
