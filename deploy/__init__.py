"""Turns a config file into a running cluster, and holds the demo model.

`cli` is the command `weft`, and `commands/` has what its commands do. `config`, with `request_config`,
`scaling_config`, `stages_config` and `workers_config`, defines the config with values of `config_values` and
`adapter_keys`, `config_file` reads it, `models/` brings a model onto a node, `lora_adapters` finds its LoRA adapters
there, `compute_dtype` settles the dtype that it asks for, `sizing/` computes the memory that it takes, `scaling/`
decides how many encoders and workers there are, `feature_memory` says where their features lie, `topology` finds out
what a member runs on, `gpu_devices` which GPUs there are, `network` at which address it is reached, `limit_table` lists
the limits that it sets, `live_config` says what of it may change while a cluster serves, `serve_config` reads it out of
what is submitted to Ray Serve, and `compose` builds each service, with `speech_parts` for those that speak and
`worker_pools` for what sets pools of workers apart; it is the only place where encoders, workers and routers meet.
`ray/` runs the services on Ray Serve, with `supervisor` around it to receive signals; `local` runs them in one process.
`start_phases` says what a start waits for. `ranks` starts the rank processes of a worker, `vllm_worker` builds workers
that run vLLM, `http_server` serves a router's HTTP API, on the parser that `http_protocol` guards by `http_limits`,
`tls` opens its certificate, and `node_metrics` serves what a member and its machine measure. `process_setup` and `logs`
prepare each process, and `printable` escapes what logs and terminals must not obey. `demo/` draws, trains, measures and
asks the demo model, `testing/` has what the tests of a plugin need, and `grafana/` makes the dashboards.

The parts that a cluster consists of do not import this package; tests, load tests and examples do. The package knows
nothing of how a service does its work.
"""
