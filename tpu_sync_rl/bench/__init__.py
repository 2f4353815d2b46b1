"""Benchmarks, as `python -m tpu_sync_rl.bench COMMAND`: measured beside the machine's limits."""
