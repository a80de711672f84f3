"""Find what breaks a rule of style in a file, and measure folders.

`python -m tests.style FOLDER ...` prints the figures of each folder, and each place that breaks a
rule.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeGuard

ROOT = Path(__file__).parents[1]

MOST_WORDS = 15
"""Words of a docstring's first sentence."""

LONGEST_LINE = 100
"""Characters of a line."""

VAGUE_NAMES = {"one", "known", "held", "own", "most", "told"}
"""Names of variables that do not say what the value is."""

GLOSSES = (
    "workers that hold the same layers",
    "span of time",
    "spans of time",
    "data-parallel replica",
    "way to react to failures",
    "ways to react to failures",
    "worker of one process",
    "which op a worker starts",
    "which columns of a pipeline failed",
    "layer's own update function",
    "elements of one parameter",
    "limits to compare policies with",
    "one of p equal",
)
"""Explanations of terms that stood often in parentheses.

A term is explained in the glossary, or once at the head of its module.
"""

COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Breach(NamedTuple):
    """A line that breaks a rule."""

    line: int
    rule: str
    text: str


class Figures(NamedTuple):
    """What one or several files measure."""

    sentences: int
    """Docstrings, of attributes too."""
    words: int
    """Words of their first sentences."""
    long_sentences: int
    """First sentences of over 25 words."""
    lines: int
    """Lines that are not blank."""
    long_lines: int
    """Lines of over `LONGEST_LINE` characters."""
    code_lines: int
    """Lines that are neither blank nor comment nor docstring."""
    code_characters: int
    """Characters of the lines of code, without indentation."""
    comments: int
    """Comments."""
    conditionals: int
    """Conditional expressions."""
    nested: int
    """Comprehensions within comprehensions."""
    names: int
    """Places that bind a local name."""
    vague_names: int
    """Those that bind one of `VAGUE_NAMES`."""
    docstring_lines: int
    """Lines of docstrings."""

    @classmethod
    def total(cls, figures: "list[Figures]") -> "Figures":
        """Add the figures of several files."""
        return cls(*map(sum, zip(*figures, strict=True)))

    def describe(self) -> str:
        """Write the figures as a row of a table."""
        code, names = max(1, self.code_lines), max(1, self.names)
        sentences = max(1, self.sentences)
        cells = (
            f"{self.words / sentences:.1f}; {self.long_sentences / sentences:.1%}",
            f"{self.code_characters / code:.0f}; {self.long_lines / max(1, self.lines):.1%}",
            f"{1000 * self.comments / max(1, self.lines):.1f}",
            f"{1000 * self.conditionals / code:.0f}; {1000 * self.nested / code:.1f}",
            f"{self.vague_names / names:.1%}",
            f"{self.docstring_lines / code:.2f}",
        )
        return " | ".join(cells)


def first_sentence(docstring: str) -> str:
    """Return a docstring's text up to its first full stop, or its first blank line.

    The point after a single character, as in `i.e.`, ends no sentence.
    """
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=\S\S)[.?](?:\s|$)", paragraph)[0]


def find_docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the docstrings of a module, of its classes and functions, and of attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        if isinstance(node, DOCUMENTED) and body and _is_text(body[0]):
            yield body[0].value
        for before, statement in pairwise(body):
            if isinstance(before, ast.Assign | ast.AnnAssign) and _is_text(statement):
                yield statement.value


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(
        getattr(statement.value, "value", None), str
    )


def find_breaches(source: str) -> list[Breach]:
    """Return the places of a file that break a rule, in order of lines."""
    tree = ast.parse(source)
    return sorted(
        [
            *_find_long_lines(source, tree),
            *_find_in_docstrings(tree),
            *_find_in_names(tree),
            *_find_in_statements(tree),
        ]
    )


def _find_long_lines(source: str, tree: ast.Module) -> Iterator[Breach]:
    written = _lines_of_texts(tree)
    for number, line in enumerate(source.splitlines(), 1):
        if len(line) > LONGEST_LINE and number not in written:
            yield Breach(number, "line", f"{len(line)} characters")


def _lines_of_texts(tree: ast.Module) -> set[int]:
    """Return the lines of texts that a program writes out, such as a style sheet."""
    docstrings = set(find_docstrings(tree))
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or node in docstrings:
            continue
        if isinstance(node.value, str) and "\n" in node.value:
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _find_in_docstrings(tree: ast.Module) -> Iterator[Breach]:
    for docstring in find_docstrings(tree):
        sentence = first_sentence(docstring.value)
        if len(sentence.split()) > MOST_WORDS:
            yield Breach(docstring.lineno, "sentence", f"{len(sentence.split())} words: {sentence}")
        text = " ".join(docstring.value.split())
        for gloss in GLOSSES:
            if re.search(rf"\([^()]*{gloss}", text):
                yield Breach(docstring.lineno, "gloss", gloss)


