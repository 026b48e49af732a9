"""The interpreter under the path that quantisation programs import it by."""

from spconv.pytorch.interpreter import REGISTERED_NODE_HANDLERS as REGISTERED_NODE_HANDLERS
from spconv.pytorch.interpreter import NetworkInterpreter as NetworkInterpreter
from spconv.pytorch.interpreter import get_node_handler as get_node_handler
from spconv.pytorch.interpreter import register_method_handler as register_method_handler
from spconv.pytorch.interpreter import register_node_handler as register_node_handler
