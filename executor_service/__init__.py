"""The executor: weights, paged key/value cache and kernels behind the executor contract."""
