"""Checks of a party before its first round. Each gives one line: what was found, and what to do if it is a problem.

The checks use the party's own files and one connection to the server, which is signed with the party's key and changes
nothing there. A run's terms, if the party has them, are compared with its policy and its account by the same code that
answers requests, so neither of the two refuses a run that passes, unless something changes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import ssl
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...errors import UsageError
from ...privacy.accounting import Account
from ...privacy.display import shown_epsilon
from ..protocol.account import read_releases
from ..protocol.agreed_terms import AgreedTerms
from ..protocol.departure import departures
from ..protocol.policy import Policy, load_policy
from ..protocol.price import priced
from .party_file import PartyFile
from .run_parties import name_of
from .scaffold import schema_of
from .signed_terms import SignedTerms, files_of, raw_key
from .supernode import load_client, load_task, read_private_key
from .versions import SAME, differing

State = Literal["ok", "warning", "problem"]
CLOCK = 5.0  # seconds; Flower refuses requests whose time differs by more than a few seconds
EXPIRES = 30  # days before the end of a certificate at which to warn
LEAST_DISK = 256 * 2**20  # bytes
TIMEOUT = 10.0  # seconds to wait for the server
_STATES = 8  # vectors of the model's size that a party keeps on its disk for a run, at most


@dataclass(frozen=True)
class Finding:
    """The outcome of one check, in one line."""

    check: str
    state: State
    text: str


class _Problem(Exception):  # noqa: N818  (carries a line to `_outcome`)
    """A check failed; the text says why, and what to do."""


def examine(party: PartyFile, clock: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Make all checks, one after the other.

    Args:
        party: The files and the server of the party.
        clock: The time in seconds since 1970, which is compared with the server's.

    Yields:
        The outcome of each check.
    """
    yield _outcome("key", lambda: _key(party.key))
    yield _outcome("folder", lambda: _folder(party.folder))
    yield _outcome("disk space", lambda: _disk(party))
    yield _outcome("policy", lambda: _policy(party.policy))
    yield _outcome("app", lambda: _app(party))
    yield _outcome("data", lambda: _data(party))
    yield _outcome("ledger", lambda: _ledger(party))
    yield _outcome("authority", lambda: _authority(party.root_certificates))
    reached = _outcome("server", lambda: _server(party))
    yield reached
    if reached.state != "problem":
        about: dict[str, Any] = {}
        yield _outcome("registration", lambda: _registration(party, about))
        yield _outcome("clock", lambda: _clock(party, about, clock))
        if about:
            yield _outcome("versions", lambda: _versions(about["versions"]))
    for file in files_of(party.terms) if party.terms is not None else ():
        yield _outcome(f"terms {file.name}", lambda file=file: _terms(party, file))  # type: ignore[misc]


