"""Contains the models of the stages that make speech, for Qwen3-Omni and Qwen2.5-Omni.

`talker_stage` is the stage that turns the thinker's text into codec frames. `row_ids` defines what it knows of its
rows, `talker_prompt` says what they are made of, `talker_options` reads what the client chose, `talker_network`
computes rows on paged attention, and `code_predictor` the codes of a frame behind the first. `code2wav_stage` is the
stage that turns frames into samples; `code2wav_network` is its network, which runs in pieces. For Qwen2.5-Omni,
`single_code_prompt` and `single_code_network` take the places of the talker's prompt and network, and `token2wav_stage`
is the stage that makes samples. `stage_inputs` makes the input of each stage from the output of the one before it.
`speech_checkpoint` loads the stages from a checkpoint.

The stage's engine (`llm_workers.stages`) calls these models. They know nothing of connectors, threads and the router.
"""

from llm_workers.speech.code2wav_stage import SAMPLE_RATE, Code2WavStage
from llm_workers.speech.speech_checkpoint import load_code2wav, load_talker, read_speech_config
from llm_workers.speech.stage_inputs import talker_to_code2wav, thinker_to_talker
from llm_workers.speech.talker_options import TalkerDefaults
from llm_workers.speech.talker_stage import TalkerStage
from llm_workers.speech.token2wav_stage import Token2WavStage

__all__ = [
    "SAMPLE_RATE",
    "Code2WavStage",
    "TalkerDefaults",
    "TalkerStage",
    "Token2WavStage",
    "load_code2wav",
    "load_talker",
    "read_speech_config",
    "talker_to_code2wav",
    "thinker_to_talker",
]
