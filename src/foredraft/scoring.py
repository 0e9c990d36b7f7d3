"""From drafters and traces to the report: replay, costs, audits, each kept under a digest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.acceptance.audit import Audit, audit
from foredraft.acceptance.cost import Costs, measure_costs
from foredraft.acceptance.evaluate import score
from foredraft.acceptance.report import AcceptanceReport
from foredraft.core.digest import digest_of
from foredraft.core.progress import SILENT, Progress
from foredraft.core.protocols import Drafter
from foredraft.models.target import LocalTarget
from foredraft.recipe import EvaluateSettings
from foredraft.trace.store import Trace
from foredraft.workspace import Workspace
