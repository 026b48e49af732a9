"""A table of the layers of a network of dense tensors, which are made up by their shapes."""

import sys

import torch
from MinkowskiEngine.utils.summary import size2list, table

__all__ = ["summary", "summary_string"]

_ROWS = 2  # of a made-up batch


def summary(model, input_size, batch_size=-1, device=None, dtypes=None):
    """Print the table of `summary_string`: (all parameters, trainable parameters)."""
    text, counts = summary_string(model, input_size, batch_size, device, dtypes)
    sys.stdout.write(text + "\n")
    return counts


def summary_string(model, input_size, batch_size=-1, device=None, dtypes=None):
    """(table of the layers, (all parameters, trainable parameters)) of a model that runs once, in
    evaluation and without gradients, on random inputs of two items.

    Args:
        input_size: shape of an input without the batch, or a list of one per input.
        batch_size: what the table shows for the number of items.
        device: where the inputs are; None: where the model is.
        dtypes: torch dtype of each input; None: float32.
    """
    sizes = input_size if isinstance(input_size, list) else [input_size]
    if device is None:
        device = next((p.device for p in model.parameters()), "cpu")
    input_dtypes = [torch.float32] * len(sizes) if dtypes is None else dtypes
    inputs = [torch.rand(_ROWS, *size).type(dtype).to(device) for size, dtype in zip(sizes, input_dtypes, strict=True)]
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            return table(model, inputs, lambda shape: [batch_size, *size2list(shape)[1:]])
    finally:
        for module, training in modes:
            module.training = training
