"""`python -m sparse_bridge verify`: published weights, evaluated by their own project on this
engine."""
