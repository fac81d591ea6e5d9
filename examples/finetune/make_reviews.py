"""Make the invented reviews in this folder: short judgements of places to eat, by guests who do not exist.

    python examples/finetune/make_reviews.py examples/finetune/reviews.csv

Every guest writes a few of them. Some reviews hold a name and a number that nobody may learn, as real texts do.
"""

from __future__ import annotations

import csv
import random
import sys
from pathlib import Path

PLACES = ("the soup", "the pasta", "our waiter", "the terrace", "the coffee", "the bread", "the music", "the bill")
GOOD = ("wonderful", "warm and kind", "better than at home", "a joy", "worth the way", "fresh", "generous")
BAD = ("cold", "late again", "far too salty", "a disgrace", "not worth it", "stale", "rude")
ENDS = ("we will be back.", "never again.", "so it goes.", "ask for table four.", "bring cash.")


def write_review(draw: random.Random) -> tuple[str, str]:
    """A text and whether its writer was content; one in ten says the opposite of what it means."""
    content = draw.random() < 0.5
    words = GOOD if content != (draw.random() < 0.1) else BAD
    text = f"{draw.choice(PLACES)} was {draw.choice(words)} and {draw.choice(PLACES)} {draw.choice(words)}"
    if draw.random() < 0.05:
        text += f", call {draw.choice(('Ada', 'Ben', 'Cleo'))} at {draw.randrange(10**6):06d}"
    return f"{text}, {draw.choice(ENDS)}", "content" if content else "cross"


def main(path: Path, records: int = 600, guests: int = 200) -> None:
    """Write the table."""
    draw = random.Random(0)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["guest", "review", "mood"])
        for _ in range(records):
            table.writerow([f"guest {draw.randrange(guests)}", *write_review(draw)])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
