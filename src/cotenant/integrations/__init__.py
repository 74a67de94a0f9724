"""Callbacks that tell the scheduler how far a training has come: one for each framework, imported only when asked for.

`cotenant.integrations.lightning`, `.keras` and `.huggingface` each have a `ProgressCallback`. Outside of Cotenant they
do nothing. They never break a training: what goes wrong in them is warned of once. They do not slow it: steps are told
ten times a second at most, and a loss is fetched from its device, which waits for it, at most once a second.
"""
