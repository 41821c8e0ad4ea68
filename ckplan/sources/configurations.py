"""Find a configuration of transformers: in a folder, in the local cache, on the hub.

Only configurations are read, never weights. Code that comes with a configuration runs
only on demand.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ckplan.errors import WorkloadError, did_you_mean
from ckplan.sources.json_file import read_json
from ckplan.sources.packages import first, require
from ckplan.sources.source import CONFIG_FILE

_PROCESSOR_FILE = "preprocessor_config.json"
_PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def load_configuration(name: str, trust: bool) -> Any:
    """The configuration of a folder, a file ``config.json`` or an id of the hub.

    Raises:
        WorkloadError: It is not found or not readable, its architecture is unknown, or
            it needs code of its own that is not trusted.
    """
    transformers = require("transformers", f"hf:{name}")
    path = Path(name)
    folder = path.parent if path.name == CONFIG_FILE else path
    if path.name == CONFIG_FILE and not path.is_file():
        raise _no_file(path)
    if folder.is_dir():
        return _load_folder(transformers, folder, trust)
    return _load_id(transformers, name, trust)


def processor_settings(name: str) -> Mapping[str, Any]:
    """Settings of the processor that lie beside a local configuration; else none."""
    folder = Path(name).parent if Path(name).name == CONFIG_FILE else Path(name)
    with suppress(OSError, ValueError):
        found = json.loads((folder / _PROCESSOR_FILE).read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def _load_folder(transformers: Any, folder: Path, trust: bool) -> Any:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise _no_file(path)
    content = read_json(path, written_by="save_pretrained()")
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise WorkloadError(
            f"cannot use the configuration '{path}': it names no model_type",
            needed="a configuration of transformers",
            hint='"model_type": "llama" in it; for diffusion models, diffusers:FOLDER',
        )
    return _parse(transformers, str(folder), content["model_type"], trust)


def _load_id(transformers: Any, name: str, trust: bool) -> Any:
    cache = _cache_folder()
    here = {"local_files_only": True}
    try:
        return transformers.AutoConfig.from_pretrained(
            name, trust_remote_code=trust, **here
        )
    except (OSError, ValueError) as error:
        if "custom code" in str(error) or "model type" in str(error):
            return _parse(transformers, name, name, trust, **here)
    if not _hub_answers():
        raise WorkloadError(
            f"cannot find the configuration 'hf:{name}': there is no folder '{name}', "
            f"it is not in the cache {cache}, and there is no network",
            needed=f"a folder with a {CONFIG_FILE}, or a network",
            hint="hf:FOLDER; HF_HOME sets where the cache is",
        )
    return _parse(transformers, name, name, trust)


def _parse(
    transformers: Any, where: str, model_type: str, trust: bool, **how: Any
) -> Any:
    """Let transformers read a configuration; explain why it does not."""
    try:
        return transformers.AutoConfig.from_pretrained(
            where, trust_remote_code=trust, **how
        )
    except Exception as error:
        said = str(error)
        if "custom code" in said or "trust_remote_code" in said:
            raise WorkloadError(
                f"cannot use 'hf:{where}': it needs Python code that comes with it, "
                "which could do anything",
                needed="your word that you have read that code and trust it",
                hint="--trust-remote-code",
            ) from None
        if "model type" in said or isinstance(error, KeyError):
            known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
            near = did_you_mean(model_type, known)
            raise WorkloadError(
                f"cannot use 'hf:{where}': transformers {transformers.__version__} "
                f"knows no model type '{model_type}'",
                needed=f"one of its {len(known)} model types",
                hint=f"did you mean '{near}'?" if near else "a newer transformers",
            ) from None
        if isinstance(error, OSError):
            raise WorkloadError(
                f"cannot find the configuration 'hf:{where}': {first(error)}",
                needed="an id of the hub that you may read, or a folder",
                hint="check the id; `hf auth login` for gated models",
            ) from None
        raise WorkloadError(
            f"cannot read the configuration of 'hf:{where}': "
            f"{type(error).__name__}: {first(error)}",
            needed="fields of the types that transformers expects",
            hint="compare it with the configuration that save_pretrained() writes",
        ) from error


def _no_file(path: Path) -> WorkloadError:
    return WorkloadError(
        f"cannot read the configuration: '{path}' is not there",
        needed=f"a folder with a {CONFIG_FILE}, as save_pretrained() writes it",
        hint="check the path",
    )


def _cache_folder() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def _hub_answers() -> bool:
    """Whether the hub's host has an address; a proxy is taken at its word."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    if any(os.environ.get(name) for name in _PROXIES):
        return True
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True
