"""The public name of a profile, where the API reference has it; the code is `tools/profiling`."""
