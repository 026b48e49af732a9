"""What FlexGEMM does around its convolutions, on plain tensors."""
