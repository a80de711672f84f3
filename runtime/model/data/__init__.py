"""What a run trains on.

    data              text, cut into micro-batches; whose data they are
    loss_weights      what each micro-batch counts in the loss
    torchtitan_data   torchtitan's tokenizers and data sets
    token_data        tokens, read epoch by epoch
    document_data     tokens in which documents follow each other
    token_file        files of tokens, mapped
    tokenized_text    text as tokens
    sample_order      the order of an epoch, computed and not kept
"""
