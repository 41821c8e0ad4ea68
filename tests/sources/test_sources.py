"""A model without a file: the right class, a batch with labels, and the same step."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Run
from configurations import GPT2

from ckplan.errors import WorkloadError
from ckplan.graph.file import load, save
from ckplan.graph.graph import Graph
from ckplan.plan.plan import differences
from ckplan.simulating.simulate import simulate
from ckplan.solving.planner import Planner
from ckplan.solving.solve import to_plan
from ckplan.sources.batches.sizes import Sizes
from ckplan.sources.source import parse_source
from ckplan.sources.tasks import TASKS
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec
from ckplan.training.losses import LOSS_IS_OUTPUT_LOSS
from ckplan.training.workload import with_rows
from ckplan.verifying.worker import FIRST_STEPS, FirstSteps, Job, Worker

GPU = "A100 40GB"
pytestmark = pytest.mark.filterwarnings("ignore")


def needs(package: str) -> pytest.MarkDecorator:
    there = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not there, reason=f"{package} is not installed")


needs_transformers = needs("transformers")
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
IDS = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {**SMALL, **IDS, "model_type": "llama", "max_position_embeddings": 64}
BERT = {**SMALL, **IDS, "model_type": "bert", "max_position_embeddings": 64}
BART = {
    **IDS,
    "model_type": "bart",
    "d_model": 32,
    "max_position_embeddings": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "forced_eos_token_id": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 2,
}
VIT = {**SMALL, "image_size": 32, "patch_size": 8, "num_channels": 3}
WAV2VEC2 = {
    **SMALL,
    "model_type": "wav2vec2",
    "vocab_size": 40,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 8],
    "conv_stride": [10, 8],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "mask_time_length": 2,
    "classifier_proj_size": 16,
}
WHISPER = {
    **IDS,
    "model_type": "whisper",
    "d_model": 32,
    "num_mel_bins": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_source_positions": 30,
    "max_target_positions": 20,
    "decoder_start_token_id": 1,
}
CLIP_TEXT = {**SMALL, **IDS, "max_position_embeddings": 16}
CLIP = {"model_type": "clip", "text_config": CLIP_TEXT, "vision_config": VIT}
LLAVA = {
    "model_type": "llava",
    "image_token_index": 98,
    "text_config": LLAMA,
    "vision_config": {**VIT, "model_type": "clip_vision_model"},
}
SEGFORMER = {
    "model_type": "segformer",
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [16, 32],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 32,
    "num_labels": 3,
    "image_size": 64,
}
YOLOS = {
    **VIT,
    "model_type": "yolos",
    "image_size": [32, 48],
    "num_detection_tokens": 6,
}
# task -> configuration, --batch, and shapes of the batch in order of the arguments
CASES: dict[str, tuple[dict[str, Any], str, dict[str, str]]] = {
    "causal-lm": (LLAMA, "2x16", {"input_ids": "int64[2,16]", "labels": "int64[2,16]"}),
    "masked-lm": (BERT, "2x16", {"input_ids": "int64[2,16]", "labels": "int64[2,16]"}),
    "seq2seq-lm": (
        BART,
        "2x16x8",
        {"input_ids": "int64[2,16]", "labels": "int64[2,8]"},
    ),
    "sequence-classification": (
        GPT2,
        "3x16",
        {"input_ids": "int64[3,16]", "labels": "int64[3]"},
    ),
    "token-classification": (
        BERT,
        "2x16",
        {"input_ids": "int64[2,16]", "labels": "int64[2,16]"},
    ),
    "question-answering": (
        BERT,
        "2x16",
        {
            "input_ids": "int64[2,16]",
            "start_positions": "int64[2]",
            "end_positions": "int64[2]",
        },
    ),
    "multiple-choice": (
        BERT,
        "2x16x3",
        {"input_ids": "int64[2,3,16]", "labels": "int64[2]"},
    ),
    "image-classification": (
        {**VIT, "model_type": "vit"},
        "2",
        {"pixel_values": "float32[2,3,32,32]", "labels": "int64[2]"},
    ),
    "semantic-segmentation": (
        SEGFORMER,
        "2x3x64x64",
        {"pixel_values": "float32[2,3,64,64]", "labels": "int64[2,64,64]"},
    ),
    "object-detection": (
        YOLOS,
        "1",
        {"pixel_values": "float32[1,3,32,48]", "labels": "int64[5] float32[5,4]"},
    ),
    "audio-classification": (
        WAV2VEC2,
        "2x4000",
        {"input_values": "float32[2,4000]", "labels": "int64[2]"},
    ),
    "ctc": (
        WAV2VEC2,
        "2x4000x6",
        {"input_values": "float32[2,4000]", "labels": "int64[2,6]"},
    ),
    "speech-to-text": (
        WHISPER,
        "2x60x8",
        {"input_features": "float32[2,8,60]", "labels": "int64[2,8]"},
    ),
    "contrastive": (
        CLIP,
        "2x3x32x32x8",
        {
            "pixel_values": "float32[2,3,32,32]",
            "input_ids": "int64[2,8]",
            "return_loss": "bool",
        },
    ),
    "image-text-to-text": (
        LLAVA,
        "2x24",
        {
            "pixel_values": "float32[2,3,32,32]",
            "input_ids": "int64[2,24]",
            "labels": "int64[2,24]",
        },
    ),
}


def folder(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return f"hf:{tmp_path}"


def profiled(target: str, **options: Any) -> Graph:
    spec = WorkloadSpec(target, options)
    return profile_workload(spec, gpu=GPU, device="cpu", replay=False)


def first_steps(spec: WorkloadSpec, plan: Any = None) -> FirstSteps:
    from ckplan.training.step import Training

    found = Worker(Job(spec, plan, Training(), seed=0)).answer(FIRST_STEPS)
    assert isinstance(found, FirstSteps), found
    return found


@needs_transformers
@pytest.mark.parametrize("task", CASES)
def test_every_task_has_a_batch_whose_loss_the_model_returns(
    task: str, tmp_path: Path
) -> None:
    config, batch, shapes = CASES[task]
    graph = profiled(folder(tmp_path, config), task=task, batch=batch)
    assert graph.fingerprint["batch"] == shapes
    assert LOSS_IS_OUTPUT_LOSS in graph.notes
    assert graph.fingerprint["source"] == f"hf:{tmp_path}"


@needs_transformers
def test_every_task_names_tables_that_transformers_has() -> None:
    from transformers.models.auto import modeling_auto

    for task in TASKS.values():
        for table in task.tables:
            assert getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES"), table


MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM
import torch

def build():
    model = LlamaForCausalLM(LlamaConfig(**{config}, use_cache=False))
    ids = torch.randint(3, 99, (2, 16))
    return model, {{"input_ids": ids, "labels": ids.clone()}}
"""


