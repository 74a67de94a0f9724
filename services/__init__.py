"""One folder per process of the control plane; they meet only on the wire."""
