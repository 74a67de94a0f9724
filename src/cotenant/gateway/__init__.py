"""The gateway: the public API as JSON over HTTP, as a client of the mesh that passes its callers' tokens on."""
