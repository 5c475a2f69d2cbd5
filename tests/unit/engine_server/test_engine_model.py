"""The forward against transformers: same greedy ids, logprobs within 1e-4."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engine.torch_server.config import UnsupportedModel, parse_config, read_config
from actors.engine.torch_server.weights import BadWeights, Weights

PROMPTS = [[3, 14, 15, 92, 65], [35, 89, 79], [7] * 40, list(range(3, 150))]
KINDS = ["llama", "llama3", "qwen2", "qwen3"]


def expected(model: Any, prompt: list[int], new: int) -> tuple[list[int], list[float], list[float]]:
    """Greedy ids and logprobs, and the prompt's logprobs, by full forwards of the reference."""
    ids, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(new):
            last = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(last.argmax()))
            logprobs.append(float(last.max()))
        whole = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    scored = [float(whole[i, token]) for i, token in enumerate(prompt[1:])]
    return ids[len(prompt) :], logprobs, scored


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_ids_and_logprobs_equal_the_reference(
    kind: str, saved: Callable[..., Any], stepped: Callable[..., Any]
) -> None:
    engine = stepped(kind)
    made = [engine.add(prompt, 8, start=0) for prompt in PROMPTS]
    engine.run()
    for prompt, g in zip(PROMPTS, made, strict=True):
        ids, logprobs, scored = expected(saved(kind)[0], prompt, 8)
        assert g.tokens[g.prompt :] == ids
        assert g.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert g.prompt_logprobs == pytest.approx(scored, abs=1e-4)


@pytest.mark.parametrize("chunk", [16, 64])
def test_a_prompt_longer_than_a_chunk_is_computed_in_pieces_to_the_same_end(
    chunk: int, saved: Callable[..., Any], stepped: Callable[..., Any]
) -> None:
    prompt = PROMPTS[3]
    g = stepped(chunk=chunk).alone(prompt, 5, start=2)
    ids, logprobs, scored = expected(saved("llama")[0], prompt, 5)
    assert g.tokens[g.prompt :] == ids
    assert g.logprobs == pytest.approx(logprobs, abs=1e-4)
    assert g.prompt_logprobs == pytest.approx(scored[2:], abs=1e-4)


def test_parameter_names_are_the_checkpoints_and_views_of_fused_memory(saved: Callable[..., Any]) -> None:
    for kind in KINDS:
        model, path = saved(kind)
        weights = Weights(read_config(path), torch.float32, torch.device("cpu"))
        weights.load(path)
        names = {name for name, _ in model.named_parameters()}
        assert set(weights.named) == names
        assert ("lm_head.weight" in names) == (kind != "qwen2")
        own = "model.layers.1.self_attn.k_proj.weight"
        weights.assign(own, torch.zeros_like(weights.named[own]))
        queries = 4 * weights.config.head_dim
        assert weights.layers[1].qkv[queries : queries * 3 // 2].abs().max() == 0
        assert weights.layers[1].qkv[:queries].abs().max() > 0


def test_checksums_tell_one_changed_bit(saved: Callable[..., Any]) -> None:
    weights = Weights(read_config(saved("llama")[1]), torch.bfloat16, torch.device("cpu"))
    weights.randomise(3)
    before = weights.checksums()
    weights.named["model.norm.weight"].view(torch.int16)[5] ^= 1
    after = weights.checksums()
    assert {name for name in before if before[name] != after[name]} == {"model.norm.weight"}


def test_random_weights_repeat_by_seed(saved: Callable[..., Any]) -> None:
    made = []
    for seed in (3, 3, 4):
        weights = Weights(read_config(saved("qwen2")[1]), torch.float32, torch.device("cpu"))
        weights.randomise(seed)
        made.append(weights.checksums())
    assert made[0] == made[1]
    assert made[0] != made[2]


def test_a_checkpoint_that_lacks_a_parameter_or_has_another_shape_is_refused(
    saved: Callable[..., Any], tmp_path: Path
) -> None:
    config = json.loads((saved("llama")[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    (tmp_path / "model.safetensors").symlink_to(saved("llama")[1] / "model.safetensors")
    weights = Weights(read_config(tmp_path), torch.float32, torch.device("cpu"))
    with pytest.raises(BadWeights, match=r"lacks 9 parameters, first 'model.layers.2"):
        weights.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(BadWeights, match=r"has shape \(64, 64\), got \(64, 96\)"):
        Weights(read_config(tmp_path), torch.float32, torch.device("cpu")).load(tmp_path)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type"),
        ({"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_a_model_outside_the_family_is_refused_by_the_field(
    change: dict[str, Any], field: str, saved: Callable[..., Any]
) -> None:
    config = json.loads((saved("llama")[1] / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=field):
        parse_config(config | change, {})


def test_the_older_form_of_rope_settings_reads_alike(saved: Callable[..., Any]) -> None:
    config = json.loads((saved("llama3")[1] / "config.json").read_text())
    rope = config.pop("rope_parameters")
    older = config | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert parse_config(older, {}).rope == read_config(saved("llama3")[1]).rope
    assert parse_config(config | {"rope_theta": 5e5}, {}).rope.theta == 5e5


def test_end_tokens_come_from_both_config_files(saved: Callable[..., Any]) -> None:
    config = json.loads((saved("llama")[1] / "config.json").read_text())
    assert parse_config(config, {"eos_token_id": [5, 6]}).eos == {2, 5, 6}
