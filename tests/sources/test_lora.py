"""``--lora`` on models whose layers peft does not know, or has none of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Run
from configurations import GPT2

pytest.importorskip("transformers")
pytest.importorskip("peft")

from ckplan.errors import WorkloadError
from ckplan.training.loading import WorkloadSpec
from ckplan.training.workload import Workload

pytestmark = pytest.mark.filterwarnings("ignore")

GPT2_HEAD = {**GPT2, "architectures": ["GPT2LMHeadModel"]}
VIT = {
    "architectures": ["ViTForImageClassification"],
    "model_type": "vit",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 16,
}
RESNET = {
    "architectures": ["ResNetForImageClassification"],
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
}


def built(folder: Path, config: dict[str, Any], lora: str = "r=4") -> Workload:
    (folder / "config.json").write_text(json.dumps(config))
    return WorkloadSpec(f"hf:{folder}", {"lora": lora}).build()


def adapted(workload: Workload) -> set[str]:
    """Last names of the modules that have adapters."""
    trained = (n for n, p in workload.model.named_parameters() if p.requires_grad)
    return {name.partition(".lora_")[0].rpartition(".")[2] for name in trained}


def test_conv1d_of_gpt2_is_a_linear_layer(tmp_path: Path) -> None:
    assert adapted(built(tmp_path, GPT2_HEAD)) == {"c_attn"}
    assert adapted(built(tmp_path, GPT2_HEAD, "r=4,all-linear")) == {
        *("c_attn", "c_proj", "c_fc")
    }


def test_where_peft_knows_no_modules_all_linear_layers_are_adapted(
    tmp_path: Path,
) -> None:
    workload = built(tmp_path, VIT)
    assert len(adapted(workload)) >= 4
    note = "assumed lora: all linear layers (--lora r=4,NAMES)"
    assert note in workload.assumptions


def test_a_model_of_convolutions_names_what_can_be_adapted(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError) as error:
        built(tmp_path, RESNET)
    assert "it has no linear layer below its head" in error.value.what
    assert "peft knows no modules" in error.value.what
    assert error.value.needed == "names of its modules: convolution"
    assert error.value.hint == "--lora r=4,convolution"
    assert adapted(built(tmp_path, RESNET, "r=4,convolution")) == {"convolution"}


def test_a_name_that_is_not_there_shows_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="not found in the base model") as error:
        built(tmp_path, GPT2_HEAD, "r=4,q_proj")
    assert "c_attn" in error.value.needed and "wte" in error.value.needed


def test_tune_says_in_its_row_why_lora_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RESNET))
    monkeypatch.chdir(tmp_path)
    how = "--batch", "4x3x32x32", "--optimizer", "sgd:single", "--gpu", "RTX 4090"
    ended = run(
        *("tune", "config.json", *how),
        *("--total-batch", "8", "--allow", "lora", "--json"),
    )
    assert ended.code == 0, ended.err
    (row,) = (x for x in json.loads(ended.out)["levers"] if x["name"] == "lora")
    assert "has no linear layer below its head" in row["refused"]
