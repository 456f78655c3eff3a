"""The Metal kernels (*.metal) and what repacks, launches and feeds them. Imports no GPU library."""
