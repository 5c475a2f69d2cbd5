from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from actors.trainer.backend import BackendError
from actors.trainer.checkpoint import CheckpointError
from actors.trainer.packing import Sample
from actors.trainer.schedule import schedule
from actors.trainer.torch_policy import TorchPolicy
from config.schema import LossConfig, TrainerConfig

Make = Callable[..., list[Sample]]


def policy(
    model_dir: Path, *, loss: dict[str, Any] | None = None, seed: int = 1, total_steps: int = 10, **settings: Any
) -> TorchPolicy:
    defaults: dict[str, Any] = {"device": "cpu", "lr": 0.01, "grad_clip": 1e9, "microbatch_tokens": 64}
    given: dict[str, Any] = defaults | settings
    config = TrainerConfig(**given, loss=LossConfig(**(loss or {})))
    return TorchPolicy(model_dir, config, seed=seed, total_steps=total_steps)


def weights(trained: TorchPolicy) -> dict[str, torch.Tensor]:
    return dict(trained.export())


def gradient(trained: TorchPolicy, samples: list[Sample]) -> dict[str, torch.Tensor]:
    """The gradient of one step, read off a plain SGD update of rate 1."""
    optimizer: Any = torch.optim.SGD(trained._parameters, lr=1.0)
    trained._optimizer = optimizer
    before = weights(trained)
    trained._config = msgspec.structs.replace(trained._config, lr=1.0)
    trained.train_step(samples)
    return {name: before[name] - tensor for name, tensor in trained.export()}


def on_policy(trained: TorchPolicy, samples: list[Sample]) -> list[Sample]:
    return [replace(s, behaviour=b) for s, b in zip(samples, trained.logprobs(samples), strict=True)]


def test_random_weights_depend_on_the_seed_alone(model_dir: Path) -> None:
    torch.manual_seed(5)
    first = weights(policy(model_dir, seed=3))
    torch.manual_seed(6)
    second = weights(policy(model_dir, seed=3))
    other = weights(policy(model_dir, seed=4))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_logprobs_are_those_of_the_model_run_on_each_sequence_alone(model_dir: Path, make_samples: Make) -> None:
    trained = policy(model_dir)
    samples = make_samples(9, temperature=0.7)
    for sample, values in zip(samples, trained.logprobs(samples), strict=True):
        ids = torch.tensor(sample.ids[None].astype(np.int64))
        with torch.no_grad():
            full = torch.log_softmax(trained.model(input_ids=ids).logits[0] / 0.7, -1)
        expected = np.zeros(len(sample.ids), dtype=np.float32)
        for at in np.nonzero(sample.loss_mask)[0]:
            expected[at] = full[at - 1, sample.ids[at]]
        np.testing.assert_allclose(values, expected, atol=2e-6)


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
def test_the_microbatch_split_changes_no_gradient(model_dir: Path, make_samples: Make, normalisation: str) -> None:
    samples = make_samples(14, seed=2)
    loss = {"normalisation": normalisation, "kl_coef": 0.1, "entropy_coef": 0.01}
    whole = gradient(policy(model_dir, loss=loss, microbatch_tokens=10_000), samples)
    for limit in (13, 40):
        split = gradient(policy(model_dir, loss=loss, microbatch_tokens=limit), samples)
        for name, tensor in whole.items():
            torch.testing.assert_close(split[name], tensor, atol=1e-5, rtol=1e-4)
    assert max(float(tensor.abs().max()) for tensor in whole.values()) > 1e-2


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
def test_the_gradient_is_that_of_the_formula_written_out(
    model_dir: Path, make_samples: Make, normalisation: str
) -> None:
    samples = make_samples(6, seed=4)
    trained = policy(model_dir, loss={"normalisation": normalisation})
    tokens = sum(int(s.loss_mask.sum()) for s in samples)
    total = torch.zeros(())
    for sample in samples:
        logits = trained.model(input_ids=torch.tensor(sample.ids[None].astype(np.int64))).logits[0, :-1]
        logp = torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.ids[1:, None].astype(np.int64)))[:, 0]
        mask, behaviour = torch.tensor(sample.loss_mask[1:]).bool(), torch.tensor(sample.behaviour[1:])
        weight = (logp.detach() - behaviour).exp().clamp(max=2.0)
        losses = -(logp - logp.detach()).exp() * sample.advantage * weight
        total = total + (
            losses[mask].sum() / tokens if normalisation == "token" else losses[mask].mean() / len(samples)
        )
    total.backward()
    expected = {name: p.grad.clone() for name, p in trained.model.named_parameters() if p.grad is not None}
    trained.model.zero_grad()
    for name, tensor in gradient(trained, samples).items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-5, rtol=1e-3)


