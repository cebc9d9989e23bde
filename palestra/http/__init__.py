"""HTTP basics of both servers, that of a job and that of the control plane: connections, bodies, errors, events.

No module here knows jobs, episodes or tenants.
"""