@needs_transformers
def test_a_source_is_the_same_step_as_a_file_of_the_same_model(tmp_path: Path) -> None:
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"]}
    file = tmp_path / "model.py"
    file.write_text(MODEL.format(config=LLAMA))
    one = profiled(folder(tmp_path, config), batch="2x16")
    other = profiled(str(file))
    assert one.ops == other.ops
    assert one.storages == other.storages
    assert simulate(one).peak_bytes == simulate(other).peak_bytes


@needs_transformers
def test_a_plan_of_a_source_keeps_its_word(tmp_path: Path) -> None:
    target = folder(tmp_path, {**LLAMA, "architectures": ["LlamaForCausalLM"]})
    spec = WorkloadSpec(target, {"batch": "8x64"})
    planner = Planner(profile_workload(spec))
    unplanned = first_steps(spec)
    assert planner.unplanned.peak_bytes == pytest.approx(unplanned.peak_bytes, rel=1e-3)
    budget_bytes = (planner.unplanned.peak_bytes + planner.floor.peak_bytes) // 2
    plan = to_plan(planner.graph, planner.solve(budget_bytes))
    assert plan.fingerprint["source"] == target
    planned = first_steps(spec, plan)
    assert planned.digests == unplanned.digests
    assert planned.peak_bytes <= budget_bytes
    renamed = {**plan.fingerprint, "source": "hf:elsewhere"}
    assert differences(plan.fingerprint, renamed) == ()  # one model has many names


