"""The router is the front of the cluster: it serves OpenAI's HTTP API, and plans, dispatches, streams and retries
requests.

`edge` and `api` know HTTP and its formats, `api_document` describes the API to clients, `fetch` fetches media by URL,
`prompt` turns a request into a prompt, `planning` decides where it goes, and `run` carries it through the cluster.
`member_feeds` paces what members send to the router and `arrivals` hands it out, `leaving_members` keeps those that are
being stopped out of plans, `peer_feed` exchanges news of dispatches with other routers, `observe` records what happens,
and `fetch_log` what is fetched for a request. `console` has the page on which people use the API and see what is
recorded. `service` ties these together for one router process, with the settings of `router_config`, and `cost_file`
keeps what it has learned for the next run. The router knows encoders and workers by their messages alone.
"""
