"""Turns sounds into features, for the families that take sounds.

`sound_plans` says what a family does with sounds before its encoder: how many rows a sound becomes, and where its
spectrogram is cut into units. `device_spectrograms` makes these units in batches on a device, as an alternative to the
process that decodes a sound. `sound_encoder` runs an encoder (audio tower) over the units of many sounds, and
`qwen2_audio_tower`, `qwen2_5_omni_tower` and `qwen3_omni_tower` hold what differs between the towers.

The families in `modalities.families` plan and preprocess with `sound_plans`, which needs no torch, and import the other
modules only when they load. The folder knows nothing of prompts, requests and queues.
"""
