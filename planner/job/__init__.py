"""Read and write job files, and estimate them from models and measurements.

    toml              reads a table key by key, and checks every value; writes job files
    file              TOML to a checked `Job`
    run_keys          the keys of `[model]` and `[training]` that plans depend on; the runtime reads them all
    layers            cost of each layer; memory of optimizer state that holders share while some are down
    model_shape       work and memory of each layer of a model, by formulas
    model_config      the layers of a model from its config.json
    estimate          stage times and memory from a model's layers and a GPU's data sheet
    arrangement       the same layers in other virtual stages, as another job file
    divisions         placements of the literature, and the most promising division of the layers for each
    profiler_trace    stage times from Chrome traces
    presets/          job files to start from
"""
