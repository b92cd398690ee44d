"""The numbers that the paper prints: its tables in full, and the numbers in its text.

Accuracies are in percent, on CIFAR-10 with ResNet20. A statement without a number ("almost the same", "faster") is
the range of numbers that agree with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .methods import PaperMethod


@dataclass(frozen=True)
class PaperNumber:
    """A number of the paper, or a range; `text` is how the paper writes it."""

    low: float
    high: float
    text: str

    @classmethod
    def exactly(cls, value: float) -> PaperNumber:
        return cls(value, value, f"{value:.2f}")

    @classmethod
    def between(cls, low: float, high: float) -> PaperNumber:
        return cls(low, high, f"{low:g}–{high:g}")

    def difference(self, ours: float) -> float:
        """Ours minus the paper's; for a range, the distance to it."""
        return ours - min(max(ours, self.low), self.high)


@dataclass(frozen=True)
class Entry:
    """A row of a table: the best step size and the final accuracy."""

    lr: float
    accuracy: float


# tab-ef (Appendix, "Benefits of Error Compensation"), tab-sn ("Effect of Server Normalization"), tab-clip ("Comparison
# of Clip21"): by the slug of the method and β.
TABLES: Mapping[str, Mapping[float, Entry]] = {
    "normec": {
        0.01: Entry(0.1, 84.04),
        0.1: Entry(0.1, 86.09),
        1.0: Entry(0.1, 84.80),
        10.0: Entry(0.01, 79.25),
    },
    "normec-sn": {
        0.01: Entry(0.01, 82.86),
        0.1: Entry(0.1, 85.43),
        1.0: Entry(0.1, 84.29),
        10.0: Entry(0.1, 81.48),
    },
    "dpsgd-norm": {
        0.01: Entry(1.0, 51.10),
        0.1: Entry(1.0, 79.68),
        1.0: Entry(1.0, 83.89),
        10.0: Entry(0.1, 84.50),
    },
    "clip21": {
        0.01: Entry(0.1, 83.00),
        0.1: Entry(0.1, 85.91),
        1.0: Entry(0.1, 84.78),
        10.0: Entry(0.1, 83.19),
    },
}


def printed(method: PaperMethod, beta: float) -> Entry | None:
    """The row of the paper's tables for a method, or for the method of which it is a reading."""
    return None if method.private else TABLES[method.slug].get(beta)


# fig-heatmap: the highest accuracy over α × β, and the text on its columns.
BEST = PaperNumber.exactly(85.78)
BEST_AT = (0.1, 0.1)  # α, β
BY_BETA: Mapping[float, PaperNumber] = {
    0.01: PaperNumber.between(83, 84),
    0.1: PaperNumber.between(85, 86),
    10.0: PaperNumber.between(81, 82),
}

# fig-dp-heatmaps: peaks, and the spread over γ in {0.001, 0.01, 0.1} at β = 0.001 and 0.01.
PEAK = PaperNumber.exactly(77.56)
PEAK_SN = PaperNumber.exactly(72.21)
SPREAD_BETAS, SPREAD_LRS = (0.001, 0.01), (0.001, 0.01, 0.1)
SPREAD = PaperNumber(40, 40, "40")
SPREAD_SN = PaperNumber(0, 6, "≤ 6")

# fig-dp-curves: DP-α-NormEC without SN is faster than DP-Clip21, "particularly" for these β.
FASTER = PaperNumber(0, math.inf, "> 0")
FASTER_BETAS = (0.001, 0.1)
# … and at β = 1 only server normalisation "can still maintain convergence".
SURVIVES_BETA = 1.0

# fig-dp-150: at β = 1, "almost the same as after a doubled communication budget".
SHORT_BETA = 1.0
SHORT = PaperNumber(0, 0, "≈ 0")
