"""The paged key/value cache's book-keeping: which block belongs to whom."""
