"""The Python API: submit, follow and find jobs, run functions as jobs, simulate; `import cotenant` names it."""
