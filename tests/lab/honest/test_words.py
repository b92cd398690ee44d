"""What docs/privacy.md says of the studies is what their numbers say."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAPER = ("NormEC", "NormEC, no SN", "DP-Clip21")
FORGETS = ("NormEC, forgetting",)
DIRECT = ("DP-SGD, norm", "DP-SGD, clip")
Place = tuple[str, str, float]  # study, split, ε
Rows = dict[str, dict[str, str]]  # by method


def places() -> dict[Place, Rows]:
    found: dict[Place, Rows] = defaultdict(dict)
    with (DOCS / "replay/honest/honest.csv").open() as file:
        for row in csv.DictReader(file):
            found[row["study"], row["split"], float(row["epsilon"])][row["method"]] = row
    return found


def counted(methods: tuple[str, ...], where: Callable[[Place, Rows], bool]) -> tuple[int, int, int]:
    """Places, and in how many of them the best of `methods` is ahead of the better DP-SGD, and behind."""
    leads = []
    for place, rows in places().items():
        if where(place, rows):
            one, other = (
                max((rows[name] for name in own), key=lambda r: float(r["value"])) for own in (methods, DIRECT)
            )
            spread = math.hypot(float(one["spread"]), float(other["spread"]))
            leads.append((float(one["value"]) - float(other["value"])) / spread)
    return len(leads), sum(lead > 1 for lead in leads), sum(lead < -1 for lead in leads)


def linear(split: str) -> Callable[[Place, Rows], bool]:
    return lambda place, _: place[1] == split and place[0].split("-")[0] in ("a9a", "w8a", "digits")


def noisy(_: Place, rows: Rows) -> bool:
    bare = rows["DP-SGD, norm"]
    return float(bare["noise"]) / math.sqrt(float(bare["rounds"])) >= 0.2


def test_which_method_where() -> None:
    text = " ".join((DOCS / "privacy.md").read_text().split())
    number, ahead, behind = counted(PAPER, noisy)
    _, forgetting, forgotten = counted(FORGETS, noisy)
    assert f"0.2 and more; {number} places): error feedback as in the paper is behind DP-SGD in {behind} places" in text
    assert (
        f"and ahead in {ahead}; NormEC with forgetting is level with it (ahead {forgetting}, behind {forgotten}" in text
    )
    number, ahead, behind = counted(PAPER, linear("iid"))
    assert ahead == 0
    assert f"Error feedback as in the paper is behind in {behind} of {number} places and ahead in none" in text
    number, ahead, behind = counted(FORGETS, linear("iid"))
    assert ahead == 0
    assert f"Forgetting (`decay`) bounds it: behind in {behind}, ahead in none" in text
    number, ahead, behind = counted(PAPER, linear("label"))
    _, forgetting, forgotten = counted(FORGETS, linear("label"))
    assert (
        f"ahead in {ahead} of {number} places and behind in {behind}, with forgetting {forgetting} and {forgotten}"
        in text
    )


def test_ten_thousand_clients() -> None:
    """NormEC with forgetting is first everywhere, by 2 to 11 points over DP-SGD, in one place within the spreads."""
    number, ahead, behind = counted(FORGETS, lambda place, _: place[0] == "cifar10-10000")
    assert (number, ahead, behind) == (8, 7, 0)
    leads = []
    for place, rows in places().items():
        if place[0] == "cifar10-10000":
            values = {name: float(row["value"]) for name, row in rows.items()}
            assert max(values, key=values.__getitem__) == FORGETS[0]
            leads.append(100 * (values[FORGETS[0]] - max(values[name] for name in DIRECT)))
    assert (round(min(leads)), round(max(leads))) == (2, 11)
    text = " ".join((DOCS / "privacy.md").read_text().split())
    assert "by 2 to 11 points over DP-SGD" in text
    longer = {place[1:]: rows for place, rows in places().items() if place[0] == "cifar10-10000-longer"}
    told = {}
    for place, rows in longer.items():
        values = {name: 100 * float(row["value"]) for name, row in rows.items()}
        told[place] = f"{values[FORGETS[0]]:.1f} against {max(values[name] for name in DIRECT):.1f}"
    alike, sorted_, noisier = (told[place] for place in (("iid", 8.0), ("label", 8.0), ("iid", 2.0)))
    assert f"at ε = 8 {alike} % with clients alike and {sorted_} sorted by label; at ε = 2 {noisier}, and" in text
    assert counted(FORGETS, lambda place, _: place == ("cifar10-10000-longer", "label", 2.0)) == (1, 0, 0)
    assert counted(PAPER, lambda place, _: place == ("cifar10-10000-longer", "label", 2.0)) == (1, 0, 0)
    turns = [float(rows[name]["turn"]) for rows in longer.values() for name in DIRECT]
    assert f"(cosine {max(turns):.2f} to {min(turns):.2f} in all eight cells)" in text


def test_the_trial_of_momentum() -> None:
    """Its table and both texts, against the rounds of its runs."""
    names = {"dpsgd-norm": "DP-SGD, norm", "normec": "NormEC, forgetting"}
    runs: dict[tuple[str, str, str], dict[int, float]] = defaultdict(dict)
    with (DOCS / "replay/honest/momentum.csv").open() as file:
        for row in csv.DictReader(file):
            name = names[row["method"]] + (", momentum 0.9" if row["momentum"] == "0.9" else "")
            runs[row["split"], name, row["lr"]][int(row["round"])] = 100 * float(row["accuracy"])
    own = (DOCS / "replay/honest/momentum.md").read_text()
    for (split, name, lr), values in runs.items():
        shown = " | ".join(f"{values[at]:.1f}" for at in (50, 100, 150, 200))
        assert f"| {'alike' if split == 'iid' else 'sorted by label'} | {name} | {lr} | {shown} |" in own
    plain, carried, fed, carried_label, fed_label = (
        f"{runs[key][200]:.1f}"
        for key in (
            ("iid", "DP-SGD, norm", "0.25"),
            ("iid", "DP-SGD, norm, momentum 0.9", "0.3"),
            ("iid", "NormEC, forgetting", "0.391"),
            ("label", "DP-SGD, norm, momentum 0.9", "0.3"),
            ("label", "NormEC, forgetting", "0.391"),
        )
    )
    assert f"{carried} against {fed}, where DP-SGD without it has {plain}" in " ".join(own.split())
    assert f"{fed_label} against {carried_label}" in own
    text = " ".join((DOCS / "privacy.md").read_text().split())
    assert f"it lifts DP-SGD from {plain} to {carried} %, beside {fed} of NormEC with forgetting" in text
    assert f"NormEC is still ahead, {fed_label} against {carried_label}" in text
