"""The privacy rules: sensitivity, effective noise and composition for a statement, a method and a run, or a refusal.

Common to all rules. Fix the coins of the other clients and the batch coins (they do not depend on the protected
unit; hockey-stick divergences are jointly convex, so a bound for fixed coins holds on average). Given what the
observer has seen so far, the models x⁰..x^k are fixed, hence the other clients' clean messages are, and round k
shows the observer a Gaussian whose mean depends on the unit by a vector of length at most Δ_k: adaptive composition
of Gaussians. The protected client's own memory g_i is a function of its data and of past observations; it is
never shown. The step β of the memory matters in R4 alone, and there only where the memory holds what no noise covers.

R1 client, replace: both messages lie in the ball of radius b, Δ = 2b.  R2 client, zero-out: one of them is 0, Δ = b.
R3 record without a clip per record: one record can reverse the normalised vector, Δ = 2b in both relations.
R4 record with a clip per record and a fixed normaliser: Δ_k of `record_sensitivity`. C is the largest norm of what one
   record adds to its client's sum: that of the clip; 1 for record_clip="auto", because ‖g/(‖g‖ + γ)‖ < 1; and with L
   layers that are bounded alone by C/√L, √(Σ_l C²/L) = C again. The normaliser is the number of the client's records,
   the batch size, or the expected size of a Poisson batch. Batches of a fixed size count in every round as if the
   record were in all of them. An augmentation sees one record, and the clip bounds what it makes of it.

Local steps leave R1, R2 and S1 as they are. These rules use one fact of a client's message, ‖m_i‖ <= b, and this holds
for every update that Ψ is given. A client's local steps read x, its own data and its own coins, and nothing of them is
shown but the message. So their number, step size and optimizer do not enter Δ, and the number may depend on how many
records the client holds. Noise is added once, to the message.

W  weights w_i: with ω_i = n·w_i public, the server uses Σ ω_j m_j / n, so that equal weights are ω_i = 1. A sum that is
   seen (T2, T3) is Σ (ω_j m_j) with the noise of T2 or T3: the noise is not weighted, and σ is that of equal weights.
   A client i moves it by ω_i times what its message moves by, so Δ = max_i ω_i Δ_i, where Δ_i is that of R1 to R4 for
   client i. With R4 and ω_i = n·n_i/N a record moves the sum by n·LC/N whichever client holds it. Where e_k > 0, cap,
   shift and drift of `record_sensitivity` are each taken at their largest over the clients. Under T1 the observer sees
   m_i + z_i whatever its weight: Δ = max_i Δ_i, and the weighted mean has noise of variance Σ w_i² σ_i², with the σ_i
   of C1. S1 holds with Δ = b·max_i ω_i: its proof is about one client's vector of length at most Δ. The weights must be
   public: they, and the Δ that follows from them, are not covered by the noise.

T1 local: the observer sees m_i + z_i; σ_eff = σ.
C1 each client's own noise, local, record with R4: client i adds σ_i = σ Δ_i/Δ, where Δ_i is that of R4 with its own
   number of records, and Δ = max_i Δ_i. So σ is the noise of the client with the largest Δ_i, and σ_i/Δ_i = σ/Δ at
   every client. Proof: neighbours differ in a record of one client i. Given the past, the messages of the other clients
   are the same in both, their noise is independent of z_i, and the divergence of the round is that of m_i + z_i alone,
   a Gaussian of σ_i that moves by at most Δ_i. Where e_k > 0, e_k and with it Δ_k are proportional to the shift s_i as
   long as no Δ_k is as large as 2b: then σ_i = σ s_i/max_j s_j, and otherwise every client uses σ. With w_i = n_i/N and
   no Δ_i at 2b, w_i σ_i is the same for every client. S2 holds client by client, because the rate is that of all
   clients. The σ_i are functions of the numbers of records, which are public at record level.
T2 secure-sum: it sees Σ(m_j + z_j) and may know all but `honest` of the z_j; σ_eff = σ√honest. Every client adds
   its noise in every round, drawn or not; a "zero-out" client sends noise only. Between real parties a sum is opened
   only with at least n_min of them, of which c may collude: honest = n_min − c. Messages and noise lie on the grid of
   `secure_sum`. A sum of rounded Gaussians is, up to aliasing, a random function of m + N(0, honest·σ²I) that does not
   depend on m. The aliasing is added to δ; a run for which it is not 0 in double precision is refused. Where Δ depends
   on distances, the grid adds step·√d to it. This holds whatever noise a run has, so that a simulation and a deployment
   have the same ε. The proof is in docs/concepts/secure-sum-account.md.
T3 central: the server adds one draw of N(0, nσ²I) to the sum: the same sum as n clients adding σ each; σ_eff = σ√n.

S1 Poisson sampling of clients, sum seen only, client, zero-out: Δ = b and amplification at rate q, also with hidden
   memory. Given the past, the coin of round k is fresh, so the sum is (1−q)N(0) + q E[N(m)] with ‖m‖ <= b against
   N(0), the expectation over the client's past coins; by convexity the pair with ‖m‖ = b dominates it, and
   dominating pairs compose. If the round is released again, its coin is not fresh, and `ledger` counts it in full.
S2 Poisson batches inside a client, record, zero-out, where the memory holds nothing un-noised (no feedback, or
   memory="noisy" under "local"): with probability 1−q the message is that of the data without the record;
   amplification at rate q with Δ = min(2b, LC/B) (R4 with e_k = 0) or 2b (R3).

P1 rotation: client i takes part only in rounds k with k ≡ i modulo the public number of groups G
   (`sampling.participation.Rotation`). Given the past, a round of another group has the same distribution for both
   neighbours: the messages of the other clients are fixed, and client i sends nothing. So the account of client i is
   the composition of its own turns, of which there are at most ⌈T/G⌉, under every trust; the bounds above hold for
   each. Its turn number j has Δ_j of R1 to R4, because e_k grows only where the client takes part. With coins at rate q
   inside the group, S1 holds turn by turn. The ledger charges the first release of each cycle of G rounds for all
   groups and every repeated release in full (`ledger`).

M1 correlated noise (noise_bands), trust "central", with P1: the sums are released as s_t + w_t, where w = C⁻¹z, the z_t
   are independent draws of T3, and C is a lower-triangular Toeplitz matrix with B <= G coefficients c_0 > 0, c_1 …
   c_{B−1} that are public and have ‖c‖ <= 1: w_t = (z_t − Σ_{i>=1} c_i w_{t−i}) / c_0. The account is that of P1.
   Proof: s + C⁻¹z = C⁻¹(Cs + z), so the released sums up to round t and the rows y_t = Σ_i c_i s_{t−i} + z_t up to t
   are functions of each other. Consider the rows. In its turn j, client i changes s_j by v with ‖v‖ <= Δ; v is fixed by
   the rows before y_j and, if the memory is hidden, by its own past. So rows j … j+B−1 move by c_0 v … c_{B−1} v, and
   no other row until its next turn, which is at least G >= B rounds later. The rest of their means is a function of the
   rows before them. Hence, given the rows before y_j, and in terms of the innovations z_j … z_{j+B−1}, which are fresh,
   the block is N(0, nσ²I) against N(c ⊗ v, nσ²I): a Gaussian release of sensitivity ‖c‖‖v‖ <= Δ, whatever the other
   clients answer in between. With a coin it is a mixture of the two at rate q, one coin for the whole block, as in S1.
   The blocks of a client are disjoint and follow each other: adaptive composition of at most ⌈T/G⌉ of them.
   Repeated rounds: a row that is drawn again, with a fresh z_t, moves by |c_i|‖v‖ <= Δ for the one turn of client i
   that it contains. Every message of a client has one row for each i that is paid with its own turn, and all further
   rows that contain it are repetitions, each of which is paid in full.
   On a grid, for noise that is not seeded, the c_i are multiples of 2^-14, the sums S_t of the rounded messages are
   integers, and the row is Σ_i ⌊c_i S_{t−i}⌋ + round(z_t) in steps of the grid; this is a function of Σ_i ⌊c_i S_{t−i}⌋
   + z_t (claim 3 of `rounding_grid`), and what the server uses is computed from such rows alone. Rounding down moves
   two values apart by less than a step in each coordinate, in the one term of a row that client i changes: a block
   moves by less than ‖c‖‖v‖ + step·√(Bd), and Δ + 2^-30·√(Bd)·σ_eff is accounted for.

N1 noise schedules: σ_k = σ s_k with public s_k (`noise_schedule`). Given the past, round k shows a Gaussian of its own
   σ_k, so adaptive composition holds with each round's own multiplier: μ² = Σ_k (Δ_k/σ_k)² without amplification, and
   with it the composition of each round's dominating pair at its own (rate, σ_k). So that this stays a composition of
   few kinds of rounds, a run that claims amplification has at most `LEVELS` different σ_k; the noise that is drawn is
   the noise that is accounted for.

Refused, because we know no valid rule:
- amplification by sampling under "local" trust (the server sees who sends), in the "replace" relation (that opposite
  messages are the worst pair is not proved in d dimensions), from sets of fixed size, or at record level from
  sampling clients;
- record-level gain with clean memory: g_i remembers the record in rounds where it is not drawn;
- memory="noisy" when only the sum is seen: z_j stays in client j's memory and shows again in the next message, so the
  other clients' messages carry the noise that was meant to hide client i. The "local" account stays valid;
- correlated noise where a client may take part in any round (independent noise with a schedule is at least as good, see
  docs/concepts/privacy.md), with more bands than groups (the blocks of a client overlap), where no single holder of z
  exists ("local", "secure-sum": a party's noise would return in rounds in which it is absent), with a noise schedule,
  or with a sensitivity that grows by turn;
- a noise schedule with groups that take turns: the groups would have different accounts;
- local steps at record level: the record of one step moves every later iterate of its client, so the update is no sum
  of clipped shares of records, and a clip per record bounds nothing;
- messages without a bound, BatchNorm buffers, a start from un-noised gradients, normalisers that are private counts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NoReturn

import numpy as np

from .facts import Facts, Refused, Setting
from .grid_account import GRID_BITS, SUM_GRID_BITS, delta_surcharge
from .noise_schedule import BEST, CONSTANT, LEVELS, relative_noise
from .record_sensitivity import Sensitivity
from .release import Release
from .statement import Privacy

# Assumed for the aliasing of secure sums where they are not given; both are far too large.
MOST_COORDINATES = 10**12
UNKNOWN_EPSILON = 1e6
WEAK = 20.0  # with Gaussian noise and δ = 1e-5, an attacker with 1 % false alarms recognises 87 % at this ε


def release(facts: Facts, privacy: Privacy, setting: Setting) -> Release:
    """What a run releases: its sensitivity, its effective noise and its composition.

    Args:
        facts: The method.
        privacy: The privacy statement.
        setting: The run.

    Returns:
        The releases of the whole run.

    Raises:
        Refused: No rule is valid; the message says why and what to do instead.

    Example:
        >>> normec = Facts("normec", bound=1.0, feedback=True)
        >>> run = release(normec, Privacy(epsilon=8, trust="secure-sum"), Setting(clients=100, rounds=300))
        >>> run.gain, round(run.sigma(epsilon=8.0, delta=1e-5), 3)
        (10.0, 1.04)
    """
    if type(privacy) is not Privacy:
        kind = type(privacy).__name__
        _refuse(f"privacy is a {kind}, whose own code may contradict its settings; use Privacy itself")
    _refuse_leaks(facts, privacy, setting)
    if privacy.honest is not None and privacy.honest > setting.clients:
        _refuse(f"honest = {privacy.honest} is more than the {setting.clients} clients; lower it")
    relative: tuple[float, ...] | None = None
    if privacy.unit == "client":
        sensitivity, rate = _client(facts, privacy, setting)
    else:
        sensitivity, relative, rate = _record(facts, privacy, setting)
    heaviest = setting.heaviest if privacy.trust != "local" else 1.0
    if not math.isfinite(sensitivity.cap) and not sensitivity.by_distance:
        _refuse(
            f"{facts.name} sends messages without a bound, so that no noise protects them; train it without privacy, "
            "or use a method that bounds its messages, such as normec, clip21 or dpsgd-clip"
        )
    schedule = _schedule(facts, privacy, setting, sensitivity, rate)
    if privacy.correlates:
        _refuse_correlation(privacy, setting, sensitivity)
    drawn = 1.0 if privacy.trust == "local" else math.sqrt(setting.clients)
    honest = privacy.honest or setting.clients
    gain = math.sqrt(honest) if privacy.trust == "secure-sum" else drawn
    if privacy.trust == "secure-sum":
        _refuse_aliasing(honest, privacy, setting)
    return Release(
        sensitivity=sensitivity,
        gain=gain,
        drawn=drawn,
        rate=rate,
        rounds=setting.rounds,
        surcharge=_surcharge(privacy, setting, sensitivity, drawn),
        bound=facts.bound,
        heaviest=heaviest,
        dimension=setting.dimension,
        notes=_notes(facts, privacy, setting, schedule, relative),
        schedule=schedule,
        relative=relative,
        groups=setting.groups,
        row_surcharge=_row_surcharge(privacy, setting, drawn),
    )


def _refuse(reason: str) -> NoReturn:
    raise Refused(reason)


def _refuse_leaks(facts: Facts, privacy: Privacy, setting: Setting) -> None:
    """Refuse runs that show data in other ways than through noisy messages, for any unit."""
    if setting.buffers:
        _refuse("BatchNorm statistics are un-noised functions of client data; use GroupNorm in a private model")
    if setting.start == "gradients":
        _refuse(
            "a first estimate from un-noised gradients is a release of its own; start from zero with warm-up rounds"
        )
    if setting.sampling.rate < 1 and setting.sampling.normaliser == "count":
        _refuse("dividing by how many clients were drawn shows a private count; divide by rate * clients")
    if privacy.memory == "noisy" and facts.feedback and privacy.trust != "local":
        _refuse(
            f"memory='noisy' under trust={privacy.trust!r} re-sends each client's noise, which uncovers the sum;"
            " use trust='local' (valid for a sum too) or memory='clean'"
        )


def _refuse_correlation(privacy: Privacy, setting: Setting, sensitivity: Sensitivity) -> None:
    """M1: refuse correlated noise where its proof does not hold."""
    if privacy.trust != "central":
        _refuse(
            f"noise_bands correlates the noise of several rounds, which needs one holder of all noise, got "
            f"trust={privacy.trust!r}; use trust='central', or leave out noise_bands"
        )
    if setting.groups == 1:
        _refuse(
            "noise_bands gains nothing where a client may take part in every round; let groups of clients take turns "
            "(participation = Rotation(groups), or --set groups=16), or leave out noise_bands"
        )
    if privacy.bands_of(setting.groups) > setting.groups:
        _refuse(
            f"noise_bands = {privacy.noise_bands} is more than the {setting.groups} rounds between two turns of a "
            f"client; give at most {setting.groups}"
        )
    if not sensitivity.is_constant:
        _refuse(
            "noise_bands has no rule for a sensitivity that grows by round, as that of records behind a clean memory; "
            "use a method without a memory, or leave out noise_bands"
        )


def _refuse_aliasing(honest: int, privacy: Privacy, setting: Setting) -> None:
    """T2: refuse sums of so many clients that rounding their noise to the grid would add to δ."""
    ratio = 2.0**SUM_GRID_BITS / math.sqrt(setting.clients)  # σ/γ is at least this
    coordinates = float(setting.rounds) * (setting.dimension or MOST_COORDINATES)
    epsilon = privacy.epsilon if privacy.epsilon is not None and privacy.is_target else UNKNOWN_EPSILON
    if delta_surcharge(epsilon, ratio, honest, coordinates) > 0:
        _refuse(
            f"the grid of a secure sum is too coarse for {setting.clients:g} clients and so little noise; "
            "lower epsilon, raise sigma, or use trust='central'"
        )


def _client(facts: Facts, privacy: Privacy, setting: Setting) -> tuple[Sensitivity, float]:
    """R1, R2, S1, W."""
    cap = facts.bound if privacy.relation == "zero-out" else 2 * facts.bound
    cap *= setting.heaviest if privacy.trust != "local" else 1.0
    sampling = setting.sampling
    if not sampling.claims:
        return Sensitivity(cap), 1.0
    cure = "; without the claim (no `sampling`) every round counts in full"
    if privacy.trust == "local":
        _refuse(f"sampling clients gains nothing under trust='local', the server sees who sends{cure}")
    if privacy.relation == "replace":
        _refuse(f"no proved gain from sampling in the 'replace' relation; use relation='zero-out'{cure}")
    if sampling.scheme != "poisson":
        _refuse(f"no valid gain from drawing a fixed number of clients; use scheme='poisson'{cure}")
    return Sensitivity(cap), sampling.rate


def _record(facts: Facts, privacy: Privacy, setting: Setting) -> tuple[Sensitivity, tuple[float, ...] | None, float]:
    """R3, R4, S2, W, C1: the sensitivity, each client's noise relative to σ (None: all alike), and the rate."""
    if setting.local_steps:
        _refuse(
            "local steps have no rule at record level: a record moves every later iterate of its client, so its share"
            " of the update has no fixed bound; use unit='client', or one gradient per round"
        )
    cure = "; batch_size claims no gain, and every round counts in full"
    if setting.sampling.claims:
        _refuse("no valid gain at record level from sampling clients; without the claim every round counts in full")
    batch = setting.batch
    hidden = facts.feedback and (privacy.memory == "clean" or not facts.made_of_messages)
    if batch.claims:
        if hidden:
            _refuse(
                "a clean memory remembers records in rounds where they are not drawn, so batches give no gain;"
                f" use memory='noisy' with trust='local'{cure}"
            )
        if privacy.relation == "replace":
            _refuse(f"no proved gain from batches in the 'replace' relation; use relation='zero-out'{cure}")
        if batch.scheme != "poisson":
            _refuse(f"no valid gain from batches of a fixed size; use scheme='poisson'{cure}")
    sensitivity = _record_sensitivity(facts, privacy, setting, hidden)
    rate = batch.rate if batch.claims else 1.0
    if privacy.trust != "local" or privacy.record_bound is None or not math.isfinite(facts.lipschitz):
        return sensitivity, None, rate
    return *_own_noise(setting, sensitivity), rate


