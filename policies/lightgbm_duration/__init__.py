"""Run times learned from finished jobs with LightGBM."""
