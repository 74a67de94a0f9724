"""How services are reached and served: errors, the server, channels, access and the words of the wire."""

import os

# Read when gRPC's core starts, at the first channel or server. Without it the core writes lines of its own among our
# JSON on stderr when a connection goes or a port is taken, which statuses and exceptions tell anyway.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
