"""What ``tune`` chooses, ``verify`` runs from the plan file alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "tie_word_embeddings": False,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--allow", "lora", "--budget", "3MiB"), "lora=r=16"),
        (("--amp", "fp16", "--scaler", "--budget", "90%"), "fp16"),
    ],
)
def test_the_chosen_setting_is_verified_from_its_plan_alone(
    options: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(_CONFIG))

    def run(*argv: str) -> str:
        ended = subprocess.run(
            [sys.executable, "-m", "ckplan", *argv],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    run("tune", "hf:tiny", "--batch", "4x32", *options, "-o", "plan.yaml")
    assert said in (tmp_path / "plan.yaml").read_text()
    found = json.loads(run("verify", "plan.yaml", "--steps", "2", "--json"))
    assert found["passed"] and found["fits"] and found["gradients_equal"]
    assert found["measured_peak_bytes"] == found["predicted_peak_bytes"]
