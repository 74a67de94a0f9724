"""The public job API: the servicer, what callers may see, explanations and what-if questions."""