@needs_transformers
def test_assumptions_are_kept_in_the_trace(tmp_path: Path) -> None:
    target = folder(tmp_path, {**LLAMA, "architectures": ["LlamaForCausalLM"]})
    path = tmp_path / "trace.json.gz"
    save(profiled(target), path)
    notes = load(path).notes
    assert "assumed rows: 8 (--batch)" in notes
    assert "assumed tokens per row: 64 (--batch)" in notes  # of the configuration
    assert "assumed dtype: float32 (--dtype)" in notes
    assert "assumed optimizer: adamw (--optimizer)" in notes
    asked = profiled(target, batch="2x8", dtype="bf16")
    assert not any("--batch" in note or "--dtype" in note for note in asked.notes)


@needs_transformers
def test_the_dtype_and_the_attention_are_those_asked_for(tmp_path: Path) -> None:
    target = folder(tmp_path, {**LLAMA, "architectures": ["LlamaForCausalLM"]})
    graph = profiled(target, batch="2x8", dtype="bf16", attention="eager")
    kinds = {
        text.partition("[")[0] for text in graph.fingerprint["parameters"].values()
    }
    assert kinds == {"bfloat16"}
    names = {op.name for op in graph.ops}
    assert "_softmax" in names
    assert not any("scaled_dot_product" in name for name in names)
    fused = profiled(target, batch="2x8", attention="sdpa")
    assert any("scaled_dot_product" in op.name for op in fused.ops)


@needs_transformers
@needs("peft")
def test_only_adapters_are_trained(tmp_path: Path) -> None:
    target = folder(tmp_path, {**LLAMA, "architectures": ["LlamaForCausalLM"]})
    workload = WorkloadSpec(target, {"batch": "2x8", "lora": "r=4,q_proj"}).build()
    trained = [n for n, p in workload.model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2
    assert all("q_proj.lora_" in name for name in trained)
    whole = WorkloadSpec(target, {"batch": "2x8", "lora": "r=4,all-linear"}).build()
    assert sum(p.requires_grad for p in whole.model.parameters()) == 2 * 2 * 7


@needs_transformers
def test_a_setting_changes_the_configuration(tmp_path: Path) -> None:
    target = folder(tmp_path, {**LLAMA, "architectures": ["LlamaForCausalLM"]})
    spec = WorkloadSpec(target, {"batch": "2x8", "num_hidden_layers": 1})
    assert len(spec.build().model.model.layers) == 1


@needs_transformers
@pytest.mark.parametrize(
    ("kind", "num_labels", "labels"),
    [
        ("single_label_classification", 5, "int64[3]"),
        ("multi_label_classification", 5, "float32[3,5]"),
        ("regression", 1, "float32[3]"),
        ("regression", 2, "float32[3,2]"),
    ],
)
def test_labels_of_rows_are_of_the_kind_that_the_configuration_names(
    kind: str, num_labels: int, labels: str, tmp_path: Path
) -> None:
    named = {"num_labels": num_labels, "problem_type": kind}
    target = folder(tmp_path, {**BERT, **named})
    graph = profiled(target, task="sequence-classification", batch="3x8")
    assert graph.fingerprint["batch"]["labels"] == labels


@needs_transformers
def test_a_transcript_is_shorter_than_its_sound(tmp_path: Path) -> None:
    spec = WorkloadSpec(folder(tmp_path, WAV2VEC2), {"task": "ctc", "batch": "2x4000"})
    workload = spec.build()
    assert workload.batch["labels"].shape == (2, 25)  # of 50 frames
    assert workload.model.train()(**workload.batch).loss.isfinite()


@needs_transformers
def test_image_tokens_and_text_fill_every_row(tmp_path: Path) -> None:
    target = folder(tmp_path, LLAVA)
    options = {"task": "image-text-to-text", "batch": "2x24"}
    ids = WorkloadSpec(target, options).build().batch["input_ids"]
    places = ids == LLAVA["image_token_index"]
    assert places[:, :16].all()  # 4 x 4 patches of one image
    assert not places[:, 16:].any()
    graph = profiled(target, **options)
    assert "traced under fake tensors" in graph.notes


@needs_transformers
def test_sizes_of_images_come_from_the_processors_file(tmp_path: Path) -> None:
    config = {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "layer_type": "basic",
    }
    target = folder(tmp_path, config)
    spec = WorkloadSpec(target, {"task": "image-classification", "batch": "2"})
    assert spec.build().batch["pixel_values"].shape == (2, 3, 224, 224)
    settings = {"size": {"shortest_edge": 48}, "crop_size": {"height": 40, "width": 32}}
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(settings))
    assert spec.build().batch["pixel_values"].shape == (2, 3, 48, 48)
    file.write_text(json.dumps({**settings, "do_center_crop": True}))
    assert spec.build().batch["pixel_values"].shape == (2, 3, 40, 32)


