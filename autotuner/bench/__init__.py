"""The benchmark: workloads and figures are pure, the client and its worker process drive the load."""
