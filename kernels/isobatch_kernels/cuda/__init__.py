"""Kernels of numeric class X1 for NVIDIA GPUs, run through `mx.fast.cuda_kernel`."""
