"""Reports of comparisons: one self-contained HTML file. Needs the extra `research`."""
