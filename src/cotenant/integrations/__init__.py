"""Callbacks that report training progress to the scheduler: one per framework, imported only on request.

`cotenant.integrations.lightning`, `.keras` and `.huggingface` each have a `ProgressCallback`. Outside of Cotenant they
do nothing. They never break a training: errors in them cause a single warning. They do not slow it down: steps are
reported at most ten times a second, and a loss is fetched from its device, which blocks, at most once a second.
"""
