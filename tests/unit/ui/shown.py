"""What a run might hold, for tests of what is shown of it."""

from __future__ import annotations

import struct

from actors.recorder.ordering import number
from contracts import events, trajectory
from contracts.envelope import Envelope, decode
from contracts.trajectory import Sampling, Sequence, TokenSpan, Trajectory
from tests.stalls.scene import Scene

EVIL = '</script><script>document.title="taken"</script><img src=x onerror=alert(1)>'
"""What a model might say."""


def rollout(event: events.TrajectoryFinished) -> bytes:
    """Four given tokens, then four sampled ones, of two versions."""
    ids = [*map(ord, "ask:"), *map(ord, "<b>!")]
    spans = (
        TokenSpan(0, 4, "environment"),
        TokenSpan(4, 6, "sampled", 3, "engine-0", 1),
        TokenSpan(6, 8, "sampled", 4, "engine-1", 2),
    )
    sequence = Sequence(
        length=8,
        ids=struct.pack("<8i", *ids),
        loss_mask=bytes([0] * 4 + [1, 1, 1, 0]),
        logprobs=struct.pack("<8f", 0, 0, 0, 0, -0.5, -1.0, -2.0, -4.0),
        spans=spans,
        sampling=Sampling(temperature=1.0, max_new_tokens=8),
        stop_reason="stop",
    )
    return trajectory.encode(
        Trajectory(
            task=event.task,
            index=event.index,
            sample=event.sample,
            attempt=event.attempt,
            reward=event.reward,
            components=event.components,
            mask_reason=None,
            sequences=(sequence,),
            info={"answer": EVIL},
        )
    )


def log_of(scene: Scene) -> list[tuple[int, Envelope[events.Event]]]:
    return [(number(entry.entry), decode(entry.stream, entry.data)) for entry in scene.world.store.log]
