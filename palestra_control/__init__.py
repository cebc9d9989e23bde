"""The client of a service (`palestra serve`): submits jobs, follows them, and finds their servers."""
