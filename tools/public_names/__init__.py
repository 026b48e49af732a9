"""The public names of a release, read from its files: names and parameters, no code.

    python -m public_names FOLDER/torchlib --title "torchlib 1.2" --source sdist > TABLE

FOLDER/torchlib is a package of `.py` or `.pyi` files. A part of a table of `sparse_bridge/tools/api_coverage` comes out: modules,
and below them `class Name(parameters) < base`, `function(parameters)`, constants, and what packages bring in from below;
with `--imports`, too, what other modules bring in from the rest of the release.
Indented names are members of the class: `method(parameters)`, `@property`, constants, and `.attribute`, which its objects
get when they are made or used. `(*)` is a function whose parameters are not known, `...` a default that is no literal and
no name.

Public is what has no leading underscore. Operators are listed that not every object has. Of functions of autograd, `apply`
is listed with the parameters of `forward`. What a class inherits from a public base stands at the base.
"""
