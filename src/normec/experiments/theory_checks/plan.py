"""Plans by theory: the constants and the noise of a configured problem, and the parameters with the best bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...algorithms.error_feedback import NormEC
from ...errors import UsageError, at_least
from ...settings.config import RunConfig
from ...theory import Constants, Proposal, constants_of, gradient_descent, propose
from .. import build

OUTSIDE = ("batch_size", "batch_rate", "sample_rate", "sample_count", "groups", "noise_bands")


@dataclass(frozen=True)
class Planned:
    """A proposal and the constants that it is based on."""

    constants: Constants
    proposal: Proposal
    notes: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        c, p = self.constants, self.proposal
        return {
            "alpha": p.alpha, "beta": p.beta, "lr": p.gamma, "decay": p.decay, "warmup": p.warmup, "rounds": p.rounds,
            "initial_memory": p.initial_memory, "R": p.R, "sigma": p.sigma, "promise": p.promise,
            "trivial": p.trivial, "useful": p.useful, "verdict": p.verdict(), "estimated": c.estimated, "L": c.L,
            "L_max": c.L_max, "F0": c.F0, "grad_max": c.grad_max, "dim": c.dim, "clients": c.clients,
            "gradient_descent": gradient_descent(L=c.L, F0=c.F0, rounds=p.rounds), "notes": list(self.notes),
        }  # fmt: skip

    def command(self) -> str:
        """Return the settings for `normec train`."""
        p = self.proposal
        words = "" if p.sigma else "--no-privacy "
        words += f"--alpha {p.alpha:.6g} --beta {p.beta:.6g} --lr {p.gamma:.6g} --rounds {p.rounds}"
        extra = {"initial_memory": p.initial_memory, "warmup": p.warmup, "decay": f"{p.decay:.6g}"}
        return words + "".join(f" --set {key}={value}" for key, value in extra.items())


def plan(config: RunConfig) -> Planned:
    """Return parameters for the problem, horizon and privacy of a configuration; given values are kept."""
    if config.method != "normec":
        raise UsageError(f"plans are for normec, got method = {config.method!r}")
    if config.server_norm not in (None, True):
        way = str(config.server_norm).lower()
        raise UsageError(
            f"no theorem covers NormEC without server normalisation of the whole vector; drop server_norm={way}"
        )
    for name in OUTSIDE:
        if getattr(config, name) is not None:
            raise UsageError(f"the theorems are for full gradients of all clients and independent noise; drop {name}")
    if config.noise_schedule not in (None, "constant"):
        raise UsageError("the theorems are for the same noise in every round; drop noise_schedule")
    if config.rounds is not None:
        at_least(1, rounds=config.rounds)
    problem = build.problem(config)
    constants = constants_of(problem)
    rounds: int = build.training(config).rounds or config.epochs or 1  # an epoch of full gradients is a round
    notes: list[str] = []
    sigma = None
    if config.private:
        sigma, said = _noise(config, problem.clients, len(problem.x0), rounds)
        notes += said
        notes.append(
            "L, F0 and the norms of the first gradients were computed from the data without noise: the privacy"
            " statement does not cover a choice based on them; plan on public data of the same kind"
        )
    if constants.estimated:
        notes.append("L was estimated by power iteration at the start: the result is an estimate, not a guarantee")
    if config.private is False:
        notes.append("the memories start at the first gradients: one message of unbounded size before round 0")
    given = {"alpha": config.alpha, "beta": config.beta, "decay": config.decay}
    proposal = propose(constants, rounds, sigma, **given)
    return Planned(constants, proposal, tuple(notes))


def _noise(config: RunConfig, clients: int, dim: int, rounds: int) -> tuple[float, tuple[str, ...]]:
    """Return σ per client for all rounds, including the warm-up."""
    from ...privacy import Setting, calibrate, release
    from ...privacy.mechanism import facts_of

    privacy = build.privacy(config)
    if privacy is None:
        raise UsageError("there is no privacy target")
    composed = release(facts_of(NormEC(1.0, 1.0)), privacy, Setting(clients, rounds, dimension=dim))
    return calibrate(composed, privacy).sigma, composed.notes
