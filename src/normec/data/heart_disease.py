"""The UCI Heart Disease data: patients of four hospitals, as in FLamby's Fed-Heart-Disease.

The files lie in the folder heart-disease beside this module: Janosi, Steinbrunn, Pfisterer and Detrano (1988), Heart
Disease, UCI Machine Learning Repository, doi 10.24432/C52P4X, licence CC BY 4.0 (see LICENSE.txt there).

Columns, rows and test patients are those of FLamby (du Terrail et al., NeurIPS 2022): slope, ca and thal are left out,
then patients with a missing value; the chest pain type (cp) and the resting ECG (restecg) become indicators of all
their values but the first; the target is whether there is any disease. 66 % of each hospital's patients are for
training, drawn by scikit-learn's `train_test_split` with seed 43, stratified if both classes have more than two
patients. The rows that it draws are stored (test-rows.json), so that they depend on no version of scikit-learn.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..errors import UsageError

FOLDER = Path(__file__).with_name("heart-disease")
CENTRES = ("cleveland", "hungarian", "switzerland", "va")

# (centre, scale) of each input. They are round numbers of medical practice and no statistics of these patients, so that
# a private run may use them: a middle age and a decade; 130 mmHg, where high blood pressure begins; 200 mg/dl, up to
# which cholesterol is called desirable (0 means that it was not measured); 150 beats per minute, the largest heart rate
# that is expected at an age of 70; and one millimetre of ST depression, the usual criterion of an exercise test. Yes
# and no are 1 and −1.
_YES_OR_NO = (0.5, 0.5)
PUBLIC_SCALING = {
    "age": (50, 10),
    "sex": _YES_OR_NO,
    "trestbps": (130, 20),
    "chol": (200, 50),
    "fbs": _YES_OR_NO,
    "thalach": (150, 25),
    "exang": _YES_OR_NO,
    "oldpeak": (1, 1),
    "cp 2": _YES_OR_NO,
    "cp 3": _YES_OR_NO,
    "cp 4": _YES_OR_NO,
    "restecg 1": _YES_OR_NO,
    "restecg 2": _YES_OR_NO,
}
INPUTS = tuple(PUBLIC_SCALING)
_LEFT_OUT = ("slope", "ca", "thal")
_SMALLEST_STD = 1e-9  # is added to a standard deviation, as in FLamby

Floats = npt.NDArray[np.float64]


def read_heart_disease(
    scaling: Literal["public", "centre"] = "public",
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Read all patients, hospital by hospital, in the order of the files.

    Args:
        scaling: "public" for the fixed numbers of `PUBLIC_SCALING`; "centre" for the mean and the standard deviation of
            the training patients of each hospital, as in FLamby, which no noise covers in a private run.

    Returns:
        The inputs ``[740, 13]``, the targets, the number of each patient's hospital in `CENTRES`, and whether a patient
        is for testing.
    """
    inputs, targets, tested = zip(*(_centre(name) for name in CENTRES), strict=True)
    owners = np.repeat(np.arange(len(CENTRES)), [len(part) for part in targets])
    test = np.concatenate(tested)
    values: Floats = np.concatenate(inputs)
    if scaling == "public":
        centre, scale = np.array(list(PUBLIC_SCALING.values()), dtype=np.float64).T
        values = (values - centre) / scale
    else:
        for owner in range(len(CENTRES)):
            own = owners == owner
            known = values[own & ~test]
            values[own] = (values[own] - known.mean(0)) / (known.std(0, ddof=1) + _SMALLEST_STD)
    return values.astype(np.float32), np.concatenate(targets), owners, test


def _centre(name: str) -> tuple[Floats, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The inputs without scaling, the targets, and whether a patient is for testing."""
    path = FOLDER / f"{name}.csv"
    held_out = set(json.loads((FOLDER / "test-rows.json").read_text(encoding="utf-8"))[name])
    inputs, targets, tested = [], [], []
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            known = {column: value for column, value in row.items() if column not in _LEFT_OUT}
            if "?" in known.values():
                continue
            try:
                patient = {column: float(value) for column, value in known.items()}
            except (TypeError, ValueError):
                raise UsageError(f"{path}, line {number + 2}, is damaged; install normec again") from None
            for column, values in (("cp", (2, 3, 4)), ("restecg", (1, 2))):
                patient |= {f"{column} {value}": float(patient[column] == value) for value in values}
            inputs.append([patient[column] for column in INPUTS])
            targets.append(patient["num"] > 0)
            tested.append(number in held_out)
    return np.array(inputs), np.array(targets, dtype=np.int64), np.array(tested)
