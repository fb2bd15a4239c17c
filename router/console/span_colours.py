"""Gives the colours in which pages draw the spans and parts of a request's time. Waiting is pale, work of encoders is
green, transfers are blue, and work of workers is yellow; what holds a request at its doorstep is red."""

SPAN_TO_COLOUR = {
    "fetched": "#b5838d",
    "read": "#8d99ae",
    "prompted": "#8d99ae",
    "waited": "#c9ada7",
    "planned": "#8d99ae",
    "plan": "#8d99ae",
    "way": "#7fa7c4",
    "returned": "#7fa7c4",
    "queue": "#c9ada7",
    "decode_queue": "#c9ada7",
    "encode_queue": "#c9ada7",
    "decoded": "#4c956c",
    "prepared": "#4c956c",
    "unit_encoded": "#2a9d8f",
    "transfer": "#457b9d",
    "prefill": "#e9a23b",
    "held": "#d1495b",
    "generate": "#cbb26a",
}
OTHER_COLOUR = "#6c757d"
