"""The terms of a run in a file that every party signs with the key by which the server knows it.

`normec federation terms new` writes the file from an app, its settings and the public keys of the parties. It contains
the settings of the run, a digest of the app's code, and for each party what every request to it must state
(`protocol.agreed_terms`): the method, the noise, the plan. Each party reads it (`terms show`), compares it with its
policy and its own copy of the app (`doctor`), and signs it (`terms sign`). A party that is started with `terms` takes
part only if all parties have signed, and refuses every request that differs.

    {"terms": {"format": 1, "run": …, "app": …, "settings": {…}, "versions": {…},
               "parties": [{"name": …, "key": …, "agreed": {…}}, …]},
     "signatures": {"hospital-a": …}}

A signature is ECDSA with SHA-384 of the terms as JSON in one spelling, so no entry can be changed without all parties.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ...algorithms import registry
from ...errors import UsageError
from ...system.code_files import CODE_SUFFIXES, is_hidden
from ...system.files import read_bytes, read_json, write_atomic
from ..protocol.agreed_terms import AgreedTerms
from ..protocol.wire import NAME
from . import settings as settings_of_run
from .run_parties import name_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

FORMAT = 1
_LARGEST = 16 * 2**20  # bytes of a file of terms
_LARGEST_MODEL = 2**24  # parameters for which a reader of terms, who may have no policy, computes ε
_PURPOSE = b"normec run terms 1\n"
_CODE = (*{Path(f"a{suffix}").suffix for suffix in CODE_SUFFIXES}, ".toml")
_NOT_CODE = ("pyproject.toml", "policy.toml", "party.toml")  # settings are in the terms, rules belong to a party


@dataclass(frozen=True)
class Signatory:
    """A party of a run: the name by which people know it, its public key in OpenSSH's format, and its terms."""

    name: str
    key: str
    agreed: AgreedTerms

    @cached_property
    def public(self) -> EllipticCurvePublicKey:
        return public_key(self.key.encode(errors="replace"), f"the key of {self.name}")

    @property
    def node(self) -> str:
        """The name under which the server knows the party."""
        return name_of(raw_key(self.public))


