"""Writes what the scripts print into docs/fidelity.md, in place of what they printed before.

Usage: python benchmarks/write_fidelity.py MEASURED [--only NAME]

MEASURED is the folder of measured data that docs/fidelity.md names. Between a line ``<!-- begin: COMMAND -->`` and the
next ``<!-- end -->`` stands what COMMAND prints, with MEASURED in it replaced by that folder; the rest of the page is
kept. ``--only`` runs the commands alone in which NAME stands. A command that fails leaves the page as it was.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "fidelity.md"
BLOCK = re.compile(r"(<!-- begin: (?P<command>[^\n]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    """Run every command of the page and write it anew."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", type=Path)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    folder = arguments.measured.resolve()

    def refreshed(match: re.Match[str]) -> str:
        command = match["command"]
        if arguments.only not in command:
            return match[0]
        sys.stderr.write(f"{command}\n")
        printed = output_of(command, folder)
        text = printed if printed.lstrip().startswith("|") else f"```text\n{printed.rstrip()}\n```\n"
        return f"{match[1]}\n{text.rstrip()}\n\n{match[3]}"

    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(refreshed, page), encoding="utf-8")


def output_of(command: str, folder: Path) -> str:
    """What a command prints; ends this script if it fails."""
    words = [word.replace("MEASURED", str(folder)) for word in shlex.split(command)]
    words[0] = sys.executable if words[0] == "python" else words[0]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
