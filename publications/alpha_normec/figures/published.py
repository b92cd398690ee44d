"""What the paper prints: its tables in full, and the numbers in its text, each with the place it stands in.

Accuracies are in percent, on CIFAR-10 with ResNet20. A statement without a number ("almost the same", "faster") is
kept as the range that it allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from . import arms


@dataclass(frozen=True)
class Said:
    """A number of the paper, or the range it gives; `text` is how it is written."""

    low: float
    high: float
    text: str

    @classmethod
    def exactly(cls, value: float) -> Said:
        return cls(value, value, f"{value:.2f}")

    @classmethod
    def between(cls, low: float, high: float) -> Said:
        return cls(low, high, f"{low:g}–{high:g}")

    def difference(self, ours: float) -> float:
        """Ours less the paper's; from a range, how far outside of it."""
        return ours - min(max(ours, self.low), self.high)


@dataclass(frozen=True)
class Entry:
    """A line of a table: the step size that did best, and the final accuracy."""

    lr: float
    accuracy: float


# tab-ef (Appendix, "Benefits of Error Compensation"), tab-sn ("Effect of Server Normalization"), tab-clip ("Comparison
# of Clip21"): by method and β.
TABLES: Mapping[str, Mapping[float, Entry]] = {
    arms.NORMEC.name: {
        0.01: Entry(0.1, 84.04),
        0.1: Entry(0.1, 86.09),
        1.0: Entry(0.1, 84.80),
        10.0: Entry(0.01, 79.25),
    },
    arms.NORMEC_SN.name: {
        0.01: Entry(0.01, 82.86),
        0.1: Entry(0.1, 85.43),
        1.0: Entry(0.1, 84.29),
        10.0: Entry(0.1, 81.48),
    },
    arms.DPSGD.name: {
        0.01: Entry(1.0, 51.10),
        0.1: Entry(1.0, 79.68),
        1.0: Entry(1.0, 83.89),
        10.0: Entry(0.1, 84.50),
    },
    arms.CLIP21.name: {
        0.01: Entry(0.1, 83.00),
        0.1: Entry(0.1, 85.91),
        1.0: Entry(0.1, 84.78),
        10.0: Entry(0.1, 83.19),
    },
}

# fig-heatmap: the highest accuracy over α × β, and what the text says of its columns.
BEST = Said.exactly(85.78)
BEST_AT = (0.1, 0.1)  # α, β
BY_BETA: Mapping[float, Said] = {
    0.01: Said.between(83, 84),
    0.1: Said.between(85, 86),
    10.0: Said.between(81, 82),
}

# fig-dp-heatmaps: peaks, and the spread over γ in {0.001, 0.01, 0.1} at β = 0.001 and 0.01.
PEAK = Said.exactly(77.56)
PEAK_SN = Said.exactly(72.21)
SPREAD_BETAS, SPREAD_LRS = (0.001, 0.01), (0.001, 0.01, 0.1)
SPREAD = Said(40, 40, "40")
SPREAD_SN = Said(0, 6, "≤ 6")

# fig-dp-curves: DP-α-NormEC without SN is faster than DP-Clip21, "particularly" for these β.
FASTER = Said(0, math.inf, "> 0")
FASTER_BETAS = (0.001, 0.1)
# … and at β = 1 only server normalisation "can still maintain convergence".
SURVIVES_BETA = 1.0

# fig-dp-150: at β = 1, "almost the same as after a doubled communication budget".
SHORT_BETA = 1.0
SHORT = Said(0, 0, "≈ 0")
