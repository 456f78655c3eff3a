"""Traces of requests: recorded while they run, compared and explained afterwards."""
