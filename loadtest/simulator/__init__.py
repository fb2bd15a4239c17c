"""Simulates a cluster on a virtual clock, around the code that runs in production: `weft simulate`."""
