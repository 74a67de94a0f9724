"""What the kernel enforces: cores, devices, bandwidth and throttling."""
