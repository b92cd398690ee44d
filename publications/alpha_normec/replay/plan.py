"""The plan: every cell of the replay by a stable name, in the order in which they are worth their time.

    tables      the sixteen accuracies of the paper's three tables; then two more seeds of those at β = 0.01 and 0.1
    readings    what the paper leaves open, one thing at a time, on two or three cells of the tables
    private     DP-α-NormEC and DP-Clip21 over β × γ, under the readings of the noise that train
    alpha       the heat map over α × β, beyond the cells that the tables have

A cell's configuration is the paper's protocol (`lab.paper`) under a reading; nothing of it is defined here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from normec.errors import one_of
from normec.experiments.config import RunConfig, make

from ..figures import arms, protocol
from ..figures.arms import Arm
from ..figures.protocol import Protocol
from ..figures.published import SHORT_BETA, TABLES

PARTS = ("tables", "readings", "private", "alpha")
PRECISION = "bf16"  # of all cells but those that ask whether it matters
MORE_SEEDS, MORE_BETAS = (1, 2), (0.01, 0.1)  # seeds after the paper's own, and where they are spent
NOISES = ("total-norm", "total-variance")  # the readings of the noise under which something is learnt
HOPELESS, HOPELESS_AT = "per-coordinate", (0.001, 0.01)  # β and γ of the cells that show what it does
PRIVATE_ARMS = (arms.DP_NORMEC_SN, arms.DP_NORMEC, arms.DP_CLIP21)
PRIVATE_LRS = (0.001, 0.01, 0.1)
LOOKS = 60  # evaluations in a run of full length
ONCE_AT = (0.01, 0.1)  # β and γ of the cells with noise once an epoch

SN_BY_TENSOR = Arm("NormEC with SN by tensor", {**arms.NORMEC_SN.settings, "server_norm": "by-tensor"})
SN_IN_PLACE = Arm("NormEC with SN in place", {**arms.NORMEC_SN.settings, "server_norm": "in-place"})
# How names of cells call a method, and the method of the paper's tables that it is, or is a reading of.
SLUGS = {
    arms.NORMEC.name: "normec",
    arms.NORMEC_SN.name: "normec-sn",
    arms.DPSGD.name: "dpsgd-norm",
    arms.CLIP21.name: "clip21",
    arms.DP_NORMEC.name: "normec",
    arms.DP_NORMEC_SN.name: "normec-sn",
    arms.DP_CLIP21.name: "clip21",
    SN_BY_TENSOR.name: "normec-sn",
    SN_IN_PLACE.name: "normec-sn",
}
PRINTED = {SLUGS[name]: entries for name, entries in TABLES.items()}


@dataclass(frozen=True)
class Reading:
    """One thing read otherwise than in the tables: settings of the protocol, or another arm for the same method."""

    name: str
    says: str
    changes: tuple[tuple[str, str], ...] = ()
    arm: Arm | None = None
    at: tuple[tuple[Arm, float], ...] = ()  # which cells of the tables it is tried on
    because: str = ""  # why it may end far away


READINGS = (
    Reading(
        "sn-by-tensor",
        "server normalisation of each of the model's tensors on its own",
        arm=SN_BY_TENSOR,
        at=((arms.NORMEC_SN, 0.01), (arms.NORMEC_SN, 0.1), (arms.NORMEC_SN, 1.0)),
    ),
    Reading(
        "sn-in-place",
        "the same, and in place: the next messages are added to the normalised estimate",
        arm=SN_IN_PLACE,
        at=((arms.NORMEC_SN, 0.01), (arms.NORMEC_SN, 0.1), (arms.NORMEC_SN, 1.0)),
        because="the estimate is no longer the mean of the memories, and nothing ever makes it so again: what a "
        "client sends corrects a memory that the server's estimate does not hold.",
    ),
    Reading(
        "memory-from-gradient",
        "memories that start from the first gradient instead of zero",
        (("memory_start", "gradient"),),
        at=((arms.NORMEC, 0.01), (arms.NORMEC_SN, 0.1), (arms.CLIP21, 0.01)),
        because="without SN a step is γ times the estimate. It starts as long as the first gradients and changes by at "
        "most β a round, so hundreds of rounds go the first one's way, and the loss grows from the start. From zero it "
        "grows no faster than it can turn; with SN its length does not matter.",
    ),
    Reading(
        "split-dirichlet",
        "images dealt by Dirichlet(0.5) over the classes instead of at random",
        (("split", "dirichlet"),),
        at=((arms.NORMEC, 0.1), (arms.NORMEC_SN, 0.1), (arms.DPSGD, 0.01)),
    ),
    Reading(
        "split-label",
        "images sorted by class, one class a worker",
        (("split", "label"),),
        at=((arms.NORMEC, 0.1), (arms.DPSGD, 0.01)),
        because="a worker's batches are of one class, and in training BatchNorm's statistics are that class's; in "
        "evaluation they are averages over all workers. So the training loss falls and the test accuracy does not.",
    ),
    Reading(
        "tf32",
        "products in TF32 instead of bf16: whether the precision matters",
        (("precision", "tf32"),),
        at=((arms.NORMEC, 0.1),),
    ),
)
ONCE = "noise-once-an-epoch"
ONCE_SAYS = "noise of the paper's size once an epoch, spread over its messages (with noise, half the epochs)"


@dataclass(frozen=True)
class Planned:
    """A cell of the replay. One that is `chosen` is run only where it did best among its kind."""

    name: str
    part: str
    reading: str
    arm: Arm
    beta: float
    lr: float
    alpha: float | None
    seed: int
    config: RunConfig
    chosen: bool = False

    @property
    def paper(self) -> float | None:
        """The accuracy that the paper's tables print at this point, in percent; whatever the reading."""
        entry = None if self.arm.private else PRINTED[SLUGS[self.arm.name]].get(self.beta)
        usual = self.alpha is None or self.alpha == Protocol.model_fields["alpha"].default
        return entry.accuracy if entry is not None and entry.lr == self.lr and usual else None


