"""Holds the commands of `weft`: what each prints, asks and starts.

`command_line` defines commands and options, with the parser of `weft_parser`, which says what a misspelled word may
mean. It imports a command's module when the command runs, so that `weft version` takes no second.

    serve_cluster      `weft serve`
    ray_node           `weft node start`
    node_models        `weft node clean`
    config_checks      `weft check`, `weft key`
    config_writer      `weft init`
    cluster_status     `weft status`
    cluster_top        `weft top`
    request_waterfall  `weft trace`
    span_file          writes spans for Perfetto
    chat_session       `weft chat`
    chat_history       keeps a conversation, and reads streamed answers
    shell_completion   `weft completion`
    start_progress     shows what a cluster that starts waits for
    cluster_client     asks a cluster over HTTP, and says what to do when that fails
    cluster_view       reads what a cluster says of itself, and computes rates
    terminal           prints tables, words and colours

`deploy.cli` is the only user. The folder knows nothing of how a cluster does its work: commands that ask a cluster
know it by its HTTP API.
"""

from deploy.commands.command_line import VERSION, build_parser
from deploy.commands.weft_parser import WeftParser

__all__ = ["VERSION", "WeftParser", "build_parser"]
