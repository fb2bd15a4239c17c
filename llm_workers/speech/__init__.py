"""Contains the models of the stages that make speech, for Qwen3-Omni.

`code2wav_stage` is the stage that turns codec frames into samples; `code2wav_network` is its network, which runs in
pieces. `speech_checkpoint` loads both from a checkpoint.

The stage's engine (`llm_workers.stages`) calls these models. They know nothing of connectors, threads and the router.
"""

from llm_workers.speech.code2wav_stage import SAMPLE_RATE, Code2WavStage
from llm_workers.speech.speech_checkpoint import load_code2wav

__all__ = [
    "SAMPLE_RATE",
    "Code2WavStage",
    "load_code2wav",
]
