"""How services are reached and served: errors, the server, channels, access and the words of the wire."""
