"""Where everything is wired: a job in one process, training, playing and scoring, and many jobs on a Ray cluster."""
