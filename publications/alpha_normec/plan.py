"""The plan: every run of the reproduction is a cell with a stable name, in the order in which the cells are run.

    tables      the sixteen accuracies of the paper's three tables; then two more seeds of those at β = 0.01 and 0.1
    readings    details that the paper leaves open, one at a time, on up to three cells of the tables
    private     DP-α-NormEC and DP-Clip21 over β × γ, with the interpretations of the noise that allow training, and
                two cells with one that does not
    alpha       the heat map over α × β, without the cells that are part of the tables

Figures and pages are made from the records of these cells. Where the step size is chosen on validation data, `tables`
and `alpha` also have the cells with the other step sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from normec.errors import one_of
from normec.settings import RunConfig

from .methods import (
    CLIP21,
    DP_NORMEC_SN,
    DPSGD,
    NORMEC,
    NORMEC_SN,
    PRIVATE_METHODS,
    SN_BY_TENSOR,
    SN_IN_PLACE,
    TABLE_METHODS,
    PaperMethod,
    configure,
)
from .protocol import Protocol
from .published import SHORT_BETA, printed

PARTS = ("tables", "readings", "private", "alpha")
TABLES = "tables"  # the reading of the paper that the tables have
MORE_SEEDS, MORE_BETAS = (1, 2), (0.01, 0.1)  # offsets of the additional seeds, and the β that they are run at
NOISES = ("total-norm", "total-variance")  # the interpretations of the noise with which the model learns
PER_COORDINATE, PER_COORDINATE_AT = "per-coordinate", (0.001, 0.01)  # β and γ of the cells that show it fail
ONCE_AT = (0.01, 0.1)  # β and γ of the cells with noise once per epoch


@dataclass(frozen=True)
class Reading:
    """Another interpretation of one detail: settings of the protocol, or a variant of the method."""

    name: str
    says: str
    changes: tuple[tuple[str, str], ...] = ()
    method: PaperMethod | None = None
    at: tuple[tuple[PaperMethod, float], ...] = ()  # the cells of the tables that are run again
    because: str = ""  # why it may end far from the paper


READINGS = (
    Reading(
        "sn-by-tensor",
        "server normalisation of each of the model's tensors on its own",
        method=SN_BY_TENSOR,
        at=((NORMEC_SN, 0.01), (NORMEC_SN, 0.1), (NORMEC_SN, 1.0)),
    ),
    Reading(
        "sn-in-place",
        "the same, in place: the next messages are added to the normalised estimate",
        method=SN_IN_PLACE,
        at=((NORMEC_SN, 0.01), (NORMEC_SN, 0.1), (NORMEC_SN, 1.0)),
        because="the estimate is no longer the mean of the memories and never becomes it again: a client's message "
        "corrects a memory that is not part of the server's estimate.",
    ),
    Reading(
        "memory-from-gradient",
        "memories that start from the first gradient instead of zero",
        (("memory_start", "gradient"),),
        at=((NORMEC, 0.01), (NORMEC_SN, 0.1), (CLIP21, 0.01)),
        because="without SN a step is γ times the estimate. The estimate starts as long as the first gradients and "
        "changes by at most β per round, so hundreds of rounds follow the direction of the first one, and the loss "
        "grows from the start. An estimate that starts from zero grows no faster than it can turn; with SN its length "
        "does not matter.",
    ),
    Reading(
        "split-dirichlet",
        "images split by Dirichlet(0.5) over the classes instead of at random",
        (("split", "dirichlet"),),
        at=((NORMEC, 0.1), (NORMEC_SN, 0.1), (DPSGD, 0.01)),
    ),
    Reading(
        "split-label",
        "images sorted by class, one class per worker",
        (("split", "label"),),
        at=((NORMEC, 0.1), (DPSGD, 0.01)),
        because="a worker's batches hold one class, so BatchNorm trains with the statistics of that class, and "
        "evaluates with averages over all workers. The training loss falls and the test accuracy does not rise.",
    ),
    Reading(
        "tf32",
        "matrix products in TF32 instead of bf16: does the precision matter?",
        (("precision", "tf32"),),
        at=((NORMEC, 0.1),),
    ),
)
ONCE = "noise-once-an-epoch"
ONCE_SAYS = "the messages of an epoch share noise of the paper's size (private runs of half length)"


@dataclass(frozen=True)
class Cell:
    """One run of the plan. A private cell of `full_length` is run only if it is the best of its kind, or asked for."""

    name: str
    part: str
    reading: str
    method: PaperMethod
    beta: float
    lr: float
    alpha: float | None
    seed: int
    config: RunConfig
    full_length: bool = False

    @property
    def paper(self) -> float | None:
        """The accuracy in percent that the paper's tables print at this point, for every reading."""
        entry = printed(self.method, self.beta)
        usual = self.alpha is None or self.alpha == Protocol.model_fields["alpha"].default
        return entry.accuracy if entry is not None and entry.lr == self.lr and usual else None


@lru_cache(maxsize=8)
def plan(base: Protocol) -> tuple[Cell, ...]:
    """All cells, in order."""
    cells = [*_tables(base), *_readings(base), *_private(base), *_alphas(base)]
    return tuple({cell.name: cell for cell in cells}.values())


def named(cells: Sequence[Cell], names: Sequence[str]) -> list[Cell]:
    """Cells by part or by name; all of them if no name is given."""
    for name in names:
        one_of([*PARTS, *(cell.name for cell in cells)], cell=name)
    return [cell for cell in cells if not names or cell.part in names or cell.name in names]


