"""The broker: which Redis-compatible server a run uses, and keeping an embedded one alive for as long as the run.

with choose(os.environ, run_dir, config.broker) as broker:
    log.info(broker.describe())
    bus = await Bus.connect(broker.url, run, actor="driver")
"""

from __future__ import annotations

from pipeline.broker.choose import choose
from pipeline.broker.embedded import Broker, BrokerError, Happening

__all__ = ["Broker", "BrokerError", "Happening", "choose"]
