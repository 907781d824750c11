"""Reads Dockerfiles, as far as ours go."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Instruction:
    """For example ``RUN`` and what is run."""

    name: str
    text: str

    @property
    def command(self) -> str:
        """Of a ``RUN``: what the shell is given."""
        return re.sub(r"^(--\S+\s+)+", "", self.text)

    @property
    def words(self) -> list[str]:
        """Its words; those that begin with ``--`` are left out."""
        return [word for word in shlex.split(self.text) if not word.startswith("--")]


@dataclass(frozen=True)
class Dockerfile:
    """The stages of a Dockerfile, each with its instructions, and what comes before the first."""

    preamble: list[Instruction]
    stages: list[list[Instruction]]

    def stage(self, name: str) -> list[Instruction]:
        """The instructions of a stage after its ``FROM … AS name``."""
        (found,) = (stage for stage in self.stages if stage[0].text.endswith(f" AS {name}"))
        return found[1:]

    @property
    def image(self) -> dict[str, list[Instruction]]:
        """The last stage, by instruction."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.stages[-1]:
            found.setdefault(instruction.name, []).append(instruction)
        return found


def read(path: Path) -> Dockerfile:
    """Read one."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    instructions = [Instruction(*line.split(None, 1)) for line in joined if line.strip()]
    starts = [number for number, instruction in enumerate(instructions) if instruction.name == "FROM"]
    ends = [*starts[1:], len(instructions)]
    return Dockerfile(
        instructions[: starts[0]], [instructions[start:end] for start, end in zip(starts, ends, strict=True)]
    )
