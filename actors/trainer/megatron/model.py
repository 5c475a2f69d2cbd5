"""A model and its optimizer, made by megatron-bridge from a Hugging Face directory and spread over the ranks."""

# pyright: reportMissingImports=false
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.utils import unwrap_model

from actors.trainer.backend import BackendError
from actors.trainer.megatron import installation, kernels, layers
from config.schema import TrainerConfig

UNUSED = (
    "masked_softmax_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "persist_layer_norm",
    "gradient_accumulation_fusion",
    "apply_rope_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "cross_entropy_loss_fusion",
)
"""Kernels that come with Transformer Engine or Apex."""

YARN = {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_correction_range_round_to_int": True}
"""What transformers takes for what a model's configuration leaves out; the bridge takes None."""


@dataclass(frozen=True)
class Built:
    """This rank's part. `chunks` are megatron's model chunks, wrapped for data parallelism.

    `engine`: their layers are Transformer Engine's.
    """

    bridge: Any
    provider: Any
    chunks: list[Any]
    optimizer: Any
    engine: bool
    rotation: kernels.Rotation


def build(path: Path, config: TrainerConfig, *, dtype: torch.dtype, seed: int, gpu: bool) -> Built:
    """Make the model with the weights at `path` and an optimizer for it. Collective.

    Raises `BackendError` for a model that can't be spread as the configuration wants it.
    """
    bridge = AutoBridge.from_hf_pretrained(str(path))
    provider: Any = bridge.to_megatron_provider(load_weights=True)
    engine = kernels.transformer_engine(installed=installation.transformer_engine(), gpu=gpu, dtype=dtype)
    rotation = _configure(provider, config, dtype, gpu, engine)
    _check(provider, config)
    provider.finalize()
    if not parallel_state.is_initialized():
        provider.initialize_model_parallel(seed=seed)
    sharding = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.megatron.overlap,
        overlap_param_gather=config.megatron.overlap,
    )
    chunks = provider.provide_distributed_model(ddp_config=sharding, use_cpu_initialization=not gpu)
    _check_kind(chunks)
    _check_buckets(chunks)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            clip_grad=config.grad_clip,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=config.megatron.overlap,
        ),
        chunks,
    )
    allocate(optimizer)
    settings = chunks[0].config
    settings.finalize_model_grads_func = _finalize
    settings.grad_scale_func = optimizer.scale_loss
    if config.megatron.overlap:
        settings.no_sync_func = chunks[0].no_sync
        settings.grad_sync_func = chunks[0].start_grad_sync
        settings.param_sync_func = chunks[0].start_param_sync
    return Built(bridge, provider, chunks, optimizer, engine, rotation)


def optimizers(optimizer: Any) -> list[Any]:
    """The optimizers of a chain: one for the dense parameters, one for the experts."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def allocate(optimizer: Any) -> None:
    """Give torch's AdamW its moments now: without them megatron can save and restore no state."""
    for part in optimizers(optimizer):
        if not isinstance(part.optimizer, torch.optim.AdamW):
            continue
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter.data)
                state["exp_avg_sq"] = torch.zeros_like(parameter.data)


def _configure(provider: Any, config: TrainerConfig, dtype: torch.dtype, gpu: bool, engine: bool) -> kernels.Rotation:
    sizes = config.megatron
    provider.tensor_model_parallel_size = sizes.tensor_parallel
    provider.pipeline_model_parallel_size = sizes.pipeline_parallel
    provider.expert_model_parallel_size = sizes.expert_parallel
    provider.expert_tensor_parallel_size = 1 if provider.num_moe_experts else None
    provider.context_parallel_size = 1
    provider.sequence_parallel = bool(provider.num_moe_experts) and sizes.tensor_parallel > 1
    provider.params_dtype = provider.pipeline_dtype = dtype
    provider.bf16, provider.fp16 = dtype == torch.bfloat16, False
    provider.use_cpu_initialization = not gpu
    # Loading weights turns it off, and with it the marks by which the gradient norm knows split parameters.
    provider.perform_initialization = True
    provider.attention_dropout = provider.hidden_dropout = 0.0
    # The loss comes divided by what the whole update trains on: gradients are summed over ranks, and nothing more.
    provider.calculate_per_token_loss = True
    provider.variable_seq_lengths = True
    provider.should_pad_vocab = True
    provider.make_vocab_size_divisible_by = 1
    provider.moe_token_dispatcher_type = "alltoall"  # the default refuses rows of varying length, dense model or not
    if provider.num_moe_experts:
        provider.moe_router_load_balancing_type = "none"
        provider.moe_aux_loss_coeff = 0.0
    for name, usual in YARN.items():
        if provider.position_embedding_type == "yarn" and getattr(provider, name) is None:
            setattr(provider, name, usual)
    rotation = kernels.rotation(provider, engine=engine, kernel=rope_utils.fused_apply_rotary_pos_emb_thd is not None)
    if not engine:
        provider.transformer_layer_spec = layers.blocks
        for name in UNUSED:
            setattr(provider, name, False)
    if rotation != "megatron":
        provider.apply_rope_fusion = rotation == "fused"  # Llama's bridge asks for it, Qwen's do not
    return rotation


def _check(provider: Any, config: TrainerConfig) -> None:
    sizes = config.megatron
    experts = provider.num_moe_experts
    rules = [
        (
            provider.num_query_groups % sizes.tensor_parallel == 0,
            f"trainer.megatron.tensor_parallel={sizes.tensor_parallel} must divide the model's "
            f"{provider.num_query_groups} key-value heads",
        ),
        (
            provider.num_layers % sizes.pipeline_parallel == 0,
            f"trainer.megatron.pipeline_parallel={sizes.pipeline_parallel} must divide the model's "
            f"{provider.num_layers} layers",
        ),
        (
            sizes.expert_parallel == 1 or ((experts or 0) % sizes.expert_parallel == 0 and experts),
            f"trainer.megatron.expert_parallel={sizes.expert_parallel} must divide the model's "
            f"{experts or 0} experts" + ("" if experts else ": it is dense, use 1"),
        ),
    ]
    problems = [problem for holds, problem in rules if not holds]
    if problems:
        raise BackendError("; ".join(problems))


def _check_kind(chunks: list[Any]) -> None:
    """Refuse a model that has no place to say which logits are wanted."""
    for chunk in unwrap_model(chunks):
        if not isinstance(chunk, GPTModel):
            raise BackendError(
                f"the megatron backend trains megatron-core's GPTModel, and this model is a {type(chunk).__name__} "
                "there; use trainer.backend=torch"
            )


def _check_buckets(chunks: list[Any]) -> None:
    """Refuse a layout whose optimizer state megatron-core would save with a hole: padding between two buckets."""
    for chunk in chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            for bucket in buffer.buckets[:-1]:
                size, padded = bucket.numel_unpadded, bucket.grad_data.numel()
                if size != padded:
                    raise BackendError(
                        "megatron-core can't save the optimizer state of this model with these trainer.megatron sizes: "
                        f"a bucket of {size} parameters is padded to {padded}, with others behind it; use another "
                        "pipeline_parallel, or fewer data-parallel ranks"
                    )


def _finalize(chunks: list[Any], tokens: Any = None, *rest: Any, **named: Any) -> None:
    """Combine gradients over ranks, without dividing by a number of tokens."""
    finalize_model_grads(chunks, None, *rest, **named)