def paper_protocol() -> Protocol:
    """The paper's scale, in the precision of the replay."""
    return protocol.make("paper", {"precision": PRECISION})


def plan(base: Protocol) -> tuple[Planned, ...]:
    """Every cell there may be, in order; names are the same whatever the protocol's scale."""
    cells = [*_tables(base), *_readings(base), *_private(base), *_alphas(base)]
    return tuple({cell.name: cell for cell in cells}.values())


def named(cells: Sequence[Planned], names: Sequence[str]) -> list[Planned]:
    """Cells by part or by name; all of them where none is named."""
    for name in names:
        one_of([*PARTS, *(cell.name for cell in cells)], cell=name)
    return [cell for cell in cells if not names or cell.part in names or cell.name in names]


def _tables(base: Protocol) -> Iterator[Planned]:
    methods = (arms.NORMEC, arms.NORMEC_SN, arms.DPSGD, arms.CLIP21)
    for arm in methods:
        for beta in base.betas:
            yield table_cell(base, arm, beta)
    for more in MORE_SEEDS:
        other = base.model_copy(update={"seed": base.seed + more})
        for arm in methods:
            for beta in MORE_BETAS:
                yield table_cell(other, arm, beta)


def table_cell(base: Protocol, arm: Arm, beta: float) -> Planned:
    """A cell of the tables, at the paper's γ."""
    return _cell(base, "tables", "tables", arm, beta, TABLES[arm.name][beta].lr)


def _readings(base: Protocol) -> Iterator[Planned]:
    for reading in READINGS:
        other = base.model_copy(update=dict(reading.changes))
        for arm, beta in reading.at:
            yield _cell(other, "readings", reading.name, reading.arm or arm, beta, TABLES[arm.name][beta].lr)
    once = base.model_copy(update={"noise": NOISES[0], "noise_rounds": "shared"})
    for arm in PRIVATE_ARMS:
        yield _halved(_cell(once, "readings", ONCE, arm, *ONCE_AT), once)


def _private(base: Protocol) -> Iterator[Planned]:
    grids = [base.model_copy(update={"noise": noise}) for noise in NOISES]
    full = [
        _cell(grid, "private", grid.noise, arm, beta, lr)
        for grid in grids
        for arm in PRIVATE_ARMS
        for beta in base.private_betas
        for lr in PRIVATE_LRS
    ]
    yield from (_halved(cell, base) for cell in full)
    hopeless = base.model_copy(update={"noise": HOPELESS})
    for arm in PRIVATE_ARMS[:2]:
        yield _halved(_cell(hopeless, "private", HOPELESS, arm, *HOPELESS_AT), base)
    yield from (replace(cell, name=f"{cell.name}-long", chosen=True) for cell in full)


def _alphas(base: Protocol) -> Iterator[Planned]:
    for alpha in base.alphas:
        for beta in base.betas:
            if alpha != base.alpha:
                yield _cell(base, "alpha", "tables", arms.NORMEC_SN, beta, TABLES[arms.NORMEC_SN.name][beta].lr, alpha)


def _cell(
    base: Protocol, part: str, reading: str, arm: Arm, beta: float, lr: float, alpha: float | None = None
) -> Planned:
    config = _watched(
        arms.cell(base, arm, beta, lr, alpha).config, base, rows=1 if part in ("private", "alpha") else 10
    )
    words = [part, *([reading] if reading != "tables" else []), SLUGS[arm.name], f"beta-{beta:g}"]
    words += [f"lr-{lr:g}"] if arm.private else []
    words += [f"alpha-{alpha:g}"] if alpha is not None else []
    return Planned("-".join([*words, f"seed-{base.seed}"]), part, reading, arm, beta, lr, alpha, base.seed, config)


def _watched(config: RunConfig, base: Protocol, rows: int) -> RunConfig:
    """As many looks at the test set as a curve needs, so many rows of history each: both wait for the device."""
    rounds = max(1, base.rounds // LOOKS) * protocol.extent(base).steps
    looks = {"evaluate_every": rounds, "log_every": max(1, rounds // rows)}
    return make({**config.model_dump(exclude_none=True), **looks})


def _halved(cell: Planned, base: Protocol) -> Planned:
    """A private run of as many epochs as the paper's short ones, with the noise of its full ones."""
    length = "epochs" if base.round == "epoch" else "rounds"
    return replace(cell, config=make({**cell.config.model_dump(exclude_none=True), length: base.short_rounds}))


def half_of(cell: Planned) -> str:
    """The name of the short run of a cell that is run in full where it did best."""
    return cell.name.removesuffix("-long")


def lengthened(cells: Sequence[Planned], scores: dict[str, float]) -> set[str]:
    """The names of the cells to be run in full: of each private method and reading the best, and SN's at β = 1.

    `scores` are the best accuracies on the records held out, by the names of the short runs. Nothing is chosen before
    all of a kind have run.
    """
    found = set()
    long = [cell for cell in cells if cell.chosen]
    for noise in dict.fromkeys(cell.reading for cell in long):
        for arm in PRIVATE_ARMS:
            kind = [cell for cell in long if (cell.reading, cell.arm.name) == (noise, arm.name)]
            last = [cell for cell in kind if cell.beta == SHORT_BETA and arm is arms.DP_NORMEC_SN]
            for group in (kind, last):
                if group and all(half_of(cell) in scores for cell in group):
                    found.add(max(group, key=lambda cell: scores[half_of(cell)]).name)
    return found
