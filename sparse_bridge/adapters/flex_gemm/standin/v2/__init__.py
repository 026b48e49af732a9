"""The tree of FlexGEMM 2.0."""
