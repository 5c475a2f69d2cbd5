"""The embedded `torch` engine: an HTTP server that answers SGLang's native API on a CPU (or a GPU).

    http      one asyncio loop: validation, admission, the gate of a pause, weight-update calls      app.py
    scheduler one thread: continuous batching between commands taken at step boundaries              scheduler.py
    groups    one thread: joining a weight-update group and receiving tensors                        groups.py

Weights change only on the scheduler's thread and only between two forwards. Run it with
`python -m actors.engine.torch_server --model-path DIR`.
"""
