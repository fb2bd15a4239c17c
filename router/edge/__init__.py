"""Holds the HTTP edge of a router: one ASGI app around the router service.

`app` has the routes, which `route_table` finds, and the handlers, and `access` asks for an API key before all of them.
`cross_site` refuses what pages of other sites have a browser send. `endpoints` describes the endpoints that generate,
`answers`, `responses_adapter`, `transcript_answer` and `spoken_answer` write what they answer (`scored_pieces` knows
the tokens of their text), `event_stream` sends it while it is made and `whole_answer` once it is complete (both through
a `paced_writer`), and `tickets` holds the places that an exchange has among the requests in flight. `cluster_routes`
answers what operators ask about the cluster (with the short answers of `plain_answers`), `document_routes` serves the
OpenAPI document and its page, and `console_routes` the console. `request_pages` writes the pages on which people read
the records of requests, and `connection` handles the client's end of an exchange: it reads the body, notices when the
client leaves, and writes the access log.
`deploy` serves the app that `create_app` returns. The folder knows nothing of encoders, plans or attempts; it calls the
service, and takes the formats from `router.api`.
"""

from router.edge.app import create_api, create_app

__all__ = [
    "create_api",
    "create_app",
]
