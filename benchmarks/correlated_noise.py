"""python -m benchmarks.correlated_noise: what correlated noise gains where groups of clients take turns.

`noise` computes the noise in the iterates by formula, and `train` compares trained models. Four ways to spend the same
(ε, δ) under central trust are compared, over the same number of rounds:

| name | who takes part in a round | noise |
| --- | --- | --- |
| everyone | all clients | independent |
| turns | one of G groups | independent |
| correlated | one of G groups | correlated over G rounds |
| poisson | each client with probability 1/G, by secret coins that amplify privacy | independent |

All noise is stated relative to the mean message of those that take part: the sum has 1/G of all messages in the last
three, so that the same noise of the sum is G times as large there.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from typing import Annotated

import numpy as np
import typer

from normec import DPSGD, Clip, Method, NormEC, Poisson, Privacy, Rotation, Run, train
from normec.algorithms.message_weights import iterate_weights
from normec.cli.app import run
from normec.experiments import build
from normec.privacy.accounting import Account, Event, mu_for, sigma_for
from normec.privacy.correlated_noise import ONE, best_coefficients, iterate_noise
from normec.problems.problem import Problem
from normec.sampling.participation import Participation
from normec.settings import make

DELTA = 1e-5
METHODS: dict[str, Method] = {
    "DP-SGD": DPSGD(Clip(1.0)),
    "DP-SGD, momentum 0.9": DPSGD(Clip(1.0), momentum=0.9),
    "error feedback": NormEC(0.01, 0.1, server_norm=False),
    "error feedback, decay 0.05": NormEC(0.01, 0.1, server_norm=False, decay=0.05),
}
WAYS = ("everyone", "turns", "correlated", "poisson")

app = typer.Typer(help="What correlated noise gains where groups of clients take turns.", no_args_is_help=True)


def noise_by_formula(method: Method, rounds: int, groups: int, epsilon: float) -> dict[str, float]:
    """The noise in the iterates of each way to spend ε, relative to that of full participation."""
    workload = iterate_weights(method, rounds)
    correlated = np.array(best_coefficients(groups, workload)) / ONE
    mu = mu_for(epsilon, DELTA)
    alone, together = iterate_noise([1.0], workload) ** 0.5, iterate_noise(correlated.tolist(), workload) ** 0.5
    everyone, turns = rounds**0.5 / mu, (-(-rounds // groups)) ** 0.5 / mu  # σ of the sum over the bound
    drawn = sigma_for(lambda sigma: Account(DELTA, [Event(sigma, 1 / groups, rounds)]), epsilon)
    noise = dict(
        zip(
            WAYS,
            (everyone * alone, groups * turns * alone, groups * turns * together, groups * drawn * alone),
            strict=True,
        )
    )
    return {way: found / noise["everyone"] for way, found in noise.items()}


@app.command()
def noise(
    rounds: Annotated[int, typer.Option(help="Rounds of a run.")] = 960,
    groups: Annotated[int, typer.Option(help="Groups that take turns.")] = 16,
    epsilons: Annotated[str, typer.Option(help="Targets ε, separated by commas.")] = "1,8",
) -> None:
    """Print the noise in the iterates, relative to independent noise with full participation at the same ε."""
    print(f"{rounds} rounds, {groups} groups\n")
    print("| method | ε | turns | correlated | poisson |\n| --- | --- | --- | --- | --- |")
    for name, method in METHODS.items():
        for epsilon in map(float, epsilons.split(",")):
            found = noise_by_formula(method, rounds, groups, epsilon)
            print(f"| {name} | {epsilon:g} | " + " | ".join(f"{found[way]:.2f}" for way in WAYS[1:]) + " |", flush=True)


def participation_of(way: str, groups: int) -> Participation | None:
    if way == "poisson":
        return Poisson(1 / groups)
    return None if way == "everyone" else Rotation(groups)


def trained(
    problem: Problem, method: Method, way: str, rounds: int, groups: int, epsilon: float, lr: float, seed: int
) -> Run:
    """One run; its step size is `lr` for the mean over those that take part."""
    privacy = Privacy(
        epsilon=epsilon,
        delta=DELTA,
        trust="central",
        sampling=1 / groups if way == "poisson" else None,
        noise_bands="best" if way == "correlated" else None,
    )
    share = 1 if way == "everyone" else groups
    return train(
        problem,
        method,
        lr=lr * share,
        rounds=rounds,
        privacy=privacy,
        participation=participation_of(way, groups),
        seed=seed,
    )


@app.command("train")
def compare(
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 128,
    rounds: Annotated[int, typer.Option(help="Rounds of a run.")] = 320,
    groups: Annotated[int, typer.Option(help="Groups that take turns.")] = 16,
    epsilon: Annotated[float, typer.Option(help="Target ε.")] = 8.0,
    seeds: Annotated[int, typer.Option(help="Seeds of each condition.")] = 11,
    lrs: Annotated[str, typer.Option(help="Step sizes, separated by commas.")] = "0.01,0.03,0.1,0.3",
    momentum: Annotated[float, typer.Option(help="Momentum of the server's step.")] = 0.0,
) -> None:
    """Train softmax regression on digits by DP-SGD, and print the median accuracy of each way at its best step size."""
    method = DPSGD(Clip(1.0), momentum=momentum)
    print("| way | step size | median accuracy | from | to | messages of a client |")
    print("| --- | --- | --- | --- | --- | --- |")
    problems = [build.problem(make({"data": "digits", "clients": clients, "seed": seed})) for seed in range(seeds)]
    for way in WAYS:
        found: dict[float, list[float]] = {}
        for lr in map(float, lrs.split(",")):
            runs = (trained(one, method, way, rounds, groups, epsilon, lr, k) for k, one in enumerate(problems))
            found[lr] = sorted(accuracies(runs))
            print(f"{way}, lr {lr:g}: {statistics.median(found[lr]):.2%}", file=sys.stderr, flush=True)
        best = max(found, key=lambda lr: statistics.median(found[lr]))
        low, high = found[best][0], found[best][-1]
        sent = rounds if way == "everyone" else rounds // groups
        print(
            f"| {way} | {best:g} | {statistics.median(found[best]):.1%} | {low:.1%} | {high:.1%} | {sent} |", flush=True
        )


def accuracies(runs: Iterator[Run]) -> list[float]:
    return [float(one.history["accuracy"][-1]) for one in runs]


if __name__ == "__main__":
    sys.exit(run(commands=app))
