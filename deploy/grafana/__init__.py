"""Makes the dashboards for Grafana: `python -m deploy.grafana.write_boards` writes them as JSON beside this file.

`panels` turns a description of a panel or a board into Grafana's own form, with the variables that all boards have, and
`queries` writes the expressions that many panels have in common.
`cluster_boards` describes the boards of the cluster and its requests, `member_boards` those of encoders, workers and
transfers, and `speech_board` that of speech. `write_boards` writes the files, which are
committed, because Kubernetes and operators need no Python to load them.

The package needs grafana-foundation-sdk, which is an extra for development. The product does not import it.
"""

from deploy.grafana.cluster_boards import OVERVIEW, ROUTER
from deploy.grafana.member_boards import ENCODERS, TRANSFERS, WORKERS
from deploy.grafana.panels import Board, BoardRow, Panel, Query, board_json
from deploy.grafana.speech_board import SPEECH

BOARDS = (OVERVIEW, ENCODERS, WORKERS, ROUTER, TRANSFERS, SPEECH)
"""Lists all dashboards."""

__all__ = [
    "BOARDS",
    "Board",
    "BoardRow",
    "Panel",
    "Query",
    "board_json",
]