def _own_noise(setting: Setting, sensitivity: Sensitivity) -> tuple[Sensitivity, tuple[float, ...] | None]:
    """C1: the sensitivity without its cap, and Δ_i/Δ of each client; None if all are alike."""
    fewest = min(setting.divisors)
    shifts = sensitivity.shift * fewest / np.array(setting.divisors)
    moved = np.minimum(sensitivity.cap, sensitivity.slope * shifts)
    if sensitivity.drift and float(sensitivity.at(np.array([setting.turns - 1.0]))[0]) >= sensitivity.cap:
        return sensitivity, None
    if bool((moved == moved[0]).all()):
        return sensitivity, None
    # Without the cap, because what a grid adds to Δ is then proportional to σ_i at every client.
    uncapped = replace(sensitivity, cap=math.inf, shift=float(moved.max()) / sensitivity.slope)
    return uncapped, tuple(np.minimum(1.0, moved / moved.max() * (1 + 1e-12)).tolist())


def _record_sensitivity(facts: Facts, privacy: Privacy, setting: Setting, hidden: bool) -> Sensitivity:
    """The largest sensitivity over the clients, each with its own weight and its own number of records."""
    weights = np.array(setting.weights if setting.weights and privacy.trust != "local" else (1.0,))
    each = 2 * facts.bound  # how far one client's message can move
    cap = float(each * weights.max())
    if privacy.record_bound is None:
        return Sensitivity(cap)
    if setting.records is None or setting.batch.normaliser == "count":
        _refuse("a mean over a private number of records has no fixed sensitivity; divide by a public number, records=")
    if not math.isfinite(facts.lipschitz):
        return Sensitivity(cap)
    shifts = privacy.record_bound / np.array(setting.divisors) * (1 if privacy.relation == "zero-out" else 2)
    shift = float((weights * shifts).max())
    moved = float((weights * np.minimum(each, facts.lipschitz * shifts)).max())
    if not hidden:
        if moved < (1 - 1e-12) * min(cap, facts.lipschitz * shift):  # the largest ω_i s_i is that of a capped client
            shift = moved / facts.lipschitz
        return Sensitivity(cap, facts.lipschitz, shift)
    if facts.lipschitz * shift >= cap:  # the clip gains nothing: R3, whatever the memory holds
        return Sensitivity(cap)
    keep = 1 - facts.decay
    if facts.beta * facts.lipschitz > 2 * keep:
        limit = 2 * keep / facts.lipschitz
        _refuse(
            f"the record rule needs beta <= {limit:g} here, got {facts.beta:g}; lower beta, or use dpsgd-clip, which "
            "needs the least noise where records are protected"
        )
    return Sensitivity(cap, facts.lipschitz, shift, facts.beta * moved, keep)


