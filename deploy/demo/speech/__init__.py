"""Holds what teaches the demo model to speak.

`script` lists what the voices say, `recordings` makes their recordings with espeak-ng, `mel_codec` turns recordings
into codes, and `word_times` guesses where their words are. `prepare` puts these into the file that `speech_data`
describes, `talker_training` and `code2wav_training` learn from it, and `train_voice` runs both and writes the
checkpoint. `speaking` lets the model speak, `judges` says which words are recognised, and `evaluate_voice` measures
that and reports it, with `tried.md` beside it.

The folder knows nothing of how the cluster serves the model.
"""
