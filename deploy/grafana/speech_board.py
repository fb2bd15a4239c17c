"""Describes the dashboard of spoken answers. The module knows nothing of how speech is made."""

from __future__ import annotations

from deploy.grafana.panels import Board, BoardRow, Panel, Query
from deploy.grafana.queries import quantiles

FIRST_AUDIO = "weft_router_first_audio_seconds"
REAL_TIME_FACTOR = "weft_router_real_time_factor_ratio"
UNDERRUNS = "weft_router_audio_underruns_total"
GAPS = "weft_router_audio_gap_seconds"
PIECES = "weft_router_audio_piece_seconds"

SPEECH = Board(
    "weft-speech",
    "Weft speech",
    "Answers that are spoken. Empty in a cluster without stages that speak.",
    [
        BoardRow(
            "Speech",
            [
                Panel(
                    "Time to first audio",
                    "From the arrival of a request to its first sound. Above half a second a conversation feels slow.",
                    "s",
                    quantiles(FIRST_AUDIO, of=(0.5, 0.99)),
                    [(0.5, "yellow"), (1.5, "red")],
                ),
                Panel(
                    "Real-time factor",
                    "Time of making sound, divided by its length. Above 1 the listener waits for the next words.",
                    "none",
                    quantiles(REAL_TIME_FACTOR, of=(0.5, 0.99)),
                    [(0.8, "yellow"), (1.0, "red")],
                ),
                Panel(
                    "Underruns",
                    "Pauses because the next sound was late. Each is heard.",
                    "ops",
                    [Query(f"sum(rate({UNDERRUNS}{{@}}[$__rate_interval]))", "underruns")],
                    [(0.01, "yellow"), (0.1, "red")],
                    least=0.1,
                ),
                Panel(
                    "Gaps between pieces",
                    "Time between two pieces of the sound of one answer. Gaps longer than the pieces are heard.",
                    "s",
                    quantiles(GAPS, of=(0.5, 0.99)),
                    [(2.0, "yellow"), (4.0, "red")],
                ),
                Panel(
                    "Length of pieces",
                    "Length of the pieces in which sound comes. Short pieces cost more work, and long ones come late.",
                    "s",
                    quantiles(PIECES, of=(0.5, 0.99)),
                ),
            ],
        )
    ],
)
