"""The executor: model weights, KV cache and kernels behind one gRPC service."""
