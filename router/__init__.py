"""The front of the cluster: OpenAI's HTTP API, planning, dispatch, streaming, retry.

`http` and `api` know the formats, `intake` turns a request into a prompt, `planning` decides, `service`, `flight`,
`attempt` and `supply` carry a request through. Knows encoders and workers by their messages alone.
"""
