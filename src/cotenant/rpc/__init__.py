"""How services are reached and served: the server, channels, connections and access."""

import os

# Read when gRPC's core starts, at the first channel or server. Without it the core writes lines of its own among our
# JSON on stderr when a connection is lost or a port is taken; statuses and exceptions report these anyway.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
