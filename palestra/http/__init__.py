"""HTTP basics of both servers, a job's and the control plane's: connections, bodies, errors, events.

Modules here do not know jobs, episodes or tenants.
"""
