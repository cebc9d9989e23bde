"""Where everything is wired: one process (`local`); later a Ray cluster."""
