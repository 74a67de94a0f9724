"""Containers for jobs: the runtime of a node, images and their cache, and the configuration of a container."""
