"""What the kernel enforces, one hook per concern: cores, memory, CPU time, processes, GPUs and bandwidth."""