@needs_transformers
def test_tokens_that_a_configuration_lacks_are_assumed(tmp_path: Path) -> None:
    bare = {k: v for k, v in GPT2.items() if not k.endswith("token_id")}
    target = folder(tmp_path, {**bare, "vocab_size": 20})
    options = {"task": "sequence-classification", "batch": "2x8"}
    workload = WorkloadSpec(target, options).build()
    assert workload.model.config.pad_token_id == 0  # GPT-2's own end token is 50256
    said = "assumed pad_token_id: 0 (--set pad_token_id=N)"
    assert said in workload.assumptions


@needs_transformers
def test_random_ids_have_no_special_meaning(tmp_path: Path) -> None:
    target = folder(tmp_path, {**BERT, "vocab_size": 6, "sep_token_id": 4})
    spec = WorkloadSpec(target, {"task": "masked-lm", "batch": "8x32"})
    assert set(spec.build().batch["input_ids"].unique().tolist()) <= {3, 5}


@needs_transformers
@pytest.mark.parametrize("task", ["question-answering", "multiple-choice"])
def test_questions_end_in_separators(task: str, tmp_path: Path) -> None:
    target = folder(tmp_path, {**BERT, "sep_token_id": 5, "eos_token_id": None})
    ids = (
        WorkloadSpec(target, {"task": task, "batch": "2x16"}).build().batch["input_ids"]
    )
    places = (ids.reshape(-1, 16) == 5).nonzero()[:, 1].reshape(-1, 3)
    assert (places == torch.tensor([4, 5, 15])).all()


@needs("diffusers")
def test_a_denoiser_learns_the_noise(tmp_path: Path) -> None:
    config = {
        "_class_name": "UNet2DConditionModel",
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "block_out_channels": [32, 32],
        "layers_per_block": 1,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
        "cross_attention_dim": 16,
        "attention_head_dim": 8,
    }
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").write_text(json.dumps(config))
    graph = profiled(f"diffusers:{tmp_path}", batch="2")
    assert graph.model == "UNet2DConditionModel"
    assert graph.fingerprint["batch"]["encoder_hidden_states"] == "float32[2,77,16]"
    assert "assumed sample: 4x8x8 (--batch)" in graph.notes
    assert any(op.name == "mse_loss" for op in graph.ops)
    whole = WorkloadSpec(f"diffusers:{tmp_path}", {"batch": "4"}).build()
    half = with_rows(whole, 2)  # as a micro-batch
    assert whole.target.shape == (4, 4, 8, 8)
    assert half.target.shape == half.batch["sample"].shape == (2, 4, 8, 8)


@needs("timm")
def test_a_model_of_timm() -> None:
    graph = profiled("timm:resnet10t", batch="2x3x64x64", num_classes=7)
    assert graph.fingerprint["batch"] == {"0": "float32[2,3,64,64]"}
    assert "loss: cross entropy of 7 classes" in graph.notes
    with pytest.raises(WorkloadError, match="no such model"):
        WorkloadSpec("timm:resnet10x").build()


@needs("torchvision")
@pytest.mark.parametrize("name", ["resnet18", "googlenet", "lraspp_mobilenet_v3_large"])
def test_models_of_torchvision(name: str) -> None:
    graph = profiled(f"torchvision:{name}", batch="2x3x64x64")
    assert graph.fingerprint["batch"] == {"0": "float32[2,3,64,64]"}
    assert any(op.name.startswith("nll_loss") for op in graph.ops)


