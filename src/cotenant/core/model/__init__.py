"""The domain: jobs, nodes, gangs, resources, estimates, refusals and life cycles."""
