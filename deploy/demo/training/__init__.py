"""Holds the parts of which `deploy.demo.train` composes the training of the demo model.

`encoding` encodes conversations as the model's inputs, and `batches` packs them into batches and runs the forward pass.
`vision_tower_lessons` and `audio_tower_lessons` train the towers alone, before the language model. `learners` runs the
processes that train one model together, and `optimizers` updates the weights in each.

`evaluate` measures with the same encoding and the same forward pass. The folder does not know how conversations are
drawn or how good the model is.
"""