def _schedule(
    facts: Facts, privacy: Privacy, setting: Setting, sensitivity: Sensitivity, rate: float
) -> tuple[float, ...] | None:
    """N1: σ_k/σ of every round; None if the noise is constant."""
    stated = privacy.schedule(setting.rounds)
    if setting.groups > 1 and stated != CONSTANT:
        _refuse(f"noise_schedule has no rule with {setting.groups} groups that take turns; leave out one of them")
    if stated != BEST:
        return relative_noise(stated, setting.rounds, levels=LEVELS if rate < 1 else None)
    cure = "; use another noise_schedule"
    if rate < 1:
        _refuse(f"noise_schedule='best' is not known where amplification by sampling is claimed{cure}")
    if privacy.memory == "noisy" and facts.feedback:
        _refuse(
            "noise_schedule='best' is not known for memory='noisy', where later messages correct the noise of earlier "
            f"ones{cure}"
        )
    if setting.message_weights is None:
        _refuse(f"noise_schedule='best' needs the weight of each round's message in the last model, unknown here{cure}")
    for round, weight in enumerate(setting.message_weights):
        if not weight:
            _refuse(
                f"noise_schedule='best' would send round {round} under infinite noise, because its message does not "
                f"enter the last model: its step size is 0{cure}"
            )
    sensitivities = sensitivity.at(np.arange(setting.rounds, dtype=np.float64)).tolist()
    return relative_noise(BEST, setting.rounds, sensitivities, setting.message_weights)


