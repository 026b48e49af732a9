"""A table of the layers of a network."""

import sys

import torch
from MinkowskiEngine.MinkowskiTensor import Tensor

__all__ = ["minkowski_summary_string", "summary"]


def summary(model, summary_input):
    """Run the model once, print a table of its layers: (all parameters, trainable parameters)."""
    text, counts = minkowski_summary_string(model, summary_input)
    sys.stdout.write(text + "\n")
    return counts


def minkowski_summary_string(model, summary_input):
    """(the table of `summary`, (all parameters, trainable parameters))."""
    rows, hooks = [], []

    def describe(output):
        if isinstance(output, (list, tuple)):
            return "[" + ", ".join(describe(part) for part in output) + "]"
        return str(list(output.shape)) if isinstance(output, (Tensor, torch.Tensor)) else "-"

    def watch(name):
        def hook(module, _, output):
            count = sum(p.numel() for p in module.parameters(recurse=False))
            title = f"{name} ({type(module).__name__})"
            rows.append((title, describe(output), f"{count:,}"))

        return hook

    for name, module in model.named_modules():
        if not list(module.children()):
            hooks.append(module.register_forward_hook(watch(name)))
    try:
        model(summary_input)
    finally:
        for hook in hooks:
            hook.remove()
    total = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    rows = [("Layer", "Output shape", "Parameters"), *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines += [f"Total parameters: {total:,}", f"Trainable parameters: {trainable:,}"]
    return "\n".join(lines), (total, trainable)
