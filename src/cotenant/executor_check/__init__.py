"""The transcript that an executor is held to: a scripted placement on the real wire, and the laws of the contract."""
