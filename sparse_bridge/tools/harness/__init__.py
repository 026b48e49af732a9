"""What every tool that measures or checks has in common: worker processes that answer in JSON and
may crash or hang, a progress display, and files of results.

The benchmarks, the compatibility matrix, the compile check and `warm` take them from here.
"""
