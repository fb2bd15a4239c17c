"""Holds the demo model: a small model of Qwen3-Omni's form that is trained here on pictures, clips and sounds that this
folder draws itself, so that a cluster can be tried and tested without downloading anything.

`drawing/` makes media and the facts that one can ask about them. `tasks/` makes conversations of them. `training/`
and `train` teach the model, `speech/` teaches it to speak, and `evaluate` measures how often it is right.
`demo_config`, `speech_config`, `tokenizer`, `weights` and `build` make the checkpoint's files; `checkpoint/` holds the
trained one. `ask` asks a running cluster about media (`weft demo`), and `hear` has it answer in speech.

The cluster uses only the checkpoint (`build.demo_checkpoint`) and treats it like any other model. Tests draw
media from here too. The folder knows nothing of how the cluster serves the model.
"""
