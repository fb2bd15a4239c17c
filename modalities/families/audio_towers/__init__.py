"""Turns sounds into features: plans and spectrograms of each family, and the encoders (audio towers) themselves.

Three modules are pure: `cutting` decides where a spectrogram may be cut, `sound` holds what a family does with sounds
before its encoder, and `halves` builds that for each family from its config. Torch is needed by `attention`,
`device_sounds`, `encoder` and by the module of each tower (`qwen2_audio`, `qwen2_5_omni`, `qwen3_omni`).
"""
