"""Reports of comparisons: one HTML file that needs nothing else. Needs the extra `research`."""
