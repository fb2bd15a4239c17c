"""Runs Weft on Ray Serve: it contains thin deployments around services that also run without Ray, and makes no
decisions."""
