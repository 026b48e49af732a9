"""Networks as a list of launches over planned memory, in one file that a program in C plays on a GPU.

`record` writes down what a network launches; `memory_plan` gives every tensor its place; `package_file`
is the file; `native` holds the player.
"""
