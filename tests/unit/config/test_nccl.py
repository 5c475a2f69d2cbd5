"""NCCL settings are the same at the trainer and every engine, unless somebody says otherwise, and then it is told."""

from __future__ import annotations

import pytest

from config import nccl
from config.schema import EngineConfig, RefitConfig, RunConfig


def config(*args: str, kind: str = "sglang", transport: str = "nccl") -> RunConfig:
    engine = EngineConfig(kind=kind, args=args)  # type: ignore[arg-type]
    return RunConfig(engine=engine, refit=RefitConfig(transport=transport))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "cumem", "nvls"),
    [((), "0", "0"), (("--enable-nccl-nvls",), "0", "1"), (("--x", "--enable-symm-mem"), "1", "1")],
)
def test_the_trainer_gets_what_sglang_sets_for_itself(args: tuple[str, ...], cumem: str, nvls: str):
    own = nccl.aligned(config(*args), {})
    assert own == {"NCCL_CUMEM_ENABLE": cumem, "NCCL_NVLS_ENABLE": nvls, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert nccl.told(own) == nccl.of_server(config(*args), {}), "so both sides are alike"


def test_a_users_own_value_stays_on_both_sides():
    theirs = {"NCCL_CUMEM_ENABLE": "1", "NCCL_PROTO": "LL", "PATH": "/bin"}
    trainer = nccl.told({**theirs, **nccl.aligned(config(), theirs)})
    assert trainer == ("NCCL_CUMEM_ENABLE=1", "NCCL_NVLS_ENABLE=0", "NCCL_PROTO=LL")
    assert nccl.differing(nccl.of_server(config(), theirs), trainer) == ""


def test_nothing_is_set_or_told_without_nccl_or_of_a_server_that_others_run():
    assert nccl.aligned(config(transport="gloo"), {"NCCL_PROTO": "LL"}) == {}
    assert nccl.of_server(config(transport="gloo"), {"NCCL_PROTO": "LL"}) == ()
    assert nccl.of_server(config(kind="external"), {"NCCL_PROTO": "LL"}) == ()
    assert nccl.differing((), ("NCCL_PROTO=LL",)) == nccl.differing(("NCCL_PROTO=LL",), ()) == ""


def test_where_they_differ_each_is_named_with_both_values():
    flagged = nccl.of_server(config("--enable-symm-mem"), {"NCCL_CUMEM_ENABLE": "0", "NCCL_PROTO": "LL"})
    assert nccl.differing(flagged, ("NCCL_CUMEM_ENABLE=0", "NCCL_NVLS_ENABLE=1")) == (
        "NCCL_CUMEM_ENABLE is 1 here and 0 at the trainer, NCCL_PROTO is LL here and not set at the trainer"
    )