def _surcharge(privacy: Privacy, setting: Setting, sensitivity: Sensitivity, drawn: float) -> float:
    """What rounding to the grid adds to Δ, in units of one client's σ; 0 if Δ depends on norms.

    The grid is that of `rounding_grid`, or that of `secure_sum`, where simulations count it too.
    """
    summed = privacy.trust == "secure-sum"
    if not sensitivity.by_distance or (privacy.noise == "seeded" and not summed):
        return 0.0
    if setting.dimension is None:
        kind = "trust='secure-sum'" if summed else f"noise={privacy.noise or 'secure'!r}"
        _refuse(f"{kind} with record_clip needs the message's dimension to account for its grid")
    return drawn * math.sqrt(setting.dimension) * 2.0 ** -(SUM_GRID_BITS if summed else GRID_BITS)


def _row_surcharge(privacy: Privacy, setting: Setting, drawn: float) -> float:
    """M1: what rounding the rows of correlated noise to a grid adds to Δ, in units of one client's σ."""
    if not privacy.correlates or privacy.noise == "seeded":
        return 0.0
    if setting.dimension is None:
        _refuse(f"noise={privacy.noise or 'secure'!r} with noise_bands needs the message's dimension")
    return drawn * math.sqrt(privacy.bands_of(setting.groups) * setting.dimension) * 2.0**-GRID_BITS


