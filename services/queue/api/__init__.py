"""The public job API: servicers, job filters and pages, reads on followers, what-if questions."""
