"""Programs that the checks run as jobs: training, a service, hogs of memory bandwidth, and holders of a GPU."""
