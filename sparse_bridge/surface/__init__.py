"""What of each framework's public surface is answered: names, methods, parameters.

`tables/<framework>-<release>.txt` lists what a release has, `tables/<framework>-absent.txt` what is
left out on purpose, and why. `python -m sparse_bridge surface` compares them with the stand-ins.
"""
