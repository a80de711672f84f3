"""The job file: what it says, and how one is written.

    toml              reads a table key by key, and checks every value; writes job files
    file              TOML to a checked `Job`
    layers            what each layer costs; the memory of optimizer state that holders share, while some are down
    model_shape       what each layer of a model does and holds, by formulas
    model_config      the layers of a model by its config.json
    estimate          stage times and memory from a model's layers and a GPU's data sheet
    arrangement       the same layers in other virtual stages, as another job file
    divisions         placements of the literature, and which division of the layers promises most in each
    profiler_trace    stage times from Chrome traces
    presets/          job files to start from
"""
