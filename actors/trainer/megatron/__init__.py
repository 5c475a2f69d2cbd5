"""The `megatron` policy backend: megatron-core's model, parallelism and optimizer, megatron-bridge's names of weights.

Nothing outside this package imports megatron.
"""
