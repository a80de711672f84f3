"""Check whether the figures in documents are those that commands print.

    python -m benchmarks.figures trace               # into reproduction/, and so on for each figure
    python -m benchmarks.fleet                       # into benchmark/
    python -m benchmarks.printed [--write] [--from DIR] [REPRODUCTION.md ...]

A document names the file that a command wrote, and holds its tables between two comments:

    <!-- printed: reproduction/trace.md -->
    | model | policy | ...
    <!-- end -->

Without --write, the command reports which blocks differ from their files (exit 1), and which files
are missing (not compared). With --write, it replaces the blocks by the content of the files.

Outside of these blocks, a document may state no other figures (numbers with a decimal point, and
percentages). Each figure must be in a printed block of its section (to the digits that it has), or
between comments that name its source, which is what others published, what is assumed, or what a
command measured:

    <!-- from: ReCycle (SOSP 2024) -->
    ... published is 0.78 ...
    <!-- end -->

The command reports all other figures (exit 1).
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

DOCUMENTS = ("README.md", "REPRODUCTION.md")
BLOCK = re.compile(r"(<!-- printed: (?P<file>\S+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)
FROM = re.compile(r"<!-- from: [^\n]*? -->.*?<!-- end -->", re.DOTALL)
NO_FIGURES = re.compile(
    r"```.*?```|`[^`\n]*`|\]\([^)]*\)|!\[[^]]*\]|<!--.*?-->|"
    r"\b\d{4}\.\d{5}\b|\b\d+\.\d+\.\d+\b|\bPython \d\.\d+",
    re.DOTALL,
)
"""Pattern of text whose numbers are not figures.

It is code, links, pictures, comments, arXiv numbers and versions.
"""
FIGURE = re.compile(r"(?<![\w.,-])(\d[\d,]*\.\d+)(?!\w|\.\d)|(?<![\w.,])(\d+)(?= ?%)")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def printed_part(text: str) -> str:
    """Return the part of a file that a document takes.

    It is all but title and assumptions, which the document words itself.
    """
    return re.sub(r"\A# .*?\n\n", "", text).split("\nAssumed:\n")[0].rstrip() + "\n"


def renewed(document: str, folder: Path) -> tuple[str, Sequence[str], Sequence[str]]:
    """Return the document with blocks as printed, and files that differ or are missing."""
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


def unprinted(document: str) -> Iterator[tuple[int, str]]:
    """Return figures, as (line, figure), that are printed nowhere and have no source.

    A block that prints a figure is in the same section.
    """
    line = 1
    for section in re.split(r"(?m)^(?=#)", document):
        printed = [
            float(number.replace(",", ""))
            for block in BLOCK.finditer(section)
            for number in NUMBER.findall(block["body"])
        ]
        text = section
        for pattern in (BLOCK, FROM, NO_FIGURES):
            text = pattern.sub(lambda match: "\n" * match[0].count("\n"), text)
        for match in FIGURE.finditer(text):
            figure = match[1] or match[2]
            value, digits = float(figure.replace(",", "")), len(figure.partition(".")[2])
            if not any(
                abs(value - scale * number) <= 0.5000001 * 10**-digits
                for number in printed
                for scale in (1, 100)
            ):
                yield line + text.count("\n", 0, match.start()), figure
        line += section.count("\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "documents", nargs="*", type=Path, default=[Path(name) for name in DOCUMENTS]
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--from", dest="folder", type=Path, default=Path())
    options = parser.parse_args()
    wrong = False
    for path in options.documents:
        text, differing, missing = renewed(path.read_text(), options.folder)
        for name in missing:
            print(f"{path}: {name} is not there; not compared", file=sys.stderr)
        for name in differing:
            print(f"{path}: {'renewed' if options.write else 'differs'} from {name}")
        for line, figure in unprinted(text):
            print(f"{path}:{line}: {figure} is in no printed block of its section")
            wrong = True
        if options.write:
            path.write_text(text)
        wrong |= bool(differing) and not options.write
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
