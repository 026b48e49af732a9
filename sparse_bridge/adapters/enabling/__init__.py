"""Parts of `lifecycle`: the arguments of `enable()`, and child processes."""
