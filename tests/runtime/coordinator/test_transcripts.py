"""Each file of `transcripts` says what follows its commands: events, effects and changes of state.

A file has comments, then blocks: commands, a line `----`, and what follows them, up to an empty
line. The commands are explained in `script_commands.py`. `pytest FILE --rewrite-transcripts` writes
anew what follows; read the difference as you would read code.
"""

from pathlib import Path

import pytest

from tests.runtime.coordinator.script_commands import Script

FOLDER = Path(__file__).parent / "transcripts"
ARCHITECTURE = Path(__file__).parents[3] / "ARCHITECTURE.md"


def play(text, folder):
    """The transcript of the same commands."""
    script, blocks = Script(folder), []
    for block in text.rstrip("\n").split("\n\n"):
        lines = block.partition("\n----")[0].split("\n")
        commands = [line for line in lines if not line.startswith("#")]
        blocks.append(
            "\n".join([*lines, "----", *script.play("\n".join(commands))] if commands else lines)
        )
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_what_follows_is_what_the_transcript_says(path, tmp_path, pytestconfig):
    played = play(path.read_text(), tmp_path)
    if pytestconfig.getoption("--rewrite-transcripts"):
        path.write_text(played)
        return
    assert path.read_text() == played, "if the new one is right: pytest --rewrite-transcripts"


def test_the_death_in_the_architecture_is_that_of_the_transcript(pytestconfig):
    blocks = (FOLDER / "death.txt").read_text().split("\n\n")
    (death,) = [block for block in blocks if block.startswith("kill")]
    text = ARCHITECTURE.read_text()
    begin = text.index("```\n", text.index("When worker 1.1 of 2 x 2 dies")) + len("```\n")
    end = text.index("```", begin)
    if pytestconfig.getoption("--rewrite-transcripts"):
        ARCHITECTURE.write_text(f"{text[:begin]}{death}\n{text[end:]}")
    else:
        assert text[begin:end] == f"{death}\n"
