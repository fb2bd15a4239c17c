"""Holds what teaches the demo model to speak.

`speech_config` holds the configuration of the talker, of code2wav, and of the whole model. `script` lists what the
voices say, `recordings` makes their recordings with espeak-ng, and `mel_codec` turns recordings into codes. `prepare`
puts these into the file that `speech_data` describes, `talker_training` and `code2wav_training` learn from it, and
`train_voice` runs both and writes the checkpoint.

The folder knows nothing of how the cluster serves the model.
"""