def _outcome(check: str, look: Callable[[], str | Finding]) -> Finding:
    """What a check found. An error is a problem, with the error's own line."""
    try:
        found = look()
    except (UsageError, _Problem) as error:
        return Finding(check, "problem", str(error))
    except OSError as error:
        return Finding(check, "problem", f"{error.filename or check}: {error.strerror or error}")
    except Exception as error:  # anything that the code of an app raises
        return Finding(check, "problem", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return Finding(check, "ok", found) if isinstance(found, str) else found


def _private(path: Path) -> None:
    held = path.stat()
    if held.st_uid != os.geteuid() and os.geteuid() != 0:
        raise _Problem(f"{path} belongs to another user; run the party as its owner, or change the owner")
    if stat.S_IMODE(held.st_mode) & 0o077:
        mode, cure = stat.S_IMODE(held.st_mode), "700" if path.is_dir() else "600"
        raise _Problem(f"{path} has mode {mode:03o}, so that other users may use it; chmod {cure} {path}")


def _key(path: Path) -> str:
    private = read_private_key(path)
    _private(path)
    return f"{path} is readable by its owner only; the server knows it as {name_of(raw_key(private.public_key()))}"


def _folder(path: Path) -> str:
    if not path.exists():
        return f"{path} does not exist yet; the party creates it at its first request"
    if not path.is_dir():
        raise _Problem(f"{path} is not a folder; name another in the party file")
    _private(path)
    if not os.access(path, os.W_OK | os.X_OK):
        raise _Problem(f"{path} is not writable; change its owner or its mode")
    gone = departures(path)
    return f"{path} is accessible to its owner only" + (f"; it has left the runs {', '.join(gone)}" if gone else "")


def _disk(party: PartyFile) -> str:
    present = next(path for path in (party.folder, *party.folder.parents) if path.exists())
    free, needed = shutil.disk_usage(present).free, LEAST_DISK
    for file in files_of(party.terms) if party.terms is not None else ():
        if file.is_file():
            agreed = SignedTerms.load(file).parties[0].agreed  # the model is the same for all parties
            needed += agreed.parameters * np.dtype(agreed.dtype).itemsize * _STATES
    if free < needed:
        raise _Problem(
            f"{present} has {free / 2**20:.0f} MiB left, {needed / 2**20:.0f} MiB are needed; free some space"
        )
    return f"{free / 2**30:.1f} GiB are free at {present}"


def _policy(path: Path) -> str:
    found = load_policy(path)
    return (
        f"{path} allows ε = {found.epsilon:g} per {found.unit} at δ = {found.delta:g}" if found.epsilon else str(path)
    )


def _app(party: PartyFile) -> str:
    _refuse_other_code(party)
    load_client(party.app)
    return f"the code in {party.app} can be loaded"


def _refuse_other_code(party: PartyFile) -> None:
    """Refuse an app whose code is not that of the party's terms, before any of it runs."""
    for file in files_of(party.terms) if party.terms is not None else ():
        SignedTerms.load(file).check_app(party.app)


def _data(party: PartyFile) -> str | Finding:
    if party.data is None:
        _refuse_other_code(party)
        records = load_task(party.app).data(party.partition, party.partitions)
        if not len(records):
            raise _Problem("the app's data() returns no records; look at learning/task.py")
        return f"the app's data() returns {len(records)} records"
    from ...data.table import read_table

    lines = read_table(party.data, schema_of(party.app)).counts.lines()
    return Finding("data", "ok" if len(lines) == 1 else "warning", f"{party.data}: {'; '.join(lines)}")


def _ledger(party: PartyFile) -> str | Finding:
    policy = load_policy(party.policy)
    if not party.folder.is_dir():
        return "there is none yet; the party begins it at its first request"
    releases = read_releases(party.folder, policy.witness)
    releases.check(policy.relation)
    spent = releases.epsilon(policy.unit, policy.delta)
    text = f"intact, {releases.count()} messages, ε = {shown_epsilon(spent)} spent per {policy.unit}"
    if policy.epsilon is not None and spent >= policy.epsilon:
        raise _Problem(f"{text}; the budget of {policy.epsilon:g} is used up, and every request is refused")
    if policy.witness is None:
        cure = "name one in the policy, on another disk, so that an old copy of the folder is recognised"
        return Finding("ledger", "warning", f"{text}; it has no witness: {cure}")
    return text


def _authority(path: Path) -> str | Finding:
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        raise _Problem(f"{path} is not a certificate in PEM format; get it again from the server's owner") from None
    return _validity("authority", str(path), found.not_valid_before_utc, found.not_valid_after_utc)


def _validity(check: str, what: str, begins: datetime, ends: datetime) -> str | Finding:
    now = datetime.now(UTC)
    if now < begins:
        raise _Problem(f"{what} is valid from {begins:%Y-%m-%d %H:%M} UTC on; look at the clock of this machine")
    if now > ends:
        raise _Problem(f"{what} expired on {ends:%Y-%m-%d}; the server's owner makes a new one")
    text = f"{what} is valid until {ends:%Y-%m-%d}"
    if ends - now < timedelta(days=EXPIRES):
        return Finding(check, "warning", f"{text}, for {(ends - now).days} days; renew it")
    return text


def _server(party: PartyFile) -> str | Finding:
    """Connect to the server by TLS, and check its name and its certificate."""
    from cryptography import x509

    host, _, port = party.superlink.rpartition(":")
    host = host.strip("[]")
    try:
        context = ssl.create_default_context(cafile=str(party.root_certificates))
    except (ssl.SSLError, OSError) as error:
        raise _Problem(f"{party.root_certificates} cannot be used as an authority: {error}") from None
    try:
        with (
            socket.create_connection((host, int(port)), TIMEOUT) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            shown = secure.getpeercert(binary_form=True) or b""
    except socket.gaierror as error:
        raise _Problem(
            f"the name {host} is not known here ({error.strerror}); look at superlink and at the DNS"
        ) from None
    except ssl.SSLCertVerificationError as error:
        raise _Problem(
            f"the certificate of {party.superlink} is not accepted: {error.verify_message}; it must be signed by "
            f"{party.root_certificates.name}, be valid now, and name {host}"
        ) from None
    except ssl.SSLError as error:
        raise _Problem(f"{party.superlink} does not speak TLS ({error.reason}); is it the SuperLink's port?") from None
    except TimeoutError:
        raise _Problem(f"{party.superlink} did not answer within {TIMEOUT:g} s; look at firewalls") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise _Problem(f"{party.superlink} cannot be reached: {reason}; is the SuperLink running?") from None
    found = x509.load_der_x509_certificate(shown)
    what = f"{party.superlink} answers; its certificate names {host} and"
    return _validity("server", what, found.not_valid_before_utc, found.not_valid_after_utc)


def _registration(party: PartyFile, about: dict[str, Any]) -> str:
    """Whether the server knows the party's key, by a signed call that changes nothing; fills `about`."""
    import httpx

    from .channel_clients import about_server
    from .limits import MessageLimits
    from .supernode import limited_client, signing_client

    private = read_private_key(party.key)
    client, trusted = limited_client(MessageLimits.of(1, 1)), party.root_certificates.read_bytes()
    try:
        with signing_client(client, party.superlink, trusted, private) as fleet:
            about.update(json.loads(about_server(fleet)))
    except httpx.HTTPStatusError as error:
        if error.response.status_code == 404:
            raise _Problem("the server has no interface for this check; update normec there") from None
        if error.response.status_code != 401:
            raise _Problem(f"the server answers {error.response.status_code}; look at its log") from None
        raise _Problem(
            f"the server does not accept this key: register {party.key}.pub there (flwr supernode register), and "
            "compare the clocks"
        ) from None
    except httpx.HTTPError as error:
        raise _Problem(f"the server breaks the connection off: {error}; look at its log") from None
    return f"the server knows this party as {name_of(raw_key(private.public_key()))}"


def _clock(party: PartyFile, about: dict[str, Any], clock: Callable[[], float]) -> str:
    """Compare this clock with the server's, by its answer or by the date of a response that needs no key."""
    theirs = float(about["time"]) if "time" in about else _date_header(party)
    apart = clock() - theirs
    if abs(apart) > CLOCK:
        way = "ahead of" if apart > 0 else "behind"
        raise _Problem(
            f"this clock is {abs(apart):.0f} s {way} the server's, at most {CLOCK:g} s are allowed; set both by NTP"
        )
    return f"differs from the server's by less than {CLOCK:g} s"


def _date_header(party: PartyFile) -> float:
    from email.utils import parsedate_to_datetime

    import httpx

    try:
        context = ssl.create_default_context(cafile=str(party.root_certificates))
        answer = httpx.get(f"https://{party.superlink}/health", verify=context, timeout=TIMEOUT, trust_env=False)
        return parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (httpx.HTTPError, KeyError, ValueError) as error:
        raise _Problem(f"the server does not say what time it is: {error}") from None


def _versions(theirs: dict[str, str]) -> str | Finding:
    apart = differing(theirs)
    said = ", ".join(f"{name} {ours} here and {other} there" for name, (ours, other) in apart.items())
    if any(name in apart for name in SAME):
        raise _Problem(f"{said}; install the same versions")
    if apart:
        return Finding("versions", "warning", f"{said}; results may differ in their last digits")
    return "those of the server: " + ", ".join(f"{name} {number}" for name, number in theirs.items())


def _terms(party: PartyFile, file: Path) -> str:
    """Whether all parties signed, and whether the party's policy and account allow the run."""
    terms = SignedTerms.load(file)
    own = terms.party_of(read_private_key(party.key).public_key())
    terms.check_signed()
    terms.check_app(party.app)
    policy = load_policy(party.policy)
    if terms.run in departures(party.folder):
        raise _Problem(f"this party has left run {terms.run}, and refuses it")
    return f"signed by all {len(terms.parties)} parties; {would_cost(own.agreed, policy, party.folder)}"


def would_cost(agreed: AgreedTerms, policy: Policy, folder: Path) -> str:
    """What a run under these terms would cost the party; raises `UsageError` if the party would refuse it.

    If the ledger has messages of an unfinished run of this name, the run is taken to go on after the last of them.
    """
    if agreed.parameters > policy.largest_model:  # before a model of that size is made
        raise UsageError(
            f"run {agreed.run} would be refused: its model has more than {policy.largest_model} parameters"
        )
    request = agreed.first_request()
    verdict = policy.check(request)
    if verdict is not None:
        raise UsageError(f"run {agreed.run} would be refused ({verdict.reason}): {verdict.exact}")
    found = priced(request, agreed.method.build(policy.classes), policy.delta)
    if found is None:
        return f"run {agreed.run} has no noise: its {agreed.plan.rounds} messages are covered by no ε"
    price, release = found
    verdict = policy.check_noise(request, release)
    if verdict is not None:
        raise UsageError(f"run {agreed.run} would be refused ({verdict.reason}): {verdict.exact}")
    rounds, parts = agreed.plan.rounds, []
    known = read_releases(folder, policy.witness) if folder.is_dir() else None
    sent = known.last_step(agreed.run) if known is not None else 0
    sent = sent if sent < rounds else 0  # a finished run does not go on, but another one of its name may begin
    run = f"run {agreed.run}, {rounds} rounds" + (f" of which {sent} are in the ledger" if sent else "")
    for unit, budget in policy.budgets.items():
        account = known.account(unit, policy.delta) if known is not None else Account(policy.delta, [])
        before = account.epsilon() if account.releases else 0.0
        account.add(dataclasses.replace(price.most[unit], count=rounds - sent))
        after = account.epsilon()
        if after > budget:
            raise UsageError(
                f"{run}, would be refused (budget) before its end: ε per {unit} would go from {shown_epsilon(before)} "
                f"to {shown_epsilon(after)}, above {budget:g}; raise the budget in the policy, or agree on terms "
                "with a smaller ε or fewer rounds"
            )
        parts.append(f"ε per {unit} goes from {shown_epsilon(before)} to {shown_epsilon(after)} of {budget:g}")
    return f"{run}: {'; '.join(parts)}"
