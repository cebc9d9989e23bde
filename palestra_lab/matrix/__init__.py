"""Several models, or versions of one, against one another: every pair plays, and each gets a rating."""
