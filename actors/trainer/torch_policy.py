"""The `torch` policy backend: a transformers model trained by GRPO on a CPU or a GPU.

Parameters and optimizer are float32; `bfloat16` means autocast while computing, and weights exported in bfloat16.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint as recomputed
from transformers import AutoConfig, AutoModelForCausalLM

from actors.trainer import checkpoint, hf_files, objective, offload, packed, rows, spread
from actors.trainer.backend import World
from actors.trainer.metrics import StepMetrics
from actors.trainer.packing import Microbatch, Sample, pack, split
from actors.trainer.schedule import schedule
from actors.trainer.statistics import token_statistics
from config.schema import TrainerConfig

OPTIMIZER = "optimizer.pt"


class TorchPolicy:
    """Weights, optimizer and training step of one policy; a `contracts.policy.PolicyBackend`. Not thread-safe.

    `model_dir` holds config.json and, unless the model starts from random weights drawn with `seed`, safetensors.
    `total_steps` is where the `linear` and `cosine` schedules end. In a `world` of several ranks all of them call the
    same methods with the same samples, and each computes its share; results are those of the whole. Raises
    `BackendError` for a model or machine that is unfit for the settings.
    """

    def __init__(
        self,
        model_dir: Path,
        config: TrainerConfig,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        seed: int = 0,
        total_steps: int = 1,
        world: World = World(),  # noqa: B008 - frozen
    ) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        self.step = 0
        self.device = spread.device_of(config.device, world.rank)
        self._model_dir = model_dir
        self._config = config
        self._dtype = getattr(torch, dtype)
        self._seed = seed
        self._total_steps = total_steps
        self._world = world
        self._mesh = spread.join(world, self.device)
        self._ranks: ProcessGroup | None = None if self._mesh is None else self._mesh.get_group()
        try:
            self.model = self._loaded()
            self._reference = self._loaded().requires_grad_(False) if config.loss.kl_coef else None
        except BaseException:
            self.close()
            raise
        if config.activation_checkpointing:
            _recompute(self.model)
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._references = [] if self._reference is None else list(self._reference.parameters())
        self._optimizer = _optimizer(self._parameters, config)
        self._shelf = offload.Shelf(self.device)
        self._put_away()

    def _loaded(self) -> Any:
        """The initial model. In host memory first: no device ever has more of a sharded one than a layer and a part."""
        model = initial_model(self._model_dir, self._seed)
        if self._config.packed:
            packed.use(model)
        # eval(): dropout would make the ratio of an unchanged policy differ from 1.
        return spread.shard(model, self._mesh).to(self.device).eval()

    def train_step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One step over a batch: `epochs` passes of `minibatches` updates; answers scalar metrics.

        An update whose gradient is not finite is skipped and counted as `skipped_updates`. Raises `PackingError`.
        """
        with self._all_here():
            return self._step(samples)

    def _step(self, samples: Sequence[Sample]) -> dict[str, float]:
        config = self._config
        rate = self._set_learning_rate()
        parts = split(len(samples), config.minibatches, [self._seed, self.step])
        minibatches = [self._share([samples[index] for index in part]) for part in parts]
        updates = config.minibatches * config.epochs
        # With a single update the policy that starts the step is the one that computes its loss: no extra pass.
        proximal = [self._before(minibatch, needed=updates > 1) for minibatch in minibatches]
        metrics = StepMetrics(self.device, reference=self._reference is not None)
        for _ in range(config.epochs):
            for minibatch, references in zip(minibatches, proximal, strict=True):
                self._update(minibatch, references, metrics)
        self.step += 1
        return {**metrics.result(self._ranks), "lr": rate}

    def logprobs(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """Log-probability of each trainable token, 0 elsewhere: float32 [length] a sample, at its temperature."""
        result = [np.zeros(len(sample.ids), dtype=np.float32) for sample in samples]
        with self._all_here():
            for micro in pack(samples, self._config.microbatch_tokens, ragged=self._config.packed):
                values = self._proximal(micro).cpu().numpy()
                for row, index in enumerate(micro.samples):
                    mine = micro.row == row
                    result[index][micro.position[mine]] = values[mine]
        return result

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face name and a copy of each tensor in transfer dtype, on the policy's device, tied ones once."""
        for name, tensor in self._tensors():
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            with self._shelf.here(tensor):
                whole = spread.whole(tensor.detach()).to(dtype, copy=True).contiguous()
            yield name, whole

    def close(self) -> None:
        """Leave the other ranks; the object is of no use then."""
        spread.leave(self._mesh)
        self._mesh = None

    def save(self, path: Path, meta: Mapping[str, Any]) -> int:
        """Write a checkpoint durably and atomically; answers its bytes. It is a Hugging Face model directory too."""
        weights = {name: self._gathered(tensor) for name, tensor in self._tensors()}
        state = {"step": self.step, "optimizer": self._moments(self._gathered), "rng": _rng_state(self.device)}
        if self._world.rank:
            return 0
        files: dict[str, checkpoint.Writer] = {
            hf_files.WEIGHTS: lambda file: save_file(weights, file, metadata={"format": "pt"}),
            OPTIMIZER: lambda file: torch.save(state, file),
        }
        files.update(hf_files.copied(self._model_dir))
        return checkpoint.write(path, files, meta)

    def load(self, path: Path) -> dict[str, Any]:
        """Restore what `save` wrote, bit for bit, also if it was by another number of ranks; answers its meta.

        Raises `checkpoint.CheckpointError`.
        """
        meta = checkpoint.read_meta(path, verify=self._mesh is None)  # `RankedPolicy` held it to its digests
        weights = load_file(path / hf_files.WEIGHTS)
        own = dict(self._tensors())
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        stored = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        if shapes != stored:
            differing = sorted(name for name in shapes.keys() | stored if shapes.get(name) != stored.get(name))
            raise checkpoint.CheckpointError(
                f"{path} is of another model than {self._model_dir}: {differing[0]} has shape "
                f"{stored.get(differing[0])}, expected {shapes.get(differing[0])}; set model.* as in the run before"
            )
        state = torch.load(path / OPTIMIZER, map_location="cpu", weights_only=True)
        with self._all_here(), torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(spread.like(weights[name], tensor))
            self._optimizer.load_state_dict(self._shared_out(state["optimizer"]))
        self.step = state["step"]
        _set_rng_state(self.device, state["rng"])
        return meta

    @contextlib.contextmanager
    def _all_here(self) -> Iterator[None]:
        """Within the block everything is on the device; then what `trainer.offload` names waits in host memory."""
        self._shelf.bring()
        yield
        self._put_away()

    def _put_away(self) -> None:
        if self._config.offload == "none":
            return
        state = [value for entry in self._optimizer.state.values() for value in entry.values()]
        moments = [value for value in state if isinstance(value, Tensor) and value.ndim]
        weights = [*self._parameters, *self._references] if self._config.offload == "all" else []
        offload.own([*moments, *weights])
        self._shelf.put([*moments, *weights])

    def _gathered(self, tensor: Tensor) -> Tensor:
        """On rank 0, all of a tensor in host memory: a copy, if what it is of can be put away. Nothing on others."""
        with self._shelf.here(tensor):
            whole = spread.whole(tensor.detach())
            if self._world.rank:
                return torch.empty(0)
            return whole.clone() if whole.device.type == "cpu" and self._shelf.bytes else whole.cpu()

    def _moments(self, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """The optimizer's state, each tensor changed; collective where parameters are sharded."""
        state = self._optimizer.state_dict()
        values = {
            number: {name: change(value) if isinstance(value, Tensor) else value for name, value in entry.items()}
            for number, entry in state["state"].items()
        }
        return {**state, "state": values}

    def _shared_out(self, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of the optimizer state of a checkpoint."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        values = {
            number: {
                name: spread.like(value, parameters[number]) if isinstance(value, Tensor) and value.ndim else value
                for name, value in entry.items()
            }
            for number, entry in state["state"].items()
        }
        return {**state, "state": values}

    def _share(self, samples: Sequence[Sample]) -> Minibatch:
        """This rank's microbatches of an update, filled up so that all ranks have equally many."""
        limit, ragged = self._config.microbatch_tokens, self._config.packed
        if self._mesh is None:
            return Minibatch.of(pack(samples, limit, ragged=ragged))
        shares = rows.shared_out(samples, self._world.size)
        dealt = [pack([samples[index] for index in share], limit, ragged=ragged) for share in shares]
        missing = max(map(len, dealt)) - len(dealt[self._world.rank])
        filler = next((micro for micros in dealt for micro in micros), None)
        return Minibatch.of([micro for micros in dealt for micro in micros], dealt[self._world.rank], filler, missing)

    def _update(self, minibatch: Minibatch, proximal: list[Tensor | None], metrics: StepMetrics) -> None:
        """One optimizer update from the samples that all ranks hold of a minibatch."""
        if not minibatch.tokens:
            return
        for micro, before in zip(minibatch.micros, proximal, strict=True):
            loss = self._loss(micro, before, minibatch.tokens, minibatch.sequences, metrics)
            (loss * self._world.size).backward()  # FSDP takes the mean over ranks, the loss is a sum
        for _ in range(minibatch.fillers):
            assert minibatch.filler is not None
            current, entropy = self._score(self.model, minibatch.filler)
            if self._reference is not None:  # its layers are gathered too
                with torch.no_grad():
                    self._score(self._reference, minibatch.filler)
            ((current.sum() + entropy.sum()) * 0.0).backward()
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = float(spread.whole(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.grad_clip)))
        applied = math.isfinite(norm)
        if applied:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        metrics.update(norm, applied)

    def _loss(
        self,
        micro: Microbatch,
        proximal: Tensor | None,
        tokens: float,
        sequences: float,
        metrics: StepMetrics,
    ) -> Tensor:
        """This microbatch's share of the minibatch loss, a scalar to call backward on."""
        config = self._config.loss
        current, entropy = self._score(self.model, micro)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._score(self._reference, micro)
        return objective.share_of_loss(
            config,
            micro,
            current=current,
            entropy=entropy,
            proximal=proximal,
            reference=reference,
            tokens=tokens,
            sequences=sequences,
            metrics=metrics,
        )

    def _score(self, model: torch.nn.Module, micro: Microbatch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy float32 [n] of the trainable tokens of a microbatch."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16):
            logits = self._packed_logits(model, micro) if self._config.packed else self._padded_logits(model, micro)
        return token_statistics(logits, self._tensor(micro.target), self._tensor(micro.temperature))

    def _padded_logits(self, model: torch.nn.Module, micro: Microbatch) -> Tensor:
        output = model(input_ids=self._tensor(micro.ids), logits_to_keep=self._tensor(micro.columns), use_cache=False)
        return output.logits[self._tensor(micro.row), self._tensor(micro.at)]

    def _before(self, minibatch: Minibatch, *, needed: bool) -> list[Tensor | None]:
        """Log-probabilities of this rank's microbatches by the policy that starts the step, if they are needed."""
        scored = [self._proximal(micro) if needed else None for micro in minibatch.all]
        return scored[: len(minibatch.micros)]

    def _packed_logits(self, model: torch.nn.Module, micro: Microbatch) -> Tensor:
        line = rows.row(micro, 1)
        output = model(
            input_ids=self._tensor(line.ids)[None],
            position_ids=self._tensor(line.positions)[None],
            logits_to_keep=self._tensor(line.source),
            layout=packed.layout(line.bounds, self.device),
            use_cache=False,
        )
        return output.logits[0]

    @torch.no_grad()
    def _proximal(self, micro: Microbatch) -> Tensor:
        return self._score(self.model, micro)[0]

    def _set_learning_rate(self) -> float:
        rate = self._config.lr * schedule(
            self._config.schedule, self.step, warmup=self._config.warmup_steps, total=self._total_steps
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and live tensor of everything that makes up the model; of tied ones, the first."""
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return objective.on(self.device, array)


@dataclass(frozen=True)
class Minibatch:
    """This rank's `micros` of one update, and what all ranks train on in it: trainable tokens and sequences.

    `fillers`: how often this rank runs `filler`, which counts for nothing, because others have more to do.
    """

    micros: list[Microbatch]
    tokens: int
    sequences: int
    filler: Microbatch | None = None
    fillers: int = 0

    @classmethod
    def of(
        cls,
        everybodys: list[Microbatch],
        mine: list[Microbatch] | None = None,
        filler: Microbatch | None = None,
        fillers: int = 0,
    ) -> Minibatch:
        """`mine`, of what all ranks have together."""
        tokens = sum(len(micro.row) for micro in everybodys)
        sequences = sum(len(micro.samples) for micro in everybodys)
        return cls(everybodys if mine is None else mine, tokens, sequences, filler, fillers)

    @property
    def all(self) -> list[Microbatch]:
        """What goes through the model: all ranks have equally many."""
        return self.micros + [self.filler for _ in range(self.fillers) if self.filler is not None]


def _recompute(model: Any) -> None:
    """Keep only the input of each layer, and compute what the backward pass needs again."""
    for layer in spread.layers(model):
        layer.forward = partial(recomputed, layer.forward, use_reentrant=False)


def initial_model(model_dir: Path, seed: int) -> Any:
    """The model with the weights that are there, else with random ones drawn with `seed`; float32."""
    if any(model_dir.glob("*.safetensors")):
        return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), dtype=torch.float32)


def _optimizer(parameters: list[torch.nn.Parameter], config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101); vectors (norms and biases) do not decay."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, fused=True
    )


def _rng_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def _set_rng_state(device: torch.device, state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
