"""Weft on Ray Serve: thin deployments around services that also run without Ray. No policy in here."""