def _find_in_names(tree: ast.Module) -> Iterator[Breach]:
    for line, name in find_local_names(tree):
        if name in VAGUE_NAMES:
            yield Breach(line, "name", name)


def find_local_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each place that binds a variable or parameter.

    Fields of a class are none.
    """
    fields = {
        statement.target
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def _find_in_statements(tree: ast.Module) -> Iterator[Breach]:
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.stmt):
            continue
        for part in _divide_statement(statement):
            loops = sum(isinstance(node, COMPREHENSIONS) for node in part)
            choices = sum(isinstance(node, ast.IfExp) for node in part)
            if loops + choices > 1:
                text = f"{loops} comprehensions, {choices} conditional expressions"
                yield Breach(statement.lineno, "statement", text)
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and _pairs_tuples(statement):
            yield Breach(statement.lineno, "constants", ast.unparse(statement.targets[0]))


def _pairs_tuples(statement: ast.Assign) -> bool:
    """Return whether an assignment gives several names their values."""
    return isinstance(statement.targets[0], ast.Tuple) and isinstance(statement.value, ast.Tuple)


def _divide_statement(statement: ast.stmt) -> Iterator[list[ast.AST]]:
    """Yield the expressions of a statement, without those of statements in it.

    The keyword arguments of its outermost call count each by itself, as lines of a table do, and so
    do the entries of an outermost dict.
    """
    value = getattr(statement, "value", None)
    # As in `yield Point(...)` and `points.append(Point(...))`.
    while isinstance(value, ast.Yield) or _passes_a_call(value):
        value = value.value if isinstance(value, ast.Yield) else value.args[0]
    entries: Sequence[ast.AST] = ()
    if isinstance(value, ast.Call):
        entries = value.keywords
    elif isinstance(value, ast.Dict):
        entries = value.values
    yield list(_walk_expressions(statement, entries))
    for entry in entries:
        yield list(_walk_expressions(entry, []))


def _passes_a_call(value: ast.AST | None) -> TypeGuard[ast.Call]:
    """Return whether a call's only argument is another call."""
    if not isinstance(value, ast.Call) or value.keywords or len(value.args) != 1:
        return False
    return isinstance(value.args[0], ast.Call)


def _walk_expressions(root: ast.AST, without: Sequence[ast.AST]) -> Iterator[ast.AST]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.stmt) and child not in without:
                waiting.append(child)


def measure(source: str) -> Figures:
    """Measure the source of a file."""
    tree = ast.parse(source)
    docstrings = list(find_docstrings(tree))
    sentences = [len(first_sentence(docstring.value).split()) for docstring in docstrings]
    in_docstrings = {
        number
        for docstring in docstrings
        for number in range(docstring.lineno, docstring.end_lineno + 1)
    }
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    lines = source.splitlines()
    code = [
        line.strip()
        for number, line in enumerate(lines, 1)
        if line.strip() and number not in in_docstrings and not line.lstrip().startswith("#")
    ]
    nodes = list(ast.walk(tree))
    names = [name for _, name in find_local_names(tree)]
    loops = [node for node in nodes if isinstance(node, COMPREHENSIONS)]
    return Figures(
        sentences=len(sentences),
        words=sum(sentences),
        long_sentences=sum(words > 25 for words in sentences),
        lines=sum(bool(line.strip()) for line in lines),
        long_lines=sum(len(line) > LONGEST_LINE for line in lines),
        code_lines=len(code),
        code_characters=sum(map(len, code)),
        comments=len(comments),
        conditionals=sum(isinstance(node, ast.IfExp) for node in nodes),
        nested=sum(map(_holds_another, loops)),
        names=len(names),
        vague_names=sum(name in VAGUE_NAMES for name in names),
        docstring_lines=len(in_docstrings),
    )


def _holds_another(loop: ast.AST) -> bool:
    """Return whether a comprehension has another one within."""
    return sum(isinstance(node, COMPREHENSIONS) for node in ast.walk(loop)) > 1


def find_files(folder: Path) -> list[Path]:
    """Return the Python files of a folder, or the file itself, in order."""
    return [folder] if folder.is_file() else sorted(folder.rglob("*.py"))


def main(folders: list[str]) -> None:
    """Print the figures of each folder, then each breach in it."""
    for folder in folders:
        files = find_files(ROOT / folder)
        print(
            f"{folder} | {Figures.total([measure(path.read_text()) for path in files]).describe()}"
        )
        for path in files:
            for breach in find_breaches(path.read_text()):
                print(f"  {path.relative_to(ROOT)}:{breach.line}: {breach.rule}: {breach.text}")


if __name__ == "__main__":
    main(sys.argv[1:])
