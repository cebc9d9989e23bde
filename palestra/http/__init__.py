"""HTTP basics of both servers, that of a job and that of the control plane: connections, bodies, errors, events.

Nothing here knows what a job, an episode or a tenant is.
"""