def _notes(
    facts: Facts,
    privacy: Privacy,
    setting: Setting,
    schedule: tuple[float, ...] | None,
    relative: tuple[float, ...] | None,
) -> tuple[str, ...]:
    """Remarks for reports of ε."""
    notes = []
    protected = setting.clients if privacy.unit == "client" else setting.all_records
    if protected is not None and privacy.delta >= 1 / protected:
        notes.append(
            f"delta = {privacy.delta:g} is not below 1/{protected:.0f} {privacy.unit}s: publishing one {privacy.unit}"
            " at random would meet it; choose a smaller delta"
        )
    if privacy.is_target and privacy.epsilon is not None and privacy.epsilon >= WEAK:
        notes.append(
            f"epsilon = {privacy.epsilon:g} promises little: an attacker who accepts one false alarm in a hundred may "
            f"recognise most {privacy.unit}s; ten and less are usual"
        )
    sampling = setting.sampling if privacy.unit == "client" else setting.batch
    if sampling.rate < 1 and not sampling.claims:
        notes.append("sampling is counted without any gain: every round as if the protected unit had taken part")
    if (setting.sampling.rate < 1 or setting.groups > 1) and privacy.trust == "secure-sum":
        notes.append("every client adds its noise in every round, drawn or not")
    if privacy.unit == "record" and privacy.record_clip is None:
        notes.append(
            "without a clip per record a record is protected no better than a whole client that is replaced; give"
            " record_clip, or record_clip='auto', which has no threshold to choose"
        )
    if privacy.unit == "record" and privacy.record_clip is not None and not math.isfinite(facts.lipschitz):
        notes.append(
            f"no rule covers clipped records with {facts.name}: a record is protected no better than a whole client "
            "that is replaced"
        )
    if setting.groups > 1:
        notes.append(
            f"{setting.groups} public groups of clients take turns: a client takes part in at most {setting.turns} of "
            f"{setting.rounds} rounds, and these are counted"
        )
    if privacy.correlates:
        notes.append(
            f"the noise is correlated over {privacy.bands_of(setting.groups)} rounds by public coefficients; the "
            "folder's checkpoints hold what would remove it"
        )
    if not privacy.is_target:
        notes.append("the noise was given, not derived from a target: epsilon is what it amounts to, not a promise")
    if schedule is not None:
        stated = privacy.schedule(setting.rounds)
        name = stated if len(stated) <= 24 else "given"
        notes.append(
            f"the noise changes by round (noise_schedule = {name}): {schedule[0]:.4g} sigma in the first round, "
            f"{schedule[-1]:.4g} sigma in the last, between {min(schedule):.4g} and {max(schedule):.4g} sigma"
        )
    if relative is not None:
        notes.append(
            "each client adds the noise that its own records need: between "
            f"{min(relative):.3g} sigma for the client with the most records and sigma for the one with the fewest"
        )
    return tuple(notes)
