"""Parameters of a model under their Hugging Face names, stored fused for speed.

q, k and v of a layer share one matrix, and so do gate and up; the named parameters are row ranges (contiguous views)
of it, so a transfer or a checksum by name touches the memory that the forward reads. A tied head has no entry.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from actors.engine.inside import mix64
from actors.engine.torch_server.config import ModelConfig
from contracts.weights import Checksum

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class BadWeights(ValueError):
    """Tensors that do not fit the model: names the tensor and both shapes, or the missing names."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One block. Matrices are (out, in); biases and norms of q and k are None where the family has none."""

    norm_in: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    norm_mlp: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class Weights:
    """All parameters: `named` maps each Hugging Face name to a contiguous tensor; `layers` is what the forward uses."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.named: dict[str, torch.Tensor] = {}
        self._given: list[tuple[torch.UntypedStorage, int]] = []
        self.embed = self._single("model.embed_tokens.weight", config.vocab, config.hidden)
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(config.layers)]
        self.norm = self._single("model.norm.weight", config.hidden)
        self.head = self.embed if config.tied else self._single("lm_head.weight", config.vocab, config.hidden)

    def randomise(self, seed: int) -> None:
        """Normal matrices, zero biases, unit norms; the same for the same seed, dtype and device."""
        source = torch.Generator(self.device).manual_seed(seed)
        for name, tensor in self.named.items():
            if tensor.dim() == 2:
                tensor.normal_(0.0, self.config.init_std, generator=source)
            else:
                tensor.fill_(0.0 if name.endswith("bias") else 1.0)

    def load(self, path: Path) -> None:
        """Read the safetensors files of `path`. Raises `BadWeights` on a shape mismatch or a missing parameter."""
        seen: set[str] = set()
        for name, tensor in _stored(path):
            seen.add(name)
            self.check(((name, tensor.shape),))
            self.assign(name, tensor)
        missing = sorted(self.named.keys() - seen)
        if missing:
            raise BadWeights(f"{path} lacks {len(missing)} parameters, first {missing[0]!r}")

    def check(self, items: Iterable[tuple[str, Iterable[int]]]) -> None:
        """Raise `BadWeights` for the first known name whose shape differs; unknown names pass."""
        for name, shape in items:
            own = self.named.get(name)
            if own is not None and tuple(shape) != tuple(own.shape):
                raise BadWeights(f"{name} has shape {tuple(own.shape)}, got {tuple(shape)}")

    def assign(self, name: str, tensor: torch.Tensor) -> bool:
        """Copy `tensor` (any float dtype or device) over the parameter; False when the model has no such name."""
        own = self.named.get(name)
        if own is None:
            return False
        own.copy_(tensor)
        return True

    @property
    def bytes(self) -> int:
        """What the parameters hold now; 0 after `give_back`."""
        return sum(storage.nbytes() for storage in self._storages())

    def give_back(self) -> None:
        """Free the memory. Nothing may use a parameter before `take`."""
        self._given = [(storage, storage.nbytes()) for storage in self._storages()]
        for storage, _ in self._given:
            storage.resize_(0)

    def take(self) -> None:
        """Have memory again. Parameters are not a number until each is loaded."""
        for storage, size in self._given:
            storage.resize_(size)
        self._given = []
        for tensor in self.named.values():
            tensor.fill_(float("nan"))

    def _storages(self) -> list[torch.UntypedStorage]:
        """Each once: several parameters may share one."""
        storages = [tensor.untyped_storage() for tensor in self.named.values()]
        return list({storage._cdata: storage for storage in storages}.values())

    def checksums(self, kind: Checksum = "xxh3_128") -> dict[str, str]:
        """Name -> hex checksum of the parameter's bytes in the engine's dtype."""
        if kind == "mix64":
            return dict(zip(self.named, mix64.checksums(list(self.named.values())), strict=True))
        return {name: _xxh3(tensor) for name, tensor in self.named.items()}

    def _single(self, name: str, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.named[name] = tensor
        return tensor

    def _fused(self, prefix: str, suffix: str, rows: Mapping[str, int], *rest: int) -> torch.Tensor:
        whole = torch.empty((sum(rows.values()), *rest), dtype=self.dtype, device=self.device)
        start = 0
        for name, count in rows.items():
            self.named[f"{prefix}{name}.{suffix}"] = whole[start : start + count]
            start += count
        return whole

    def _layer(self, p: str) -> Layer:
        c = self.config
        queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
        qkv = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        gate_up = {"gate_proj": c.intermediate, "up_proj": c.intermediate}
        attn, mlp = p + "self_attn.", p + "mlp."
        return Layer(
            norm_in=self._single(p + "input_layernorm.weight", c.hidden),
            qkv=self._fused(attn, "weight", qkv, c.hidden),
            qkv_bias=self._fused(attn, "bias", qkv) if c.qkv_bias else None,
            q_norm=self._single(attn + "q_norm.weight", c.head_dim) if c.qk_norm else None,
            k_norm=self._single(attn + "k_norm.weight", c.head_dim) if c.qk_norm else None,
            out=self._single(attn + "o_proj.weight", c.hidden, queries),
            out_bias=self._single(attn + "o_proj.bias", c.hidden) if c.out_bias else None,
            norm_mlp=self._single(p + "post_attention_layernorm.weight", c.hidden),
            gate_up=self._fused(mlp, "weight", gate_up, c.hidden),
            gate_up_bias=self._fused(mlp, "bias", gate_up) if c.mlp_bias else None,
            down=self._single(mlp + "down_proj.weight", c.hidden, c.intermediate),
            down_bias=self._single(mlp + "down_proj.bias", c.hidden) if c.mlp_bias else None,
        )


def _stored(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    index = path / "model.safetensors.index.json"
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = sorted(file.name for file in path.glob("*.safetensors"))
    if not files:
        raise BadWeights(f"{path} holds no *.safetensors file: use --load-format dummy for random weights")
    for file in files:
        with safe_open(path / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                yield name, opened.get_tensor(name)


def _xxh3(tensor: torch.Tensor) -> str:
    """Of its bytes, which numpy does not get to see: memory that it knows can't be given back any more."""
    import xxhash

    flat = tensor.detach().cpu().contiguous()
    return xxhash.xxh3_128_hexdigest(
        (ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr()) if flat.nbytes else b""
    )
