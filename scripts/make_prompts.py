"""Make a file of real prompts from the texts of Python's own help topics.

The rows are the same for the same Python. They come in the shapes that people bring (role/content and from/value, one
turn and several, awkward ids), and the last two lines are such that must be refused with a reason.

Usage: make_prompts.py FILE [--rows N] [--chars N]
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

Turn = tuple[str, str]

ODD_IDS = (
    "../../etc/passwd",
    "with spaces\tand\ttabs",
    "Case",
    "case",  # another id, the same file name where case is folded
    "ünï-çødé-☃-漢字",
    "CON",
    "x" * 300,  # longer than a file name may be
    "100%/of:these*are?legal",
)
REFUSED: tuple[dict[str, object], ...] = (
    {"id": "no turns", "conversations": []},
    {
        "id": "a picture",
        "conversations": [
            {
                "role": "user",
                "content": [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What is it?"}],
            },
            {"role": "assistant", "content": "A cat."},
        ],
    },
)


def passages(text: str, chars: int) -> list[str]:
    """`text` cut between paragraphs into passages of about `chars` characters; a longer paragraph is cut at a word."""
    found = [""]
    for paragraph in filter(None, (part.strip("\n") for part in text.split("\n\n"))):
        rest = paragraph
        while len(rest) > chars:
            cut = rest.rfind(" ", 0, chars) + 1 or chars
            found.append(rest[:cut].rstrip())
            rest = rest[cut:]
        if found[-1] and len(found[-1]) + len(rest) > chars:
            found.append("")
        found[-1] = f"{found[-1]}\n\n{rest}".strip("\n")
    # Leading spaces would join the template's line break in one token, and the loss mask would have no edge there.
    return [passage.strip() for passage in found if passage.strip()]


def dialogues(chars: int) -> Iterator[list[Turn]]:
    """One dialogue a topic: a question and its answer, and in every third topic a follow-up or two."""
    for number, (topic, text) in enumerate(sorted(topics.items())):
        parts = passages(text, chars)
        if not parts:
            continue
        turns = [("user", f"Explain the topic '{topic}' of the Python language."), ("assistant", parts[0])]
        if number % 3 == 0:
            # The follow-ups share the length of one answer, so that rows stay comparable.
            for part in passages("\n\n".join(parts[1:]), max(chars // 3, 80))[:2]:
                turns += [("user", "Go on, please."), ("assistant", part)]
        if number % 5 == 0:
            turns.insert(0, ("system", "You answer from the Python reference manual."))
        yield turns


def lines(rows: int, chars: int) -> Iterator[dict[str, object]]:
    """`rows` good rows and the refused ones."""
    for number, turns in zip(range(rows), dialogues(chars), strict=False):
        sample_id = ODD_IDS[number // 7] if number % 7 == 3 and number // 7 < len(ODD_IDS) else f"topic-{number}"
        if number % 4 == 1:
            names = {"user": "human", "assistant": "gpt", "system": "system"}
            yield {"id": sample_id, "conversations": [{"from": names[who], "value": what} for who, what in turns]}
        else:
            yield {"id": sample_id, "conversations": [{"role": who, "content": what} for who, what in turns]}
    yield from REFUSED


def main() -> None:
    """Write the file whole or not at all, and only if it differs: a run remembers its prompts by their digest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=72, help="good rows; as many as there are topics at most")
    parser.add_argument("--chars", type=int, default=900, help="characters of an answer, about 4 to a token")
    options = parser.parse_args()
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines(options.rows, options.chars))
    if options.file.exists() and options.file.read_text(encoding="utf-8") == text:
        return
    options.file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = options.file.with_name(f".{options.file.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(options.file)


if __name__ == "__main__":
    main()
