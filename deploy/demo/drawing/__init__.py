"""Draws the media of the demo, each together with the facts that one can ask about it.

`figures` draws plain figures, `scenes` composes them into pictures, and `clips` moves them. `sounds` draws beeps, tones
and sweeps, and `speech` has words spoken by espeak-ng where that is installed. `facts` defines the values of a
conversation and builds a conversation from media and facts.

The tasks of the demo model draw all their media here, and so do tests that need a medium with known content. The folder
knows no model and no file format: media are arrays.
"""
