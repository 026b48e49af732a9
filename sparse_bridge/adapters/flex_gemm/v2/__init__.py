"""FlexGEMM 2.0: shapes with the channels last, any number of batch columns, modules."""
