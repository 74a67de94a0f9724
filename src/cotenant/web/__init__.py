"""The dashboard: pages about jobs, nodes and the mesh, and what their readers may do there.

It is a client of the public API. It calls as the user of the session, so that roles and tenants are the API's.
"""
