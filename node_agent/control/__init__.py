"""The agent's control loop: streams to the control plane, attempts, health, progress and samples."""
