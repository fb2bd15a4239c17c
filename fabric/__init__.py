"""Holds contracts and transport: what every part of Weft shares, and nothing of what any single part does.

The contracts are `ids`, `messages`, `errors`, `digest` and `clock`. The transport is `arena`, `channel` (features) and
`plane` (messages). `sandbox` runs code on a client's bytes in a process that may be killed. The package knows nothing
of models, of the meaning of requests, of Ray or of HTTP.
"""
