"""One rank's part of a policy on megatron-core. Methods are collective: each rank calls the same ones in turn."""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from actors.trainer import checkpoint, hf_files, objective
from actors.trainer.backend import Job, World
from actors.trainer.megatron import layers, model, sharded
from actors.trainer.megatron.offloading import Offloading
from actors.trainer.megatron.vocabulary import token_statistics
from actors.trainer.metrics import StepMetrics
from actors.trainer.packed import layout
from actors.trainer.packing import Sample, split
from actors.trainer.rows import Deal, Row, deal
from actors.trainer.schedule import schedule
from config import gpus

LogitsLoss = Callable[[Tensor], tuple[Tensor, Any]]


class MegatronPolicy:
    """A rank's part of weights, optimizer and training step; together a `contracts.policy.PolicyBackend`.

    Parameters are kept in the transfer dtype, the optimizer's own copies in float32, spread over data-parallel ranks.
    Results are complete on rank 0. Not thread-safe, and all calls must come from one thread.
    """

    def __init__(self, job: Job, world: World) -> None:
        config = job.trainer
        if config.threads:
            torch.set_num_threads(config.threads)
        self.step = 0
        self._job = job
        self._config = config
        self._gpu = config.device != "cpu" and torch.cuda.is_available()
        self._join(world)
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        job, config = self._job, self._config
        self.device = torch.device("cuda", torch.cuda.current_device()) if self._gpu else torch.device("cpu")
        weights = Path(job.weights_dir or job.model_dir)
        dtype = getattr(torch, job.dtype)
        self._built = model.build(weights, config, dtype=dtype, seed=job.seed, gpu=self._gpu)
        self._rotation = layers.Rotation(self._built.chunks) if self._built.rotation == "whole" else None
        self._dtype = dtype
        self._vocabulary = hf_files.vocabulary(weights)
        self._last = parallel_state.is_pipeline_last_stage()
        self._speaks = self._last and parallel_state.get_tensor_model_parallel_rank() == 0
        self._replica = parallel_state.get_data_parallel_rank()
        self._replicas = parallel_state.get_data_parallel_world_size()
        self._reference = [p.detach().clone() for p in self._parameters()] if config.loss.kl_coef else None
        self._offloading = Offloading(self._built, self._reference or (), config, self.device)

    def train_step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One step over a batch: `epochs` passes of `minibatches` updates; answers scalar metrics.

        Every rank gets the whole batch. An update whose gradient is not finite is skipped and counted as
        `skipped_updates`. Raises `PackingError`.
        """
        with self._offloading.everything_here():
            return self._step(samples)

    def _step(self, samples: Sequence[Sample]) -> dict[str, float]:
        config = self._config
        rate = self._set_learning_rate()
        parts = split(len(samples), config.minibatches, [self._job.seed, self.step])
        deals = [self._deal([samples[index] for index in part]) for part in parts]
        single = config.minibatches * config.epochs == 1
        proximal = [None if single else self._score(dealt) for dealt in deals]
        with self._initial_weights():
            reference = [None if self._reference is None else self._score(dealt) for dealt in deals]
        metrics = StepMetrics(self.device, reference=self._reference is not None)
        for _ in range(config.epochs):
            for dealt, before, initial in zip(deals, proximal, reference, strict=True):
                self._update(dealt, before, initial, metrics)
        self.step += 1
        return {**metrics.result(dist.group.WORLD), "lr": rate}

    def logprobs(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """Log-probability of each trainable token, 0 elsewhere: float32 [length] a sample, at its temperature."""
        dealt = self._deal(samples)
        result = [np.zeros(len(sample.ids), dtype=np.float32) for sample in samples]
        with self._offloading.weights_here():
            scored = self._score(dealt)
        mine = zip(dealt.rows[self._replica], scored, strict=True)
        for row, values in mine if self._speaks else ():
            micro = row.micro
            for number, index in enumerate(micro.samples if micro else ()):
                assert micro is not None
                chosen = micro.row == number
                whole = dealt.samples[self._replica][index]
                result[whole][micro.position[chosen]] = values.cpu().numpy()[chosen]
        flat = torch.from_numpy(np.concatenate([*result, np.zeros(1, np.float32)])).to(self.device)
        dist.all_reduce(flat)
        pieces = np.split(flat.cpu().numpy()[:-1], np.cumsum([len(sample.ids) for sample in samples])[:-1])
        return pieces if samples else []

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face name and a copy of each tensor in transfer dtype, tied ones once, without vocabulary padding.

        Collective: every rank must take all of it, and gets all of it.
        """
        with self._offloading.weights_here():
            yield from self._exported()

    def _exported(self) -> Iterator[tuple[str, Tensor]]:
        for chunk in self._built.chunks:
            # Where parameters are gathered during the forward pass, they are those of the step before until then.
            chunk.start_param_sync(force_sync=True)
        tied = self._built.provider.share_embeddings_and_output_weights
        for name, tensor in self._built.bridge.export_hf_weights(self._built.chunks, show_progress=False):
            if tied and name == hf_files.OUTPUT:
                continue
            if name in (hf_files.EMBEDDING, hf_files.OUTPUT):
                tensor = tensor[: self._vocabulary]
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            yield name, tensor.detach().to(self.device, dtype, copy=True).contiguous()

    def save(self, path: Path, meta: Mapping[str, Any]) -> int:
        """Write a checkpoint durably and atomically; answers its bytes, on rank 0. `meta` counts there.

        It holds megatron's sharded state, and is a Hugging Face model directory too.
        """
        stage = path.with_name(f".scratch-sharded-{path.name}")
        lead = dist.get_rank() == 0
        if lead:
            shutil.rmtree(stage, ignore_errors=True)
            stage.mkdir(parents=True)
        dist.barrier()
        with self._offloading.weights_here():
            sharded.write(self._built, self.step, stage, self._offloading.on_host)
            weights = hf_files.on_host(self.export(), keep=lead)
        if not lead:
            return 0
        files: dict[str, checkpoint.Writer] = {
            source.name: partial(os.replace, source) for source in sorted(stage.iterdir())
        }
        files[hf_files.WEIGHTS] = lambda file: save_file(weights, file, metadata={"format": "pt"})
        files.update(hf_files.copied(Path(self._job.model_dir)))
        size = checkpoint.write(path, files, meta)
        shutil.rmtree(stage)
        return size

    def load(self, path: Path) -> dict[str, Any]:
        """Restore what `save` wrote, bit for bit, also from other parallel sizes; answers its meta.

        Raises `checkpoint.CheckpointError`.
        """
        meta = checkpoint.read_meta(path, verify=False)  # `RankedPolicy` held it to its digests
        with self._offloading.everything_here():
            self.step = sharded.read(self._built, path)
        return meta

    def close(self) -> None:
        """Leave the group; the object is of no use then."""
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        if hasattr(self, "_offloading"):  # not if making it failed
            self._offloading.drop()

    # --- the step ---

    def _update(
        self, dealt: Deal, proximal: list[Tensor] | None, reference: list[Tensor] | None, metrics: StepMetrics
    ) -> None:
        """One optimizer update from a minibatch."""
        if not dealt.tokens:
            return
        optimizer = self._built.optimizer
        for chunk in self._built.chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        own = metrics if self._speaks else StepMetrics(self.device, reference=self._reference is not None)
        count = len(dealt.rows[self._replica])

        def loss(number: int, row: Row) -> LogitsLoss:
            def closure(logits: Tensor) -> tuple[Tensor, Any]:
                if row.micro is None:
                    return logits.sum() * 0.0, None
                current, entropy = self._statistics(logits, row)
                total = objective.share_of_loss(
                    self._config.loss,
                    row.micro,
                    current=current,
                    entropy=entropy if self._config.loss.entropy_coef else entropy.detach(),
                    proximal=None if proximal is None else proximal[number],
                    reference=None if reference is None else reference[number],
                    tokens=dealt.tokens,
                    sequences=dealt.sequences,
                    metrics=own,
                )
                # megatron's schedule divides by the number of microbatches.
                return total * count, None

            return closure

        self._run(dealt.rows[self._replica], loss, forward_only=False)
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        applied = math.isfinite(norm)
        if applied:
            optimizer.step()
        metrics.update(norm, applied)

    def _score(self, dealt: Deal) -> list[Tensor]:
        """Log-probabilities float32 [n] of each of this rank's rows; empty ones but on the last pipeline stage."""

        def loss(number: int, row: Row) -> LogitsLoss:
            def closure(logits: Tensor) -> tuple[Tensor, Any]:
                values = logits.new_zeros(0) if row.micro is None else self._statistics(logits, row)[0]
                return logits.new_zeros(()), values.detach().float()

            return closure

        with torch.no_grad():
            results = self._run(dealt.rows[self._replica], loss, forward_only=True)
        return results if self._last else [torch.zeros(0) for _ in dealt.rows[self._replica]]

    def _run(self, rows: list[Row], loss: Callable[[int, Row], LogitsLoss], *, forward_only: bool) -> list[Any]:
        """The pipeline over `rows`; answers what each `loss` gave beside the loss, on the last stage."""

        def forward(numbered: Iterator[tuple[int, Row]], chunk: Any) -> tuple[Tensor, LogitsLoss]:
            number, row = next(numbered)
            ids, positions = objective.on(self.device, row.ids)[None], objective.on(self.device, row.positions)[None]
            named: dict[str, Any] = {"packed_seq_params": self._packed(row, positions[0])}
            if self._built.provider.bf16:
                named["fp32_output"] = False  # all logits at once in float32 would be most of what the step takes
            return chunk(ids, positions, None, output_processor=self._wanted(row), **named), loss(number, row)

        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(enumerate(rows)),
            model=self._built.chunks,
            num_microbatches=len(rows),
            seq_length=max(len(row.ids) for row in rows),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _packed(self, row: Row, positions: Tensor) -> PackedSeqParams:
        if not self._built.engine:
            assert self._rotation is not None
            return self._rotation.packed(positions, row.longest, layout(row.bounds, self.device))
        attended = layers.packed(objective.on(self.device, row.bounds), row.longest)
        return attended if self._rotation is None else self._rotation.packed(positions, row.longest, attended)

    def _wanted(self, row: Row) -> Callable[..., Tensor]:
        """Last of megatron's forward pass: logits [n, part of vocabulary] of the tokens that predict trainable ones."""
        source = (
            objective.on(self.device, row.source) if row.micro else torch.zeros(1, dtype=torch.long, device=self.device)
        )
        spread = self._built.provider.sequence_parallel

        def output(
            *, hidden_states: Tensor, output_layer: Any, output_weight: Any, scale_logits: Any, **_: Any
        ) -> Tensor:
            # Where ranks have a part of the row each, the output layer gathers it.
            logits, _ = output_layer(hidden_states if spread else hidden_states[source], weight=output_weight)
            return scale_logits(logits[source] if spread else logits)[:, 0]

        return output

    def _statistics(self, logits: Tensor, row: Row) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy float32 [n] of a row's trainable tokens, from [n, part of vocabulary]."""
        assert row.micro is not None
        temperature = objective.on(self.device, row.micro.temperature)
        return token_statistics(
            logits,
            objective.on(self.device, row.micro.target),
            temperature,
            vocabulary=self._vocabulary,
            group=parallel_state.get_tensor_model_parallel_group(),
        )

    def _deal(self, samples: Sequence[Sample]) -> Deal:
        multiple = self._config.megatron.tensor_parallel if self._built.provider.sequence_parallel else 1
        return deal(samples, self._replicas, self._config.microbatch_tokens, multiple=multiple)

    def _set_learning_rate(self) -> float:
        config = self._config
        rate = config.lr * schedule(config.schedule, self.step, warmup=config.warmup_steps, total=self._job.total_steps)
        for group in self._built.optimizer.param_groups:
            group["lr"] = rate
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
        return rate

    @contextlib.contextmanager
    def _initial_weights(self) -> Iterator[None]:
        """The reference model: for as long as this lasts, parameters have the values they started with."""
        if self._reference is None:
            yield
            return
        for chunk in self._built.chunks:
            chunk.start_param_sync(force_sync=True)
        live = list(self._parameters())
        current = [parameter.detach().clone() for parameter in live]
        try:
            _copy(self._reference, live)
            yield
        finally:
            _copy(current, live)

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for chunk in self._built.chunks:
            yield from chunk.parameters()

    def _join(self, world: World) -> None:
        """Make the group that megatron takes for granted. On GPUs, rank n takes the n-th from `trainer.device`."""
        if self._gpu:
            torch.cuda.set_device((gpus.number(self._config.device) or 0) + world.rank)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "nccl" if self._gpu else "gloo",
            store=FileStore(world.meeting, world.size),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=world.timeout_s),
        )


@torch.no_grad()
def _copy(values: Sequence[Tensor], parameters: Sequence[torch.nn.Parameter]) -> None:
    for value, parameter in zip(values, parameters, strict=True):
        parameter.copy_(value)
