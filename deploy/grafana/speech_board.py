"""Describes the dashboard of speech. Weft gives no speech yet, so its panels are empty; `SPEECH_METRICS` fixes the
names that the panels show, so that speech brings metrics for them.

The module knows nothing of how speech is made.
"""

from __future__ import annotations

from deploy.grafana.panels import Board, BoardRow, Panel, Query
from deploy.grafana.queries import quantiles

FIRST_AUDIO = "weft_router_first_audio_seconds"
"""Is a histogram: the time from the arrival of a request to the first sound of its answer."""
REAL_TIME_FACTOR = "weft_router_real_time_factor_ratio"
"""Is a histogram: the time in which a sound was made, divided by its length; above 1 a listener waits."""
UNDERRUNS = "weft_router_audio_underruns_total"
"""Counts the times at which a listener had heard everything that was there."""
SPEECH_METRICS = (FIRST_AUDIO, REAL_TIME_FACTOR, UNDERRUNS)

SPEECH = Board(
    "weft-speech",
    "Weft speech",
    "Answers that are spoken. Empty until Weft gives speech.",
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
            ],
        )
    ],
)
