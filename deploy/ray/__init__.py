"""Runs Weft on Ray Serve: it contains thin deployments around services that also run without Ray, and makes no
decisions.

`runtime` starts Ray and Serve for `weft serve` and stops them, and `removal` removes what an earlier cluster left on a
Ray that goes on running. `joining` joins such a Ray and says why that fails. `nodes` looks whether the nodes of a Ray
can hold a cluster. `serve_app` defines the deployments of encoders, workers and routers, `stage_replica` those of the
stages that speak, and `replica_parts` what all of them do alike; `application` builds them from data, for a Ray to
which applications are submitted. `directory` tells the members of a cluster about each other. `start_watch` says what a
cluster that starts waits for. `ray_pools` calls one named replica through Serve, `replica_news` tells routers which
replicas are being stopped, and `serve_scaling` scales the encoders and workers.

`weft serve` and the load tests run a cluster through `runtime`. A cluster in one process (`deploy/local.py`) does not
use this folder and needs no Ray. The folder knows nothing of how a service does its work.
"""
