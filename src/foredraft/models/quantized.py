"""Targets as they are served: which quantized folders load here, and what the others lack."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

# What transformers imports for weights of each method; a method that is not listed needs nothing more.
_PACKAGES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "bitsandbytes": (("bitsandbytes",), "pip install bitsandbytes"),
    "gptq": (("optimum", "gptqmodel"), "pip install optimum gptqmodel"),
    "awq": (("gptqmodel",), "pip install gptqmodel"),
    "compressed-tensors": (("compressed_tensors",), "pip install compressed-tensors"),
    "torchao": (("torchao",), "pip install torchao"),
    "hqq": (("hqq",), "pip install hqq"),
    "quanto": (("optimum", "quanto"), "pip install optimum-quanto"),
    "aqlm": (("aqlm",), "pip install aqlm[gpu]"),
    "exl2": (("exllamav2",), "no transformers package: serve it in exllamav2"),
    "exl3": (("exllamav3",), "no transformers package: serve it in exllamav3"),
}


def quantization_plan(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantization_config of a config.json; empty for plain weights."""
    return config.get("quantization_config") or {}


def quantization_method(config: Mapping[str, Any]) -> str:
    """Return the quant_method of a config.json; empty for plain weights."""
    return str(quantization_plan(config).get("quant_method", ""))


def missing_package(config: Mapping[str, Any]) -> str:
    """Return a clause that names the package that a quantized folder needs and that is not installed; else empty."""
    method = quantization_method(config)
    packages, remedy = _PACKAGES.get(method, ((), ""))
    absent = [package for package in packages if find_spec(package) is None]
    if not absent:
        return ""
    return (
        f"holds weights quantized by {method}, which need the package {absent[0]}: {remedy}; or name the folder of "
        "full precision it was made from."
    )
