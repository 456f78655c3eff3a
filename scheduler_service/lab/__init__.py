"""Experiments on executors, step by step: what a kernel policy does to speed and to bits."""