@dataclass(frozen=True)
class SignedTerms:
    """The terms of a run and the signatures under them, by the names of the parties."""

    run: str
    app: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    parties: tuple[Signatory, ...]
    signatures: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def canonical(self) -> bytes:
        """The terms as JSON with one spelling, which is what is signed."""
        return json.dumps(self._facts(), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @property
    def digest(self) -> str:
        return hashlib.sha256(_PURPOSE + self.canonical).hexdigest()

    def _facts(self) -> dict[str, Any]:
        parties = [{"name": one.name, "key": one.key, "agreed": one.agreed.to_facts()} for one in self.parties]
        return {
            "format": FORMAT,
            "run": self.run,
            "app": self.app,
            "settings": dict(self.settings),
            "versions": dict(self.versions),
            "parties": parties,
        }

    def party_of(self, public: EllipticCurvePublicKey) -> Signatory:
        """The party with this key. Raises `UsageError` if the terms do not name it."""
        wanted = raw_key(public)
        for one in self.parties:
            if raw_key(one.public) == wanted:
                return one
        raise UsageError(
            f"this key ({name_of(wanted)}) belongs to none of the parties of run {self.run}, which are "
            f"{', '.join(one.name for one in self.parties)}; use the key whose .pub file is in the terms"
        )

    def sign(self, private: Any) -> Self:
        """The terms with the signature of the party that has this private key.

        Raises:
            UsageError: The key is not that of a party, or another party has signed other terms.
        """
        from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
        from cryptography.hazmat.primitives.hashes import SHA384

        own = self.party_of(private.public_key())
        for name, state in self.state().items():
            if state == "wrong" and name != own.name:
                raise UsageError(
                    f"the signature of {name} under run {self.run} is wrong: the terms changed after it signed, or "
                    f"somebody else signed; do not sign them, and compare them with the copy of {name}"
                )
        signature = private.sign(_PURPOSE + self.canonical, ECDSA(SHA384()))
        return replace(self, signatures={**self.signatures, own.name: signature.hex()})

    def state(self) -> dict[str, str]:
        """By party: "signed", "missing", or "wrong" if the signature is not that of this party under these terms."""
        return {one.name: self._state_of(one) for one in self.parties}

    def _state_of(self, party: Signatory) -> str:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
        from cryptography.hazmat.primitives.hashes import SHA384

        signature = self.signatures.get(party.name)
        if signature is None:
            return "missing"
        try:
            party.public.verify(bytes.fromhex(signature), _PURPOSE + self.canonical, ECDSA(SHA384()))
        except (InvalidSignature, ValueError):
            return "wrong"
        return "signed"

    def check_signed(self) -> None:
        """Raise `UsageError` unless every party has signed."""
        for name, state in self.state().items():
            if state == "missing":
                raise UsageError(f"{name} has not signed the terms of run {self.run}; it runs `terms sign`")
            if state == "wrong":
                raise UsageError(
                    f"the signature of {name} under run {self.run} is wrong: the terms changed after it signed, or "
                    "somebody else signed; ask it to read and sign them again"
                )

    def check_app(self, app: Path) -> None:
        """Raise `UsageError` if the code in an app's folder is not that of the terms."""
        if digest_of_app(app) != self.app:
            raise UsageError(f"the code in {app} differs from that of the terms of run {self.run}; get the same copy")

    def epsilon(self) -> float | None:
        """The largest ε of a party that sends a message in every round, computed from the noise of the terms.

        The settings in the terms are their author's words. None for a run without noise, for a method of the parties'
        own, whose code only they have, and for a model of more parameters than a reader may want to make room for.
        Raises `UsageError` if no rule covers the terms.
        """
        first = self.parties[0].agreed
        stated = first.method
        if stated.name not in registry.BUILT_IN or first.parameters > _LARGEST_MODEL:
            return None
        method = stated.build([stated.name])
        return max((spent for one in self.parties if (spent := one.agreed.epsilon(method)) is not None), default=None)

    def save(self, path: Path) -> None:
        whole = {"terms": self._facts(), "signatures": dict(self.signatures)}
        write_atomic(path, json.dumps(whole, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file of terms; its signatures are not checked. Raises `UsageError` if it is none."""
        try:
            whole = read_json(path, _LARGEST)
        except FileNotFoundError:
            raise UsageError(
                f"there are no terms at {path}; name the file that all parties sign, which `normec federation terms "
                "new` writes"
            ) from None
        try:
            terms, signatures = whole["terms"], whole["signatures"]
            if terms["format"] != FORMAT:
                raise UsageError(f"the terms have format {terms['format']}, this version reads {FORMAT}; update normec")
            parties = tuple(
                Signatory(one["name"], one["key"], AgreedTerms.from_facts(one["agreed"])) for one in terms["parties"]
            )
            found = cls(terms["run"], terms["app"], terms["settings"], terms["versions"], parties, signatures)
            texts = (found.run, found.app, *(text for one in parties for text in (one.name, one.key)))
            tables = (found.settings, found.versions, signatures)
            if not all(isinstance(text, str) for text in (*texts, *signatures.values())):
                raise TypeError("a name, a key, a digest or a signature is no text")
            if not all(isinstance(table, dict) for table in tables):
                raise TypeError("the settings, versions or signatures are no table")
            _ = found.canonical
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UsageError(
                f"{path} is no file of terms ({reason}); `normec federation terms new` writes one"
            ) from None
        if found._facts() != terms:
            raise UsageError(f"{path} contains entries that no terms have; do not sign it")
        try:
            found._check()
        except UsageError as error:
            raise UsageError(f"{path}: {error}; do not sign it") from None
        return found

    def _check(self) -> None:
        """Raise `UsageError` unless the parties have names and keys of their own, and terms of one and the same run.

        A person reads the terms once for all parties, and signatures are found by the names.
        """
        settings_of_run.read(self.settings)
        names = [one.name for one in self.parties]
        if not all(map(NAME.fullmatch, [*names, self.run])):
            raise UsageError("a name must be at most 64 letters, digits, '.', '-' and '_'")
        if not names or len({*names}) < len(names) or len({raw_key(one.public) for one in self.parties}) < len(names):
            raise UsageError("every party needs a name and a key of its own")
        first = self.parties[0].agreed
        for position, one in enumerate(self.parties):
            node, own = one.node, one.agreed
            if (own.run, own.node, own.index, own.parties) != (self.run, node, position, len(names)):
                raise UsageError(f"the terms of {one.name} are not those of party {position} with its key in this run")
            difference = first.differs_from(own)
            if difference is not None:
                raise UsageError(f"the terms of {names[0]} and {one.name} differ: {difference}")


def digest_of_app(app: Path) -> str:
    """SHA-256 of the names and contents of an app's code: all files that Python imports, and the schema of tables.

    Compiled copies of sources (`__pycache__`) and hidden folders are left out, because a party imports nothing from
    them (`import_from_source`). Raises `UsageError` for a link to a folder: Python would import what lies there, and
    that may change without the app.
    """
    found = hashlib.sha256()
    for path in sorted(app.rglob("*")):
        inside = path.relative_to(app)
        hidden = any(map(is_hidden, inside.parts))
        if not hidden and path.is_symlink() and path.is_dir():
            raise UsageError(f"{path} is a link to a folder, whose code the terms would not cover; copy the folder")
        if hidden or path.suffix not in _CODE or inside.name in _NOT_CODE or not path.is_file():
            continue
        content = read_bytes(path)
        found.update(f"{inside.as_posix()}\0{len(content)}\0".encode() + content)
    return found.hexdigest()


def public_key(text: bytes, where: str) -> EllipticCurvePublicKey:
    """Read a public key in OpenSSH's format. Raises `UsageError` if it is not one of an elliptic curve."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        found = load_ssh_public_key(text)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{where} is not a public key in OpenSSH format: {error}") from None
    if not isinstance(found, EllipticCurvePublicKey):
        raise UsageError(f"{where} must be an elliptic curve key (ssh-keygen -t ecdsa -b 384)")
    return found


def files_of(path: Path) -> list[Path]:
    """The files of terms at a path, which is one of them or a folder of them."""
    return sorted(path.glob("*.json")) if path.is_dir() else [path]


def agreed_by_all(path: Path, key: Path, app: Path) -> dict[str, AgreedTerms]:
    """The terms of the party with this private key, by the names of the runs; `path` is a file of terms or a folder.

    Raises:
        UsageError: A party has not signed, the party is none of them, or the code of the app is another.
    """
    from .supernode import read_private_key

    public, found = read_private_key(key).public_key(), dict[str, AgreedTerms]()
    for file in files_of(path):
        terms = SignedTerms.load(file)
        own = terms.party_of(public)
        terms.check_signed()
        terms.check_app(app)
        if terms.run in found:
            raise UsageError(f"{path} has two files of terms of run {terms.run}; keep the one that counts")
        found[terms.run] = own.agreed
    return found


def raw_key(public: Any) -> bytes:
    """A public key as Flower compares it."""
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    found: bytes = public_key_to_bytes(public)
    return found
