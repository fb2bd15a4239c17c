"""The router is the front of the cluster: it serves OpenAI's HTTP API, and plans, dispatches, streams and retries
requests.

`http` and `api` know the formats, `intake` turns a request into a prompt, `planning` decides, and `service`,
`request_run`, `attempt` and `encode_dispatcher` carry a request through. The router knows encoders and workers by their
messages alone.
"""