def test_packed_sequences_have_the_logprobs_and_gradients_of_padded_ones(model_dir: Path, make_samples: Make) -> None:
    samples = make_samples(9, seed=3)
    loss = {"entropy_coef": 0.1, "kl_coef": 0.1}
    padded, packed = policy(model_dir, loss=loss), policy(model_dir, loss=loss, packed=True)
    for mine, theirs in zip(packed.logprobs(samples), padded.logprobs(samples), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    expected = gradient(padded, samples)
    for name, tensor in gradient(packed, samples).items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-5, rtol=1e-3)
    assert packed.train_step(samples)["padding_fraction"] == 0.0 < padded.train_step(samples)["padding_fraction"]


def test_a_model_whose_attention_can_not_be_packed_is_refused(model_dir: Path, tmp_path: Path) -> None:
    Qwen2Config(
        vocab_size=23, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, use_sliding_window=True, sliding_window=4, max_window_layers=1,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    with pytest.raises(BackendError, match=r"trainer.packed=true: qwen2 has attention that can't be packed"):
        policy(tmp_path, packed=True)


def test_recomputed_activations_give_the_same_step(model_dir: Path, make_samples: Make) -> None:
    samples = make_samples(6)
    kept, again = policy(model_dir, packed=True), policy(model_dir, packed=True, activation_checkpointing=True)
    assert again.train_step(samples) == kept.train_step(samples)
    for name, tensor in weights(again).items():
        assert torch.equal(tensor, weights(kept)[name])


def test_training_raises_the_probability_of_what_was_good(model_dir: Path, make_samples: Make) -> None:
    trained = policy(model_dir)
    samples = on_policy(trained, make_samples(8))
    signed = [replace(s, advantage=1.0 if i % 2 else -1.0) for i, s in enumerate(samples)]
    trained.train_step(signed)
    change = [
        after.sum() - before.behaviour.sum() for after, before in zip(trained.logprobs(signed), signed, strict=True)
    ]
    assert sum(change[1::2]) > 0 > sum(change[::2])


def test_an_unchanged_policy_has_no_mismatch_and_ratio_one(model_dir: Path, make_samples: Make) -> None:
    trained = policy(model_dir)
    metrics = trained.train_step(on_policy(trained, make_samples(8)))
    assert metrics["mismatch_exp"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["clip_fraction"] == metrics["is_capped_fraction"] == 0.0


def test_mismatch_is_split_by_lag(model_dir: Path, make_samples: Make) -> None:
    trained = policy(model_dir)
    samples = on_policy(trained, make_samples(8))
    stale = [replace(s, lag=i % 2, behaviour=s.behaviour - (i % 2) * s.loss_mask) for i, s in enumerate(samples)]
    metrics = trained.train_step(stale)
    assert metrics["mismatch_exp_lag0"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["mismatch_exp_lagged"] == pytest.approx(np.e, rel=1e-4)
    assert metrics["is_weight_max"] == pytest.approx(2.0)
    share = sum(s.loss_mask.sum() for s in stale[1::2]) / sum(s.loss_mask.sum() for s in stale)
    assert metrics["is_capped_fraction"] == pytest.approx(share)
    fresh = trained.train_step([replace(s, lag=0) for s in stale])
    assert "mismatch_exp_lagged" not in fresh


def test_the_proximal_policy_is_the_one_before_the_first_minibatch(model_dir: Path, make_samples: Make) -> None:
    trained = policy(model_dir, minibatches=2, epochs=2, lr=0.05)
    samples = on_policy(trained, make_samples(12))
    metrics = trained.train_step(samples)
    assert metrics["updates"] == 4
    assert metrics["mismatch_exp"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ratio_mean"] != pytest.approx(1.0, abs=1e-3)
    assert metrics["clip_fraction"] > 0


def test_the_reference_is_the_initial_policy(model_dir: Path, make_samples: Make, tmp_path: Path) -> None:
    trained = policy(model_dir, loss={"kl_coef": 0.1})
    samples = make_samples(8)
    assert trained.train_step(samples)["kl_reference"] == pytest.approx(0.0, abs=1e-7)
    moved = trained.train_step(samples)["kl_reference"]
    assert moved > 1e-5
    trained.save(tmp_path / "c", {})
    restored = policy(model_dir, loss={"kl_coef": 0.1})
    restored.load(tmp_path / "c")
    assert restored.train_step(samples)["kl_reference"] == trained.train_step(samples)["kl_reference"] > 1e-5


def test_an_update_whose_gradient_is_not_finite_is_skipped_and_counted(
    model_dir: Path, make_samples: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = policy(model_dir, minibatches=2)
    samples = make_samples(8)
    trained.train_step(samples)
    before = weights(trained)
    hook = trained.model.model.norm.weight.register_hook(lambda grad: grad * float("nan"))
    metrics = trained.train_step(samples)
    hook.remove()
    assert metrics["skipped_updates"] == metrics["updates"] == 2
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(trained).items())
    assert trained.train_step(samples)["skipped_updates"] == 0
    assert trained.step == 3


def test_gradients_are_clipped_to_the_norm(model_dir: Path, make_samples: Make) -> None:
    samples = make_samples(8)
    free = gradient(policy(model_dir), samples)
    held = gradient(policy(model_dir, grad_clip=0.01), samples)
    norm = sum(float(tensor.square().sum()) for tensor in free.values()) ** 0.5
    assert norm > 0.01
    for name, tensor in held.items():
        torch.testing.assert_close(tensor, free[name] * 0.01 / norm, atol=1e-6, rtol=1e-2)


def test_a_batch_with_nothing_to_train_on_changes_nothing(model_dir: Path, make_samples: Make) -> None:
    trained = policy(model_dir)
    before = weights(trained)
    empty = [replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in make_samples(2)]
    assert trained.train_step(empty)["tokens"] == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(trained).items())


def test_exported_tensors_are_copies_with_tied_ones_once(model_dir: Path, make_samples: Make) -> None:
    trained = policy(model_dir)
    exported = weights(trained)
    kept = {name: tensor.clone() for name, tensor in exported.items()}
    trained.train_step(make_samples(8))
    assert all(torch.equal(exported[name], kept[name]) for name in kept)
    assert "lm_head.weight" not in exported
    assert set(exported) | {"lm_head.weight"} == set(trained.model.state_dict())


def test_bfloat16_is_exported_and_trains(model_dir: Path, make_samples: Make) -> None:
    trained = TorchPolicy(model_dir, TrainerConfig(device="cpu", lr=0.01), dtype="bfloat16", seed=1)
    metrics = trained.train_step(make_samples(8))
    assert np.isfinite(metrics["loss"])
    assert metrics["skipped_updates"] == 0
    assert {tensor.dtype for tensor in weights(trained).values()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in trained.model.parameters()} == {torch.float32}


def test_resume_is_bit_equal(model_dir: Path, make_samples: Make, tmp_path: Path) -> None:
    settings = {"minibatches": 2, "schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.1, "total_steps": 6}
    batches = [make_samples(8, seed=seed) for seed in range(4)]
    straight = policy(model_dir, **settings)
    for batch in batches[:2]:
        straight.train_step(batch)
    size = straight.save(tmp_path / "c", {"step": 2, "version": 5, "batches": [0, 1]})
    resumed = policy(model_dir, **settings, seed=9)
    resumed._seed = 1
    assert resumed.load(tmp_path / "c") == {"step": 2, "version": 5, "batches": [0, 1]}
    assert size == sum(file.stat().st_size for file in (tmp_path / "c").iterdir())
    for batch in batches[2:]:
        assert straight.train_step(batch) == resumed.train_step(batch)
    for name, tensor in weights(straight).items():
        assert torch.equal(tensor, weights(resumed)[name]), name


def test_a_checkpoint_is_a_model_directory(model_dir: Path, make_samples: Make, tmp_path: Path) -> None:
    trained = policy(model_dir)
    trained.train_step(make_samples(8))
    trained.save(tmp_path / "c", {})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    for name, tensor in weights(trained).items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_a_checkpoint_of_another_model_is_refused(model_dir: Path, tmp_path: Path) -> None:
    trained = policy(model_dir)
    trained.save(tmp_path / "c", {})
    other = policy(model_dir)
    other.model.model.norm.weight = torch.nn.Parameter(torch.ones(17))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \(16,\), expected \(17,\)"):
        other.load(tmp_path / "c")


def test_a_torn_checkpoint_is_refused_and_leaves_the_policy_as_it_was(model_dir: Path, tmp_path: Path) -> None:
    trained = policy(model_dir)
    trained.save(tmp_path / "c", {})
    data = (tmp_path / "c" / "optimizer.pt").read_bytes()
    (tmp_path / "c" / "optimizer.pt").write_bytes(data[:-1])
    other = policy(model_dir, seed=2)
    before = weights(other)
    with pytest.raises(CheckpointError, match=r"optimizer\.pt"):
        other.load(tmp_path / "c")
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(other).items())


def test_schedules_rise_over_the_warmup_and_fall_to_zero() -> None:
    assert [schedule("constant", step, warmup=3, total=9) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert [schedule("linear", step, warmup=0, total=4) for step in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert schedule("cosine", 5, warmup=0, total=10) == pytest.approx(0.5)
    assert schedule("cosine", 10, warmup=2, total=10) == pytest.approx(0.0)


def test_the_reported_rate_follows_the_schedule(model_dir: Path, make_samples: Make) -> None:
    trained = policy(model_dir, schedule="linear", total_steps=2, lr=0.5)
    assert [trained.train_step(make_samples(4))["lr"] for _ in range(2)] == [0.5, 0.25]
