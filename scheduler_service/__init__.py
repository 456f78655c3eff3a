"""The scheduler: requests, sampling and text; kept without imports so that the SDK stays light."""
