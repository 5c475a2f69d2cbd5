"""Configuration: layers merge in order, and every mistake is a sentence that names the key and the fix."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from config import loading
from config.checks import is_text, leaves
from config.loading import ConfigError
from config.rules import across_fields
from config.schema import RunConfig


def problems(recipe: str | Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loading.load(recipe, overrides)
    return str(caught.value)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_every_shipped_recipe_is_valid_and_described() -> None:
    found = loading.recipes()
    assert {"quickstart", "smollm2-cpu"} <= {recipe.name for recipe in found}
    for recipe in found:
        assert loading.load(recipe.name).description == recipe.description != ""


def test_a_dumped_configuration_loads_to_an_equal_one(tmp_path: Path) -> None:
    config = loading.load("quickstart", ["engine.kind=external", "engine.urls=[http://a:1,http://b:2]", "seed=7"])
    again = loading.load(write(tmp_path / "config.yaml", loading.dump(config)))
    assert again == config
    assert loading.digest(again) == loading.digest(config)
    assert loading.digest(loading.load("quickstart")) != loading.digest(config)


def test_overrides_win_over_the_recipe_and_the_last_one_wins() -> None:
    config = loading.load("quickstart", ["trainer.lr=1e-5", "steps=3", "steps=4", "producer.args.max_n=31"])
    assert (config.trainer.lr, config.steps) == (1e-5, 4)
    assert config.producer.args["max_n"] == 31
    assert config.producer.args["min_n"] == 1


def test_a_recipe_extends_shipped_and_neighbouring_ones(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "extends: quickstart\nsteps: 7\nproducer: {args: {max_n: 9}}\n")
    config = loading.load(write(tmp_path / "mine.yaml", "extends: base.yaml\ntrainer: {lr: 1e-4}\n"))
    assert (config.steps, config.trainer.lr, config.rollout.samples) == (7, 1e-4, 16)
    assert config.producer.args == {"dataset": "count_bits", "min_n": 1, "max_n": 9}
    assert config.name == "mine"


def test_recipes_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "extends: b.yaml\n")
    path = write(tmp_path / "b.yaml", "extends: a.yaml\n")
    assert "b -> a -> b" in problems(path)


def test_an_unknown_recipe_names_the_nearest_and_all() -> None:
    said = problems("quikstart")
    assert "did you mean quickstart?" in said
    assert "smollm2-cpu" in said
    assert "no such file" in problems("nowhere/quickstart.yaml")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.lrr=1", "trainer.lrr: no such key; did you mean trainer.lr? The keys of trainer are backend,"),
        ("lr=1", "lr: no such key; did you mean trainer.lr? The keys at the top are name,"),
        ("trainer.loss.clip=1", "did you mean trainer.loss.clip_"),
        ("buffer.samples=1", "buffer.samples: no such key; did you mean buffer.sampler? The keys of buffer are"),
        ("trainer.nosuch=1", "trainer.nosuch: no such key. The keys of trainer are backend,"),
        ("trainer.temperature=1", "trainer.temperature: no such key; did you mean rollout.temperature? The keys of"),
        ("zzz=1", "zzz: no such key. The keys at the top"),
        ("steps=many", "steps=many: expected a whole number from 1 to 100000000"),
        ("steps=0", "steps=0: expected a whole number from 1 to 100000000; the least is 1"),
        ("seed=true", "seed=true: expected a whole number"),
        ("trainer.lr=0", "trainer.lr=0: expected a number above 0 and up to 10"),
        ("rollout.temperature=.nan", "rollout.temperature=nan: expected a"),
        ("buffer.group_policy=keep", "buffer.group_policy=keep: expected one of drop, replace, shrink, wait"),
        ("trainer.betas=[1]", "trainer.betas=[1]: expected a list of 2: a number from 0 to 1, a number"),
        ("engine.urls=[a,1]", "engine.urls=['a', 1]: expected a list of which each is text: Expected `str`"),
        ("engine=torch", "engine=torch: engine is a section, not a value: set its keys, as in engine.kind=..., or"),
        ("engine=null", "engine=null: engine is a section, not a value"),
        ("engine=[1]", "engine=[1]: engine is a section, not a value"),
        ("rollout.attempts=3", "rollout.attempts=3: rollout.attempts is a section, not a value: set its keys, as in"),
        ("producer.args=[1]", "producer.args=[1]: expected keys and values, such as producer.args.KEY=VALUE"),
        ("model.params.vocabulary=[1]", "model.params.vocabulary=[1]: a list and keys with values can't be merged"),
        ("steps=${oc.env:SLUICE_NO_SUCH}", "on the command line: Environment variable 'SLUICE_NO_SUCH' not found"),
        ("target_reward=high", "target_reward=high: expected a number from -1000000 to 1000000 or null"),
        ("gateway.port=70000", "gateway.port=70000: expected a whole number from 0 to 65535; the most is 65535"),
        (
            "trainer.ranks=null",
            "trainer.ranks=null: expected a whole number from 1 to 256; leave it out for the default",
        ),
        (
            "trainer.ranks=None",
            "trainer.ranks=None: expected a whole number from 1 to 256; leave it out for the default",
        ),
        ("trainer.ranks=abc", "trainer.ranks=abc: expected a whole number from 1 to 256"),
        ("trainer.ranks=1.5", "trainer.ranks=1.5: expected a whole number from 1 to 256"),
        ("trainer.ranks=100000", "trainer.ranks=100000: expected a whole number from 1 to 256; the most is 256"),
        ("engine.count=100000", "engine.count=100000: expected a whole number from 1 to 1024; the most is 1024"),
        ("refit.deadline_s=-3", "refit.deadline_s=-3: expected a number above 0 and up to 604800"),
        ("rollout.max_new_tokens=1000000000", "expected a whole number from 1 to 1048576; the most is 1048576"),
        ("rollout.samples=129", "rollout.samples=129: expected a whole number from 2 to 128; the most is 128"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_what_is_expected(override: str, expected: str) -> None:
    assert expected in problems("quickstart", override)


@pytest.mark.parametrize("override", ["steps", "=3", "a b=3", ".steps=3", "steps.=3", "--steps=3"])
def test_an_override_without_key_and_value_is_refused(override: str) -> None:
    assert f"override {override!r}: expected key=value" in problems("quickstart", override)


def test_an_override_that_is_no_yaml_is_refused() -> None:
    assert "the value is no YAML" in problems("quickstart", "producer.args={a: [}")


def test_all_problems_are_told_at_once() -> None:
    said = problems("quickstart", "steps=0", "trainer.lrr=1", "buffer.group_policy=x").splitlines()
    assert len(said) == 3


def test_text_settings_take_numbers_as_they_were_typed() -> None:
    config = loading.load("quickstart", ["name=2024", "run_dir=7", "engine.python=0", "model.source=a:b=c"])
    assert (config.name, config.run_dir, config.engine.python) == ("2024", "7", "0")
    assert config.model.source == "a:b=c"
    assert loading.load("quickstart", ["run_dir=null"]).run_dir is None


def test_another_choice_does_not_inherit_what_belonged_to_the_former(tmp_path: Path) -> None:
    assert loading.load("quickstart").model.params
    other = loading.load("quickstart", ["model.source=/models/x", "producer.name=other"])
    assert (other.model.params, other.producer.args) == ({}, {})
    same = loading.load("quickstart", ["model.source=random", "model.params.width=64"])
    assert same.model.params["layers"] == loading.load("quickstart").model.params["layers"]
    child = write(tmp_path / "c.yaml", "extends: quickstart\nproducer: {name: other, args: {a: 1}}\n")
    assert loading.load(child).producer.args == {"a": 1}


def test_sync_means_no_staleness() -> None:
    assert loading.load("quickstart", ["buffer.max_staleness=4"]).buffer.max_staleness == 4
    assert loading.load("quickstart", ["sync=true"]).buffer.max_staleness == 0
    assert "leave one out" in problems("quickstart", "sync=true", "buffer.max_staleness=2")


def test_external_engines_are_counted_by_their_urls() -> None:
    config = loading.load("quickstart", ["engine={kind: external, urls: [http://a, http://b], count: 2}"])
    assert config.engine.count == 2
    assert "engine.count=2, engine.urls has 1" in problems(
        "quickstart", "engine.kind=external", "engine.urls=[http://a]"
    )
    assert "engine.urls is for engine.kind=external" in problems("quickstart", "engine.urls=[http://a]")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["refit.deadline_s=10"], "refit.drain_deadline_s=30 must be under refit.deadline_s=10"),
        (["refit.drain=in_flight", "engine.kind=sglang"], "refit.drain=in_flight needs engine.kind=torch"),
        (["refit.drain=in_flight", "refit.verify=probe"], "refit.verify=probe generates before the commit"),
        (["refit.verify=fleet", "engine.count=1"], "engine.count=1 leaves nothing to compare: use digest, or more"),
        (
            ["trainer.offload=all", "trainer.device=cpu"],
            "trainer.offload=all makes room on a GPU, but trainer.device=cpu",
        ),
        (["rollout.deadline_s=5"], "rollout.score_deadline_s=30 must not exceed rollout.deadline_s=5"),
        (["trainer.minibatches=1000"], "trainer.minibatches=1000 can't split a batch of 512"),
        (["trainer.betas=[0.9, 1.0]"], "trainer.betas=[0.9, 1.0]: each must be"),
        (["buffer.window=2"], "buffer.window=2 is for buffer.sampler=windowed or a plug-in: in_order has no use"),
        (["buffer.sampler=windowed", "buffer.window=99"], "buffer.window=99 must not exceed 33 = 1 + buffer.groups x"),
        (
            ["trainer.megatron.overlap=true"],
            "trainer.megatron is for trainer.backend=megatron, but the backend is torch",
        ),
        (
            ["trainer.backend=megatron", "trainer.ranks=3", "trainer.megatron.tensor_parallel=2"],
            "trainer.ranks=3 must be a multiple of trainer.megatron.tensor_parallel=2 x pipeline_parallel=1 = 2",
        ),
        (
            ["trainer.backend=megatron", "trainer.ranks=4", "trainer.megatron.expert_parallel=3"],
            "trainer.ranks=4 must be a multiple of trainer.megatron.expert_parallel=3 x pipeline_parallel=1 = 3",
        ),
        (["name=a/b"], "name='a/b': use 1 to 100 letters"),
        (
            ["buffer.groups=4096", "rollout.samples=16"],
            "buffer.groups=4096 x rollout.samples=16: a batch of them takes up to 10,716,160 bytes in the store, limit "
            "8,388,608: use buffer.groups=3206 or fewer, or fewer samples",
        ),
        (
            ["buffer.groups=1024", "rollout.samples=16", "steps=1000", "checkpoint.every=60"],
            "checkpoint.every=60: with batches of up to 2,679,808 bytes the trainer would remember up to 122, "
            "which no checkpoint to fall back on covers, limit 268,435,456 bytes: use checkpoint.every=49 or less",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: list[str], expected: str) -> None:
    assert expected in problems("quickstart", *overrides)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [\n", "a: 1\na: 2\n", "steps: ${nowhere}\n", "extends: [a]\n"])
def test_a_recipe_that_is_no_mapping_or_no_yaml_is_refused_with_its_path(tmp_path: Path, text: str) -> None:
    assert str(tmp_path / "bad.yaml") in problems(write(tmp_path / "bad.yaml", text))


def test_what_stands_where_a_section_belongs_is_told_of_every_layer(tmp_path: Path) -> None:
    with pytest.raises(loading.ConfigError, match=r"own\.yaml: engine=torch: engine is a section"):
        loading.load(write(tmp_path / "own.yaml", "extends: quickstart\nengine: torch\n"))
    assert "engine=null" in problems("quickstart", "engine=null", "engine.count=2"), "a later one does not hide it"
    told = problems("quickstart", "engine.urls=[http://a]", "engine.urls.b=1")
    assert "engine.urls={'b': 1}: a list and keys with values can't be merged" in told


def test_interpolations_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "/tmp/x")
    config = loading.load(write(tmp_path / "env.yaml", "run_dir: ${oc.env:PLACE}/runs\n"))
    assert config.run_dir == "/tmp/x/runs"


@pytest.mark.parametrize(
    "overrides",
    [
        ["buffer.groups=512", "rollout.samples=32"],
        ["buffer.groups=1024", "rollout.samples=16", "checkpoint.every=49"],
        ["buffer.groups=1024", "rollout.samples=16", "checkpoint.every=1000", "steps=40"],
    ],
)
def test_batches_of_thousands_of_samples_are_accepted(overrides: list[str]) -> None:
    assert loading.load("quickstart", overrides).buffer.groups >= 512


def test_defaults_do_not_contradict_each_other() -> None:
    assert across_fields(RunConfig()) == []


def test_text_settings_are_told_from_others() -> None:
    assert is_text("run_dir")
    assert is_text("buffer.sampler")
    assert not is_text("steps")
    assert not is_text("engine.urls")
    assert not is_text("nowhere")


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=30), st.text(max_size=20))
def test_no_override_escapes_as_another_error(key: str, value: str) -> None:
    with contextlib.suppress(ConfigError):
        loading.load("quickstart", [f"{key}={value}", f"trainer.{key}={value}", f"producer.args.x={value}"])


def test_a_refit_cadence_that_starves_the_trainer_is_refused() -> None:
    assert "refit.every=3 must not exceed buffer.max_staleness + 1 = 2" in problems("quickstart", "refit.every=3")
    assert "= 1" in problems("quickstart", "refit.every=2", "sync=true")
    assert loading.load("quickstart", ["refit.every=2"]).refit.every == 2


def test_every_number_has_a_lower_and_an_upper_bound() -> None:
    def numbers(kind: inspect.Type) -> Iterator[inspect.IntType | inspect.FloatType]:
        if isinstance(kind, inspect.IntType | inspect.FloatType):
            yield kind
        inner = [getattr(kind, "item_type", None), *getattr(kind, "types", ()), *getattr(kind, "item_types", ())]
        for each in inner:
            if each is not None:
                yield from numbers(each)

    found = {key: list(numbers(kind)) for key, kind in leaves().items()}
    assert sum(map(len, found.values())) > 60
    open_ended = [
        key
        for key, kinds in found.items()
        for kind in kinds
        if kind.le is None or (kind.ge is None and kind.gt is None)
    ]
    assert open_ended == []
