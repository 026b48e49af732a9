"""What of each framework's public surface is answered: names, members, parameters, base classes.

`tables/<framework>-<release>.txt` lists what a release has (`tools/public_names` reads it from the
files of the release), `tables/<framework>-absent.txt` what is left out on purpose, and why.
`python -m sparse_bridge surface` compares them with the stand-ins.
"""
