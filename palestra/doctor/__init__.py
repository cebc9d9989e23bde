"""Signs of problems in a run whose steps succeed: rules over its metrics, and the findings of a whole run.

The same rules give the warnings of a running job and the findings of `palestra doctor`.
"""
