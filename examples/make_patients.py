"""Write examples/patients.csv: invented patients, so that there is a table to train on.

    python examples/make_patients.py

Nobody in it exists. The outcome follows a logistic model of the other columns, with chance.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

FILE = Path(__file__).parent / "patients.csv"
COLUMNS = ("age", "sex", "smoker", "bmi", "blood_pressure", "outcome")
PATIENTS, SEED = 3000, 2024


def patients() -> list[tuple[object, ...]]:
    """Rows in the order of COLUMNS."""
    draw = np.random.Generator(np.random.PCG64(SEED))
    rows: list[tuple[object, ...]] = []
    for _ in range(PATIENTS):
        age = int(draw.integers(18, 91))
        sex = "f" if draw.random() < 0.5 else "m"
        smoker = "yes" if draw.random() < 0.25 else "no"
        bmi = round(float(np.clip(draw.normal(26, 4), 15, 45)), 1)
        pressure = round(float(np.clip(draw.normal(105 + 0.4 * age, 14), 80, 200)))
        score = 0.09 * (age - 55) + 0.16 * (bmi - 26) + 0.05 * (pressure - 127) + (2.0 if smoker == "yes" else -0.7)
        outcome = "ill" if draw.random() < 1 / (1 + np.exp(-score)) else "well"
        rows.append((age, sex, smoker, bmi, pressure, outcome))
    return rows


def main(file: Path = FILE) -> None:
    """Write the table."""
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(patients())


if __name__ == "__main__":
    main()
