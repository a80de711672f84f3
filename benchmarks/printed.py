"""Whether the figures in documents are those that commands print.

    slipstream reproduce trace                       # into reproduction/, and so on for each figure
    slipstream benchmark                             # into benchmark/
    python -m benchmarks.printed [--write] [--from DIR] [REPRODUCTION.md ...]

A document names the file that a command wrote, and holds its tables between two comments:

    <!-- printed: reproduction/trace.md -->
    | model | policy | ...
    <!-- end -->

Without --write, says which blocks differ from their files (exit 1), and which files are not there (not compared).
With it, the blocks become what the files say.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

DOCUMENTS = ("README.md", "REPRODUCTION.md")
BLOCK = re.compile(r"(<!-- printed: (?P<file>\S+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def printed_part(text: str) -> str:
    """What a document takes of a file: all but its title and what it assumes, which the document says in its words."""
    return re.sub(r"\A# .*?\n\n", "", text).split("\nAssumed:\n")[0].rstrip() + "\n"


def renewed(document: str, folder: Path) -> tuple[str, Sequence[str], Sequence[str]]:
    """(the document with blocks as printed, files from which a block differs, files that are not there)."""
    differing: list[str] = []
    missing: list[str] = []

    def block(match: re.Match[str]) -> str:
        path = folder / match["file"]
        if not path.is_file():
            missing.append(match["file"])
            return match[0]
        if (now := printed_part(path.read_text())) != match["body"]:
            differing.append(match["file"])
        return f"{match[1]}{now}{match[4]}"

    return BLOCK.sub(block, document), differing, missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", nargs="*", type=Path, default=[Path(name) for name in DOCUMENTS])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--from", dest="folder", type=Path, default=Path())
    options = parser.parse_args()
    differs = False
    for path in options.documents:
        text, differing, missing = renewed(path.read_text(), options.folder)
        for name in missing:
            print(f"{path}: {name} is not there; not compared", file=sys.stderr)
        for name in differing:
            print(f"{path}: {'renewed' if options.write else 'differs'} from {name}")
        if options.write:
            path.write_text(text)
        differs |= bool(differing)
    sys.exit(1 if differs and not options.write else 0)


if __name__ == "__main__":
    main()