def step_sizes(base: Protocol, method: PaperMethod, beta: float) -> tuple[float, ...]:
    """The step sizes to choose from; only the paper's if it prints one and the protocol says so."""
    if method.private:
        return base.private_lrs
    entry = printed(method, beta)
    return (entry.lr,) if entry is not None and base.choose == "paper" else base.lrs


def cell_at(base: Protocol, method: PaperMethod, beta: float, lr: float, alpha: float | None = None) -> Cell:
    """The cell without noise at a point of the grids, under the protocol's own reading."""
    if alpha is None or alpha == base.alpha:
        return _cell(base, "tables", TABLES, method, beta, lr)
    return _cell(base, "alpha", TABLES, method, beta, lr, alpha)


def private_cell(
    base: Protocol, method: PaperMethod, beta: float, lr: float, noise: str | None = None, full_length: bool = True
) -> Cell:
    """The cell with noise at a point of the grids, with the protocol's interpretation of the noise by default."""
    base = base if noise is None else base.model_copy(update={"noise": noise})
    return _cell(base, "private", base.noise, method, beta, lr, full_length=full_length)


def _tables(base: Protocol) -> Iterator[Cell]:
    for method in TABLE_METHODS:
        for beta in base.betas:
            for lr in _lrs(base, method, beta):
                yield cell_at(base, method, beta, lr)
    for more in MORE_SEEDS:
        other = base.model_copy(update={"seed": base.seed + more})
        for method in TABLE_METHODS:
            for beta in MORE_BETAS:
                yield table_cell(other, method, beta)


def _lrs(base: Protocol, method: PaperMethod, beta: float) -> list[float]:
    """The paper's step size first, then the others to choose from."""
    entry = printed(method, beta)
    return list(dict.fromkeys([*([entry.lr] if entry is not None else []), *step_sizes(base, method, beta)]))


def table_cell(base: Protocol, method: PaperMethod, beta: float) -> Cell:
    """The cell of the tables at the paper's step size."""
    return cell_at(base, method, beta, table_lr(base, method, beta))


def table_lr(base: Protocol, method: PaperMethod, beta: float) -> float:
    """The paper's step size; the first one to choose from if the paper prints none."""
    return _lrs(base, method, beta)[0]


def _readings(base: Protocol) -> Iterator[Cell]:
    for reading in READINGS:
        other = base.model_copy(update=dict(reading.changes))
        for method, beta in reading.at:
            lr = table_lr(base, method, beta)
            yield _cell(other, "readings", reading.name, reading.method or method, beta, lr)
    once = base.model_copy(update={"noise": NOISES[0], "noise_rounds": "shared"})
    for method in PRIVATE_METHODS:
        yield _cell(once, "readings", ONCE, method, *ONCE_AT)


def _private(base: Protocol) -> Iterator[Cell]:
    points = [
        (method, beta, lr, noise)
        for noise in dict.fromkeys((*NOISES, base.noise))
        for method in PRIVATE_METHODS
        for beta in base.private_betas
        for lr in base.private_lrs
    ]
    yield from (private_cell(base, *point, full_length=False) for point in points)
    for method in PRIVATE_METHODS[:2]:
        yield private_cell(base, method, *PER_COORDINATE_AT, PER_COORDINATE, full_length=False)
    yield from (private_cell(base, *point) for point in points)


def _alphas(base: Protocol) -> Iterator[Cell]:
    for alpha in base.alphas:
        for beta in base.betas:
            if alpha != base.alpha:
                yield from (cell_at(base, NORMEC_SN, beta, lr, alpha) for lr in _lrs(base, NORMEC_SN, beta))


def _cell(
    base: Protocol,
    part: str,
    reading: str,
    method: PaperMethod,
    beta: float,
    lr: float,
    alpha: float | None = None,
    full_length: bool = False,
) -> Cell:
    short, rows = method.private and not full_length, 1 if base.few_logs and part in ("private", "alpha") else 10
    config = configure(base, method, beta, lr, alpha, short=short, rows=rows)
    entry = printed(method, beta)
    words = [part, *([reading] if reading != TABLES else []), method.slug, f"beta-{beta:g}"]
    words += [f"lr-{lr:g}"] if entry is None or entry.lr != lr else []
    words += [f"alpha-{alpha:g}"] if alpha is not None else []
    words += [f"seed-{base.seed}", *(["long"] if full_length else [])]
    return Cell("-".join(words), part, reading, method, beta, lr, alpha, base.seed, config, full_length)


def short_name(cell: Cell) -> str:
    """The name of the short run that corresponds to a private cell of full length."""
    return cell.name.removesuffix("-long")


def best_private_cells(cells: Sequence[Cell], scores: Mapping[str, float]) -> set[str]:
    """The names of the cells to run in full length.

    These are the best cell of each private method and interpretation of the noise, and the best one with SN at β = 1.
    A cell is chosen once all cells of its kind have run.

    Args:
        cells: The plan.
        scores: The best accuracy on the held-out records, by the name of the short run.
    """
    found = set()
    long = [cell for cell in cells if cell.full_length]
    for noise in dict.fromkeys(cell.reading for cell in long):
        for method in PRIVATE_METHODS:
            kind = [cell for cell in long if (cell.reading, cell.method.name) == (noise, method.name)]
            last = [cell for cell in kind if cell.beta == SHORT_BETA and method is DP_NORMEC_SN]
            for group in (kind, last):
                if group and all(short_name(cell) in scores for cell in group):
                    found.add(max(group, key=lambda cell: scores[short_name(cell)]).name)
    return found