# -- bad input -------------------------------------------------------------------------

PROBLEMS: dict[str, tuple[dict[str, Any] | str | None, dict[str, Any], str, str]] = {
    "no such folder": (None, {}, "there is no folder", "HF_HOME"),
    "no JSON": ("{", {}, "cannot read the configuration", "json.tool"),
    "no model type": ({"a": 1}, {}, "names no model_type", "diffusers:FOLDER"),
    "unknown type": ({"model_type": "lama"}, {}, "model type 'lama'", "'llama'"),
    "remote code": (
        {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.Own"}},
        {},
        "needs Python code that comes with it",
        "--trust-remote-code",
    ),
    "unknown task": (LLAMA, {"task": "causal"}, "no such task", "causal-lm"),
    "misfit": (LLAMA, {"task": "ctc"}, "no class for a 'llama'", "--task causal-lm"),
    "nothing named": (LLAMA, {}, "fits several tasks", "--task causal-lm"),
    "no head": (
        {**LLAMA, "architectures": ["LlamaModel"]},
        {},
        "architecture LlamaModel has no labels",
        "--task causal-lm",
    ),
    "unknown class": (
        {"model_type": "sam", "architectures": ["SamModle"]},
        {},
        "architecture SamModle",
        "model.py",
    ),
    "batch": (BERT, {"task": "masked-lm", "batch": "8*4"}, "read the batch", "8x1024"),
    "too many sizes": (
        BERT,
        {"task": "masked-lm", "batch": "2x8x3"},
        "the task takes 2 sizes",
        "--batch 2x8",
    ),
    "too long": (
        BERT,
        {"task": "masked-lm", "batch": "2x65"},
        "cannot use 65 tokens",
        "--batch 2x64",
    ),
    "no room for text": (
        LLAVA,
        {"task": "image-text-to-text", "batch": "2x16"},
        "the image alone takes 16",
        "--batch 2x",
    ),
    "dtype": (BERT, {"task": "masked-lm", "dtype": "int8"}, "--dtype int8", "bf16"),
    "lora": (BERT, {"task": "masked-lm", "lora": "16"}, "cannot read --lora", "r=16"),
    "attention": (
        BERT,
        {"task": "masked-lm", "attention": "flash"},
        "--attention flash",
        "sdpa",
    ),
    "too long, of GPT-2": (
        {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2}
        | {"n_positions": 32, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 1},
        {"task": "causal-lm", "batch": "2x64"},
        "cannot use 64 tokens",
        "--batch 2x32",
    ),
    "type of a field": (
        BERT,
        {"task": "masked-lm", "num_hidden_layers": "three"},
        "cannot use --set num_hidden_layers=three",
        "--set num_hidden_layers=2",
    ),
    "field": (
        BERT,
        {"task": "masked-lm", "num_hidden_layer": 1},
        "no such field",
        "did you mean 'num_hidden_layers'",
    ),
}


@needs_transformers
@pytest.mark.parametrize("problem", PROBLEMS)
def test_bad_input_is_explained(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(
        "ckplan.sources.configurations._hub_answers", lambda: False, raising=True
    )
    config, options, said, hint = PROBLEMS[problem]
    path = tmp_path / "config.json"
    if config is not None:
        path.write_text(config if isinstance(config, str) else json.dumps(config))
    target = f"hf:{tmp_path}" if config is not None else "hf:no/such-model"
    with pytest.raises(WorkloadError) as caught:
        WorkloadSpec(target, options).build()
    assert said in str(caught.value)
    assert hint in caught.value.hint
    assert len(str(caught.value).splitlines()) == 3


OWN_CONFIGURATION = """
from transformers import PretrainedConfig

class OwnConfig(PretrainedConfig):
    model_type = "own"
    vocab_size = 99
    hidden_size = 16
"""
OWN_MODEL = """
import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from .configuration_own import OwnConfig

class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = torch.nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)
"""


@needs_transformers
def test_code_of_a_model_runs_only_when_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import dynamic_module_utils

    cache = str(tmp_path / "modules")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", cache)
    own = tmp_path / "own"
    own.mkdir()
    (own / "configuration_own.py").write_text(OWN_CONFIGURATION)
    (own / "modeling_own.py").write_text(OWN_MODEL)
    classes = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    config = {"architectures": ["OwnForCausalLM"], "auto_map": classes}
    target = folder(own, {"model_type": "own", **config})
    with pytest.raises(WorkloadError, match="needs Python code"):
        WorkloadSpec(target, {"batch": "2x8"}).build()
    assert not Path(cache).exists()
    graph = profiled(target, batch="2x8", trust_remote_code=True)
    assert graph.model == "OwnForCausalLM"
    assert LOSS_IS_OUTPUT_LOSS in graph.notes


@needs_transformers
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "peft" else there(name),
    )
    spec = WorkloadSpec(
        folder(tmp_path, BERT), {"task": "masked-lm", "lora": "r=4", "batch": "2x8"}
    )
    with pytest.raises(WorkloadError, match="the package peft is not installed"):
        spec.build()


def test_a_source_takes_no_option_of_another_kind() -> None:
    with pytest.raises(WorkloadError, match="cannot use --task with 'timm:'"):
        WorkloadSpec("timm:resnet18", {"task": "ctc"}).build()
    with pytest.raises(WorkloadError, match="has no name"):
        WorkloadSpec("hf:").build()
    with pytest.raises(WorkloadError, match="--input"):
        WorkloadSpec("hf:x", inputs=("8x8",)).build()


def test_targets_are_told_apart() -> None:
    assert parse_source("model.py") is None
    assert parse_source("package.module:factory") is None
    assert parse_source("hf:~/x") == replace(
        parse_source("hf:x"), name=str(Path.home() / "x")
    )
    assert parse_source("C/config.json") == replace(
        parse_source("hf:x"), name="C/config.json"
    )
    names = {
        "hf:meta-llama/Llama-3.1-8B": "Llama-3.1-8B",
        "a/tiny/config.json": "tiny",
        "timm:resnet50": "resnet50",
    }
    assert {t: WorkloadSpec(t).name for t in names} == names


def test_sizes_that_are_not_given_are_assumed() -> None:
    sizes = Sizes.of("4")
    assert (sizes.rows, sizes.take(1, 7, "tokens per row")) == (4, 7)
    assert sizes.assumptions == ["assumed tokens per row: 7 (--batch)"]
    with pytest.raises(WorkloadError, match="2 sizes after the rows, not 1"):
        Sizes.of("4x3").shape((5, 5), "image")


# -- the command line ------------------------------------------------------------------


@needs_transformers
def test_one_line_without_a_file(run: Run, tmp_path: Path) -> None:
    folder(tmp_path, {**LLAMA, "architectures": ["LlamaForCausalLM"]})
    config = str(tmp_path / "config.json")
    line = ("profile", config, "--batch", "4x32", "--gpu", GPU, "--device", "cpu")
    trace, plan = str(tmp_path / "trace.json.gz"), str(tmp_path / "plan.yaml")
    done = run(*line, "--no-replay", "-o", trace)
    assert done.code == 0, done.err
    assert "assumed optimizer: adamw (--optimizer)" in done.out
    assert run("solve", trace, "--budget", "80%", "-o", plan).code == 0
    seen = run("verify", config, plan, "--batch", "4x32", "--fake", "--trace", trace)
    assert seen.code == 0, seen.err
    code = run("eject", plan, config, "--batch", "4x32")
    assert code.code == 0, code.err
    compile(code.out, "ejected", "exec")


def test_options_of_sources_are_refused_for_files(run: Run) -> None:
    ended = run("profile", "model.py", "--batch", "8x1024")
    assert ended.code == 1
    assert "cannot use --batch with 'model.py'" in ended.err
    assert len(ended.err.strip().splitlines()) == 3


def test_auxiliary_heads_count_less() -> None:
    from ckplan.sources.losses import cross_entropy

    labels = torch.zeros(2, dtype=torch.long)
    logits, auxiliary = torch.zeros(2, 4), torch.zeros(2, 4)
    alone = float(cross_entropy(logits, labels))
    assert cross_entropy((logits, auxiliary), labels) == pytest.approx(1.4 * alone)
