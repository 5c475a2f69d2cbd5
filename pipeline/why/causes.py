"""Every cause that `pipeline why` can name, and what usually fixes it."""

from __future__ import annotations

from collections.abc import Mapping

CAUSES: Mapping[str, str] = {
    "store_unreachable": "Bring the store back, or correct REDIS_URL; actors wait broker.outage_s, then restart.",
    "store_full": (
        "Raise the store's maxmemory (policy noeviction), or free memory: a lower checkpoint.every releases "
        "payloads sooner, a lower rollout.open_groups or buffer.max_staleness needs fewer of them."
    ),
    "two_writers": (
        "End the older process by hand: two of them believe that they are this actor. Start actors from one "
        "place only, and give each run its own store or run id."
    ),
    "clock_jump": (
        "Correct that host's clock (chrony, ntpd) and restart its actors: deadlines travel between hosts as "
        "wall-clock times."
    ),
    "cycle": (
        "This is a fault of the protocol: attach the output of `pipeline bundle` to a report. Restarting one "
        "of the actors named breaks the cycle."
    ),
    "actor_failed": (
        "Mend what it names, then `pipeline up --resume`; settings can be given with it. logs/<actor>.jsonl has more."
    ),
    "actor_gone": (
        "Read logs/<actor>.jsonl for its last words, mend that, then `pipeline up --resume`, or start it "
        "again with `pipeline actor NAME --run RUN`."
    ),
    "actor_silent": (
        "Look at what the process does (`py-spy dump --pid PID`, or `pipeline bundle`); killing it is safe: "
        "its successor goes on from the journal."
    ),
    "step_hangs": (
        "Look at the trainer (`py-spy dump`): a collective that misses a rank, a data load, or a first "
        "compilation. Killing it is safe: the batch is trained again."
    ),
    "data_exhausted": "The dataset is used up: let the producer repeat it, set fewer steps, or give more tasks.",
    "straggler": (
        "Bound the rollout: rollout.deadline_s for the sample, buffer.group_deadline_s with "
        "group_policy=shrink for the group; buffer.max_staleness above 0 lets other groups be trained "
        "meanwhile."
    ),
    "hole": (
        "buffer.sampler=in_order waits for every index. Bound rollouts with rollout.deadline_s, or use "
        "buffer.sampler=windowed, which takes later groups first and loses none."
    ),
    "buffer_short": (
        "Credit was granted for fewer groups than a batch needs: compare granted with issued, trained and "
        "dropped below. Restarting the buffer computes the credit anew; a higher buffer.max_staleness gives "
        "room."
    ),
    "batch_lost": (
        "The batch was emitted and the trainer does not have it: restart the trainer, which takes up again "
        "what no checkpoint covers; if it stays away, resume from the last checkpoint."
    ),
    "dead_letter": (
        "Read the entries in the dead-letter stream and the reason; mend the reader or the payload. The group "
        "goes on without them at buffer.group_deadline_s."
    ),
    "environment_failing": (
        "Read the reason below: the environment refuses its tasks. Mend it; failed samples are not tried "
        "again once rollout.attempts of that kind (infra, timeout, data, noncontiguous) is used up."
    ),
    "environment_silent": (
        "The environment does not return: look at its process or service, and bound each call with "
        "rollout.score_deadline_s and each rollout with rollout.deadline_s."
    ),
    "producer_failed": (
        "Mend what the producer complains of (package, data, service), then `pipeline up --resume`: it goes "
        "on behind the last task that it gave."
    ),
    "producer_silent": "The producer's tasks() does not yield: look at its data; producer.task_deadline_s ends it.",
    "engine_dead": (
        "See logs/<engine>.jsonl for the server's end. Its successor takes part in the next epoch; the "
        "present one ends at refit.deadline_s."
    ),
    "server_silent": (
        "The engine's server runs and answers no probe: it is stopped, or hangs. Look at its process (`py-spy dump`) "
        "and at logs/<engine>.server.log. Killing it is safe: the engine starts another, and requests are repeated."
    ),
    "engine_retired": (
        "Mend what logs/<engine>.server.log tells. It comes back when the run is scaled down and up again "
        "(`pipeline scale RUN engines=N`), or resumed; the others go on meanwhile."
    ),
    "transfer_hangs": (
        "Nobody has finished the broadcast: look for a member that did not join (network between trainer and "
        "engine, firewall on the group's port). It is given up at refit.deadline_s."
    ),
    "probe_in_transfer": (
        "A server that receives weights can't answer its health probe. The probe must know of the barrier: "
        "raise its timeout beyond the transfer, or leave probing to the engine's own actor."
    ),
    "refits_fail": "Read the reason of the last epochs below; refit.failures in a row end the run.",
    "drain_tail": (
        "refit.drain=interrupt cuts long generations and continues them after the commit; or lower "
        "rollout.max_new_tokens, or refit.drain_deadline_s."
    ),
    "gate_not_closed": "The gateway has not confirmed that its gate is closed: look at its process; it can be killed.",
    "trainer_not_offering": "The trainer has not offered the weights: it is busy, stuck, or waits for somebody itself.",
    "gate_held": "The gateway did not take note of the commit and holds requests: restart it, its callers retry.",
    "no_engine": "No engine serves: see why each was quarantined or died, below.",
    "engine_hangs": (
        "The engine generates and gives no answer: look at its server. rollout.deadline_s ends the wait, and "
        "killing the engine moves its requests to another."
    ),
    "not_ready": "The run has not begun: see logs/ of the actors named; launch.start_deadline_s ends the wait.",
    "unknown": (
        "Nothing that this tool knows explains it. Make a `pipeline bundle` and look at the actors' stacks in it."
    ),
}
