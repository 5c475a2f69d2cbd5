"""What crosses between actors, and nothing else.

This package imports msgspec and the standard library only, so that the driver, the tests and a plug-in can load it
without torch, sglang or megatron.
"""
