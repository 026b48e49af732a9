"""Where pickles of the original look for the activation enum."""

from sparse_bridge.adapters.spconv.upstream.tensorview import activation_of

# Defined here by name, so pickles written here load with the original, and the other way round.
Activation = activation_of(__name__)
