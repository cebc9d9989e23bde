"""A service for a team: accounts, a queue of jobs, machines of a Ray cluster, and the page that shows them."""
