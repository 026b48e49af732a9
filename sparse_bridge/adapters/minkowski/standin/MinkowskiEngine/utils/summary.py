"""A table of the layers of a network."""

import sys

import torch
from MinkowskiEngine.MinkowskiTensor import Tensor

from sparse_bridge.errors import UnsupportedError

__all__ = [
    "get_hash_occupancy_ratio",
    "minkowski_summary_string",
    "pruned_weight_sparsity_string",
    "size2list",
    "summary",
]


def summary(model, summary_input):
    """Run the model once, print a table of its layers: (all parameters, trainable parameters)."""
    text, counts = minkowski_summary_string(model, summary_input)
    sys.stdout.write(text + "\n")
    return counts


def minkowski_summary_string(model, summary_input):
    """(the table of `summary`, (all parameters, trainable parameters))."""
    return table(model, (summary_input,), size2list)


def table(model, inputs, shown):
    """(the table of a model that is called with `inputs`, (all parameters, trainable parameters)).

    shown: list of a tensor's shape, as it appears.
    """
    rows, hooks = [], []

    def watch(name):
        def hook(module, _, output):
            count = sum(p.numel() for p in module.parameters(recurse=False))
            title = f"{name} ({type(module).__name__})"
            numbers = f"{count:,} {pruned_weight_sparsity_string(module)}".rstrip()
            rows.append((title, _described(output, shown), numbers))

        return hook

    for name, module in model.named_modules():
        if not list(module.children()):
            hooks.append(module.register_forward_hook(watch(name)))
    try:
        model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    total = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    rows = [("Layer", "Output shape", "Parameters"), *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"Total parameters: {total:,}", f"Trainable parameters: {trainable:,}"]
    return "\n".join(lines), (total, trainable)


def _described(output, shown):
    if isinstance(output, (list, tuple)):
        return "[" + ", ".join(_described(part, shown) for part in output) + "]"
    is_tensor = isinstance(output, (Tensor, torch.Tensor))
    return str(shown(output.shape)) if is_tensor else "-"


def size2list(size):
    """A shape as a list of ints."""
    return [int(n) for n in size]


def pruned_weight_sparsity_string(module):
    """Share of the entries that `torch.nn.utils.prune` masks, of each such parameter of a module:
    "weight 25.0% pruned"; "" without any."""
    masks = {n: m for n, m in module.named_buffers(recurse=False) if n.endswith("_mask")}
    parts = [
        f"{name.removesuffix('_mask')} {1 - float(mask.double().mean()):.1%} pruned"
        for name, mask in masks.items()
        if f"{name.removesuffix('_mask')}_orig" in module._parameters
    ]
    return ", ".join(parts)


def get_hash_occupancy_ratio(minkowski_tensor):
    """Refused: the share of used slots in a hash map of upstream's. Raises: UnsupportedError."""
    raise UnsupportedError(
        "get_hash_occupancy_ratio: there is no hash map of upstream's here; len(x) is the number of coordinates."
    )
