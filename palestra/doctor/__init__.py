"""Signs that a run goes wrong although its steps succeed: rules over its metrics, and the findings of a whole run.

The same rules make the warnings of a running job and the findings of `palestra doctor`.
"""
