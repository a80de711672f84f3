"""Cut decoder models of transformers into layers, load pretrained ones, and export them.

    configuration   the model that `[model] hugging_face` names: its config.json; supported kinds
    layers          transformers' own modules as layers
    parallel        decoder layers cut over the ranks of a worker
    registered      attention within documents; experts whose shapes do not depend on the routing
    weights         pretrained safetensors, read layer by layer
    model           the `LayeredModel`

Only `configuration` and `weights` can be imported if transformers is not installed.
"""
