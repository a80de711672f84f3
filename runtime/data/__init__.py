"""Data that a run trains on.

    data             text, cut into micro-batches; the protocols that data implement
    sample_digests   digests of samples, and the check that a second read gives the same
    loss_weights     the weight of each micro-batch in the loss
    torchtitan_data  torchtitan's tokenizers and data sets
    token_data       tokens, read one epoch after another, in an order computed and not stored;
                     samples in which documents follow each other
    tokenized_text   text as tokens, and files of tokens, mapped
    dealt_samples    samples assigned to the micro-batches of a schedule by their costs

Adds to the replay: the source of samples (`replay.seams.Feed`). May import: `replay`, `models`.
"""
