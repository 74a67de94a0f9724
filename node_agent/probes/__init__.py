"""What the node is made of and how it fares: CPUs, GPUs, memory bandwidth, pressure."""
