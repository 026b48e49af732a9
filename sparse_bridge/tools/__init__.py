"""What measures, checks and shows the engine. The engine does without it: nothing in `core`,
`kernels` or `adapters` imports from here.

| folder | what it does | command |
|---|---|---|
| `offline_compile` | compiles every kernel for GPUs that are absent | `doctor --targets` |
| `acceptance` | compares the results of a GPU with references | `prove` |
| `checkpoints` | evaluates published weights with their own project | `verify` |
| `api_coverage` | compares public names with those of each framework | `surface` |
| `demo` | a lidar scan through two networks, and scans for all others | `demo` |
| `profiling` | what each layer of a model does and costs | `run --profile` |
| `networks` | networks that demo, benchmarks and tests run | |
| `harness` | worker processes, progress, files of results | |

`doctor` is the command of that name; `sparse_bridge.commands` has the others.
"""
