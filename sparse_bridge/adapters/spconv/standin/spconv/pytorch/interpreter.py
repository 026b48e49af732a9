"""Runs a traced graph by handlers of the program's own: how networks of other engines are made."""

import sys

from torch.fx import Interpreter

REGISTERED_NODE_HANDLERS: dict = {}


def register_node_handler(*names):
    """Decorator: `handler(net, target, args, kwargs, name)` for these functions or module classes.

    net: what `NetworkInterpreter` was given as `network_ctx`.  target: the function or module.
    name: of the node.
    """

    def register(handler):
        for name in names:
            REGISTERED_NODE_HANDLERS[name] = handler
        return handler

    return register


def register_method_handler(name, tensor_classes):
    """Decorator: the same for the method `name` of objects of these classes."""
    classes = tensor_classes if isinstance(tensor_classes, (list, tuple)) else [tensor_classes]
    return register_node_handler(*((name, cls) for cls in classes))


def get_node_handler(name):
    """The handler of a function, module class or (method, class); None without one."""
    return REGISTERED_NODE_HANDLERS.get(name)


class NetworkInterpreter(Interpreter):
    """Handlers in place of the graph's calls; what has none runs as torch would run it.

    inputs: values of the graph's inputs, in order.  verbose: print every node.
    """

    def __init__(self, network_ctx, module, inputs, verbose=False):
        super().__init__(module)
        self.network_ctx, self._inputs, self._verbose = network_ctx, inputs, verbose
        self._name = ""

    def run(self):
        return super().run(*self._inputs)

    def run_node(self, n):
        self._name = n.name
        result = super().run_node(n)
        if self._verbose:
            sys.stdout.write(f"{n.op} {n.target}: {n.name}\n")
        return result

    def _handled(self, key, target, args, kwargs, default):
        handler = get_node_handler(key)
        if handler is None:
            return default()
        return handler(self.network_ctx, target, args, kwargs, self._name)

    def call_module(self, target, args, kwargs):
        module = self.fetch_attr(target)
        run = super().call_module
        return self._handled(type(module), module, args, kwargs, lambda: run(target, args, kwargs))

    def call_function(self, target, args, kwargs):
        run = super().call_function
        return self._handled(target, target, args, kwargs, lambda: run(target, args, kwargs))

    def call_method(self, target, args, kwargs):
        run = super().call_method
        key = next(
            (key for key in ((target, cls) for cls in type(args[0]).__mro__) if get_node_handler(key) is not None), None
        )
        return self._handled(key, target, args, kwargs, lambda: run(target, args, kwargs))
