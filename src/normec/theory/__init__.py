"""The theorems as functions of numbers: bounds and their conditions, as stated in the paper and as corrected.

    memory           how a memory follows its gradient: γ_max, the invariant, warm-up
    nonprivate       Theorem 1, Corollary 1
    private          Theorem 2, Corollary 2, the number of clients that a guarantee needs
    local_steps      the same with local steps and sampled clients, by proofs of our own
    forgetting       a bound whose noise does not grow with the rounds
    client_momentum  Clip21-SGD2M, by a proof of our own
    other_methods    Clip21, EF21, gradient descent
    constants        L_i, L, L_max, F0 and R; problem_constants: those of a trainable problem
    planning         parameters for a horizon, with their guarantee
    step_sizes       the step size for a method with given parameters

`rounds` is K + 1 everywhere. Proofs and errata: docs/concepts/theory.md.
"""

from .client_momentum import clip21_sgd2m, clip21_sgd2m_gamma
from .constants import Constants, quadratic_constants
from .forgetting import balanced, best_decay, forgetting, gradient_bound, noise_factor, utility
from .local_steps import local_drift, local_smoothness, local_steps, sampled_clients
from .memory import (
    W,
    error_after_update,
    gamma_max,
    invariant,
    mean_error,
    memory_errors,
    overshoot,
    resting_error,
    warmup_rounds,
)
from .nonprivate import (
    best_R,
    corollary1,
    corollary1_gamma,
    optimal_beta,
    optimal_beta_is_feasible,
    smallest_D,
    theorem1,
)
from .other_methods import clip21, clip21_tau, ef21, ef21_gamma, gradient_descent
from .planning import Proposal, propose
from .private import best_beta0, corollary2, largest_signal, noise_per_message, signal, smallest_clients, theorem2
from .problem_constants import constants_of
from .step_sizes import step_size

__all__ = [
    "Constants",
    "Proposal",
    "W",
    "balanced",
    "best_R",
    "best_beta0",
    "best_decay",
    "clip21",
    "clip21_sgd2m",
    "clip21_sgd2m_gamma",
    "clip21_tau",
    "constants_of",
    "corollary1",
    "corollary1_gamma",
    "corollary2",
    "ef21",
    "ef21_gamma",
    "error_after_update",
    "forgetting",
    "gamma_max",
    "gradient_bound",
    "gradient_descent",
    "invariant",
    "largest_signal",
    "local_drift",
    "local_smoothness",
    "local_steps",
    "mean_error",
    "memory_errors",
    "noise_factor",
    "noise_per_message",
    "optimal_beta",
    "optimal_beta_is_feasible",
    "overshoot",
    "propose",
    "quadratic_constants",
    "resting_error",
    "sampled_clients",
    "signal",
    "smallest_D",
    "smallest_clients",
    "step_size",
    "theorem1",
    "theorem2",
    "utility",
    "warmup_rounds",
]
