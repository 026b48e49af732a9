"""What each layer of a model does and costs: `sparse_bridge.profile`, and its notebook magics."""
