"""A machine in figures: shipped profiles by name, or a file of one's own."""

from importlib.resources import files
from pathlib import Path

from pydantic import Field, model_validator

from foredraft.catalog import unknown_name_message
from foredraft.core.errors import UnknownNameError
from foredraft.core.roofline import Machine
from foredraft.recipe import load_settings, read_settings, write_settings
from foredraft.settings import Settings


class HardwareProfile(Settings):
    """What a machine can do at most, and the share of it that is reached."""

    name: str = Field(min_length=1)
    memory_bandwidth: float = Field(gt=0.0, description="Bytes/s.")
    flops: dict[str, float] = Field(min_length=1, description="FLOP/s by dtype, such as bfloat16; dense.")
    memory: float = Field(gt=0.0, description="Bytes that weights and contexts may take.")
    watts: float = Field(gt=0.0, description="Power while it decodes.")
    batch_bandwidth: float | None = Field(
        None, gt=0.0, description="Bytes/s of weights read for several positions; else the same."
    )
    overlap: float = Field(1.0, ge=0.0, le=1.0, description="Share of moving or computing that hides behind the other.")
    bandwidth_efficiency: float = Field(1.0, gt=0.0, le=1.0, description="Share of the bandwidth that a pass reaches.")
    flops_efficiency: float = Field(1.0, gt=0.0, le=1.0, description="Share of the FLOP/s that a pass reaches.")
    pass_seconds: float = Field(0.0, ge=0.0, description="Fixed time of a pass.")
    layer_seconds: float = Field(0.0, ge=0.0, description="Fixed time of each of its layers.")
    sources: dict[str, str] = Field(description="Where each figure is from, by its key; `assumed` where from nowhere.")

    @model_validator(mode="after")
    def _sourced(self) -> "HardwareProfile":
        figures = set(type(self).model_fields) - {"name", "sources"}
        needed = figures & self.model_fields_set
        if without := sorted(needed - set(self.sources)):
            raise ValueError(f"sources say nothing of {', '.join(without)}")
        if unknown := sorted(set(self.sources) - figures):
            raise ValueError(f"sources name {', '.join(unknown)}, which is no figure of a profile")
        if any(rate <= 0.0 for rate in self.flops.values()):
            raise ValueError("flops must be more than 0")
        return self

    def machine(self) -> Machine:
        """Return what the machine sustains."""
        return Machine(
            bandwidth=self.memory_bandwidth * self.bandwidth_efficiency,
            batch_bandwidth=(self.batch_bandwidth or self.memory_bandwidth) * self.bandwidth_efficiency,
            flops={dtype: rate * self.flops_efficiency for dtype, rate in self.flops.items()},
            memory=self.memory,
            watts=self.watts,
            overlap=self.overlap,
            pass_seconds=self.pass_seconds,
            layer_seconds=self.layer_seconds,
        )


def shipped_profiles() -> list[str]:
    """Return the names of the shipped profiles, sorted."""
    folder = files("foredraft.hardware")
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def load_profile(name: str) -> HardwareProfile:
    """Return a profile by the name of a shipped one (its beginning will do where only one begins so), or from a file.

    Raises:
        UnknownNameError: neither; the message lists the shipped ones.
        RecipeError: the file has faults; names them all.
    """
    if Path(name).is_file():
        return load_settings(HardwareProfile, Path(name))
    known = shipped_profiles()
    found = [one for one in known if one == name] or [one for one in known if one.startswith(name)]
    if len(found) != 1:
        message = unknown_name_message("hardware", name, known)
        raise UnknownNameError(f"{message} A profile of your own will do too: a YAML file with the same keys.")
    text = files("foredraft.hardware").joinpath(f"{found[0]}.yaml").read_text(encoding="utf-8")
    return read_settings(HardwareProfile, text, f"{found[0]}.yaml")


def shipped() -> dict[str, HardwareProfile]:
    """Return all shipped profiles by name."""
    return {name: load_profile(name) for name in shipped_profiles()}


def profile_yaml(profile: HardwareProfile) -> str:
    """Return a profile as load_profile reads it."""
    return write_settings(profile)
