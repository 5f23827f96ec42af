"""The command lines of README and documents, for the tests that parse them and that run them."""

import itertools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shell_blocks(page: Path) -> list[list[str]]:
    """Lines of the page's shell blocks, continued lines joined, comments and empty lines cut; a
    block that begins with a comment keeps it as its first line."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        lines = []
        for line in block.replace("\\\n", " ").splitlines():
            text = re.sub(r"\s+", " ", line.split(" #")[0]).strip()
            if text and (not text.startswith("#") or not lines):
                lines.append(text)
        found.append(lines)
    return found


def commands(page: Path) -> list[str]:
    """Command lines of the page's shell blocks."""
    return [line for block in shell_blocks(page) for line in block if not line.startswith("#")]


def inline(page: Path, program: str = "farflow") -> list[str]:
    """Command lines of ``program`` in running text, one for each choice of those that name
    several (``run ls|stop``)."""
    text = page.read_text(encoding="utf-8")
    found = []
    for line in re.findall(rf"`({program} [^`\n]+)`", text):
        choices = [word.split("|") for word in line.split()]
        found += [" ".join(words) for words in itertools.product(*choices)]
    return found


def on_hosts(page: Path) -> set[str]:
    """Lines of blocks that say on which host they are typed (``# on HOST``)."""
    blocks = [block for block in shell_blocks(page) if block and block[0].startswith("# on ")]
    return {line for block in blocks for line in block[1:]}
