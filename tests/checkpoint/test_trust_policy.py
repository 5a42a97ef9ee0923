"""Who is trusted: keys, certificate identities with their issuers, and nobody else."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from tests.checkpoint.authority import (
    DAY,
    IDENTITY,
    ISSUER,
    Authority,
    certificate,
    der,
    new_authority,
    new_key,
    pem,
    usage,
    utf8_string,
    write,
)

from keepstep.checkpoint.format.layout import MARKER_SIGNED, MARKER_UNSIGNED, FolderName
from keepstep.checkpoint.save.commit import commit, writer_facts
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.trust.envelope import MAX_CERTIFICATES, fingerprint
from keepstep.checkpoint.trust.identity import _utf8_string
from keepstep.checkpoint.trust.keys import key_path, public_key_path, public_pem, signing_key
from keepstep.checkpoint.trust.manifest import UnsignedError, UntrustedKeyError, build_statement, sign_statement
from keepstep.checkpoint.trust.permits import Permit, parse_permit, read_permits, sign_permit
from keepstep.checkpoint.trust.policy import (
    ENV_SIGNER,
    ENV_TRUST_KEY,
    ENV_UNSIGNED,
    TrustOptions,
    TrustPolicy,
    check_manifest,
    check_options,
    check_signer_is_trusted,
    environment_of,
    load_policy,
    load_signer,
    merge_options,
    options_from_environment,
    policy_from_environment,
)
from keepstep.checkpoint.trust.signers import FileSigner, Signer, as_signer
from keepstep.records.errors import ConfigError, StorageError, VerificationError

NAME = FolderName(12, 3, 1, 0, "job7")
OTHER_ISSUER = "https://login.elsewhere.example"


def statement(created_ns: int | None = None) -> bytes:
    facts = writer_facts(NAME, world=1, parent=None, restored_step=0, restored_from=None, scope=None, life_started_ns=5)
    facts = msgspec.structs.replace(facts, created_ns=created_ns or time.time_ns())
    return build_statement(NAME.text, [], facts, marker=MARKER_SIGNED)


def signed(signer: Any, created_ns: int | None = None) -> bytes:
    return sign_statement(statement(created_ns), signer)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return new_authority()


@pytest.fixture
def policy(authority: Authority) -> TrustPolicy:
    return TrustPolicy(identities=((IDENTITY, ISSUER),), roots=(authority.root,))


class TestKeys:
    def test_the_default_is_the_key_of_this_installation(self) -> None:
        policy = policy_from_environment({})
        assert [fingerprint(key) for key in policy.keys] == [fingerprint(signing_key().public_key())]
        manifest = check_manifest(signed(signing_key()), MARKER_SIGNED, policy)
        assert manifest.key_sha256 == fingerprint(signing_key().public_key()) and manifest.facts is not None
        with pytest.raises(UntrustedKeyError, match=r"signed by key [0-9a-f]{16}, trusted is [0-9a-f]{16}$"):
            check_manifest(signed(new_key()), MARKER_SIGNED, policy)

    def test_any_of_several_keys_and_the_own_one_only_when_named(self, tmp_path: Path) -> None:
        keys = [new_key() for _ in range(3)]
        files = [write(tmp_path / f"{n}.pub", public_pem(key.public_key())) for n, key in enumerate(keys)]
        policy = policy_from_environment({ENV_TRUST_KEY: f"{files[0]}:{files[1]}"})
        for key in keys[:2]:
            assert check_manifest(signed(key), MARKER_SIGNED, policy).key_sha256 == fingerprint(key.public_key())
        for stranger in (keys[2], signing_key()):
            with pytest.raises(UntrustedKeyError):
                check_manifest(signed(stranger), MARKER_SIGNED, policy)

    def test_a_trusted_key_counts_whatever_its_certificate_says(self, authority: Authority) -> None:
        signer = authority.signer(end=datetime.datetime.now(datetime.UTC) - DAY / 2)
        policy = TrustPolicy(keys=(signer.public_key,))
        assert check_manifest(signed(signer), MARKER_SIGNED, policy).identity is None

    def test_the_hint_of_a_trusted_key_makes_it_damage(self) -> None:
        policy = policy_from_environment({})
        bundle = json.loads(signed(new_key()))
        bundle["verificationMaterial"] = {"publicKey": {"hint": fingerprint(policy.keys[0])}}
        with pytest.raises(VerificationError, match="signature does not match") as caught:
            check_manifest(json.dumps(bundle).encode(), MARKER_SIGNED, policy)
        assert not isinstance(caught.value, UntrustedKeyError)

    def test_nobody_trusts_nobody(self) -> None:
        with pytest.raises(UntrustedKeyError, match="nobody is trusted here"):
            check_manifest(signed(new_key()), MARKER_SIGNED, TrustPolicy())


class TestIdentities:
    def test_identity_and_issuer_are_read_from_the_certificate(self, authority: Authority, policy: TrustPolicy) -> None:
        signer = authority.signer()
        manifest = check_manifest(signed(signer), MARKER_SIGNED, policy)
        assert (manifest.identity, manifest.issuer) == (IDENTITY, ISSUER)
        assert manifest.key_sha256 == fingerprint(signer.public_key)

    def test_an_email_address_and_the_old_issuer_extension(self, authority: Authority) -> None:
        policy = TrustPolicy(identities=(("somebody@example.org", ISSUER),), roots=(authority.root,))
        signer = authority.signer(identity="somebody@example.org", issuer=None, old_issuer=ISSUER)
        assert check_manifest(signed(signer), MARKER_SIGNED, policy).identity == "somebody@example.org"
        # The new extension goes before the old one.
        liar = authority.signer(identity="somebody@example.org", issuer=OTHER_ISSUER, old_issuer=ISSUER)
        with pytest.raises(UntrustedKeyError):
            check_manifest(signed(liar), MARKER_SIGNED, policy)

    def test_one_certificate_alone_as_sigstore_writes_it(self, authority: Authority) -> None:
        """`certificate` in place of a chain; the intermediate is then among the trusted roots."""
        policy = TrustPolicy(identities=((IDENTITY, ISSUER),), roots=(authority.root, authority.middle))
        bundle = json.loads(signed(authority.signer()))
        chain = bundle["verificationMaterial"].pop("x509CertificateChain")
        bundle["verificationMaterial"]["certificate"] = chain["certificates"][0]
        assert check_manifest(json.dumps(bundle).encode(), MARKER_SIGNED, policy).identity == IDENTITY

    @pytest.mark.parametrize(
        ("leaf", "why"),
        [
            ({"identity": IDENTITY + "x"}, "signed by https://ci.example.org/train/job7x of issuer https://accounts"),
            ({"issuer": OTHER_ISSUER}, f"of issuer {OTHER_ISSUER}, trusted is {IDENTITY} of issuer {ISSUER}"),
            ({"issuer": None}, "names no issuer of that identity"),
            ({"identity": None}, "not valid at .* under the trusted roots"),
            ({"purpose": ExtendedKeyUsageOID.SERVER_AUTH}, "purposes other than code signing"),
            ({"sign": False}, "may not be used for signatures"),
            ({"ca": True}, "an authority's certificate signed"),
        ],
        ids=["identity", "issuer", "no issuer", "no identity", "purpose", "usage", "authority"],
    )
    def test_others_are_refused(
        self, authority: Authority, policy: TrustPolicy, leaf: dict[str, Any], why: str
    ) -> None:
        with pytest.raises(UntrustedKeyError, match=why):
            check_manifest(signed(authority.signer(**leaf)), MARKER_SIGNED, policy)

    def test_purposes_may_be_left_open(self, authority: Authority, policy: TrustPolicy) -> None:
        assert check_manifest(signed(authority.signer(purpose=None)), MARKER_SIGNED, policy).identity == IDENTITY

    def test_a_certificate_counts_at_the_time_of_signing(self, authority: Authority, policy: TrustPolicy) -> None:
        now = datetime.datetime.now(datetime.UTC)
        signer = authority.signer(begin=now - 20 * DAY, end=now - 10 * DAY)
        with pytest.raises(UntrustedKeyError, match="not valid at"):
            check_manifest(signed(signer), MARKER_SIGNED, policy)
        then_ns = int((now - 15 * DAY).timestamp()) * 1_000_000_000
        assert check_manifest(signed(signer, then_ns), MARKER_SIGNED, policy).identity == IDENTITY
        with pytest.raises(UntrustedKeyError, match="not valid at"):
            check_manifest(signed(signer, then_ns - 6 * 86_400_000_000_000), MARKER_SIGNED, policy)
        for absurd_ns in (1 << 62, -(1 << 62)):
            with pytest.raises(VerificationError):
                check_manifest(signed(signer, absurd_ns), MARKER_SIGNED, policy)

    def test_a_foreign_root_with_the_same_name_is_no_root(self, policy: TrustPolicy) -> None:
        foreign = new_authority()
        for chain in (foreign.signer().certificates, (*foreign.signer().certificates, *der(foreign.root))):
            key = new_key()
            signer = FileSigner(key, (der(foreign.leaf(key))[0], *chain[1:]))
            with pytest.raises(UntrustedKeyError, match="under the trusted roots"):
                check_manifest(signed(signer), MARKER_SIGNED, policy)

    def test_a_signer_cannot_issue_certificates(self, authority: Authority, policy: TrustPolicy) -> None:
        signer, key = authority.signer(), new_key()
        forged = certificate(
            "",
            key,
            "",
            signer.key,
            (x509.SubjectAlternativeName([x509.UniformResourceIdentifier(IDENTITY)]), True),
            (x509.UnrecognizedExtension(x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.8"), utf8_string(ISSUER)), False),
        )
        with pytest.raises(UntrustedKeyError):
            check_manifest(signed(FileSigner(key, (*der(forged), *signer.certificates))), MARKER_SIGNED, policy)

    @pytest.mark.parametrize("wrong", ["no authority", "may not issue", "purpose"])
    def test_only_an_authority_for_code_signing_issues_certificates(self, authority: Authority, wrong: str) -> None:
        middle_key, key = new_key(), new_key()
        purpose = ExtendedKeyUsageOID.CLIENT_AUTH if wrong == "purpose" else ExtendedKeyUsageOID.CODE_SIGNING
        middle = certificate(
            "middle",
            middle_key,
            "root",
            authority.root_key,
            (x509.BasicConstraints(wrong != "no authority", None), True),
            (usage(key_cert_sign=wrong != "may not issue", crl_sign=True), True),
            (x509.ExtendedKeyUsage([purpose]), False),
        )
        forged = msgspec.structs.replace(authority, middle=middle, middle_key=middle_key)
        policy = TrustPolicy(identities=((IDENTITY, ISSUER),), roots=(authority.root,))
        with pytest.raises(UntrustedKeyError, match="under the trusted roots"):
            check_manifest(signed(forged.signer(key)), MARKER_SIGNED, policy)

    def test_somebody_elses_certificate_on_an_own_signature(self, authority: Authority, policy: TrustPolicy) -> None:
        thief = FileSigner(new_key(), authority.signer().certificates)
        with pytest.raises(VerificationError, match="signature does not match"):
            check_manifest(signed(thief), MARKER_SIGNED, policy)

    def test_an_identity_is_worth_nothing_where_keys_are_trusted(self, authority: Authority) -> None:
        with pytest.raises(UntrustedKeyError, match=r"signed by key [0-9a-f]{16}, trusted is"):
            check_manifest(signed(authority.signer()), MARKER_SIGNED, policy_from_environment({}))

    @pytest.mark.parametrize("certificates", [[b"\x30\x00"], [b""], [b"x" * 300]])
    def test_rubbish_is_refused(self, policy: TrustPolicy, certificates: list[bytes]) -> None:
        bundle = json.loads(signed(new_key()))
        chain = [{"rawBytes": base64.b64encode(one).decode()} for one in certificates]
        bundle["verificationMaterial"] = {"x509CertificateChain": {"certificates": chain}}
        with pytest.raises(VerificationError):
            check_manifest(json.dumps(bundle).encode(), MARKER_SIGNED, policy)

    def test_chains_are_bounded(self, authority: Authority, policy: TrustPolicy) -> None:
        signer = authority.signer()
        long = FileSigner(signer.key, (signer.certificates[0], *signer.certificates[1:] * MAX_CERTIFICATES))
        with pytest.raises(VerificationError, match="9 certificates, the limit is 8"):
            check_manifest(signed(long), MARKER_SIGNED, policy)

    def test_keys_other_than_p256(self, authority: Authority, policy: TrustPolicy) -> None:
        leaf = authority.leaf(ec.generate_private_key(ec.SECP384R1()))
        with pytest.raises(VerificationError, match="not a P-256 key"):
            check_manifest(signed(FileSigner(new_key(), der(leaf))), MARKER_SIGNED, policy)

    @pytest.mark.parametrize("text", ["", "a", "a" * 127, "a" * 128, "a" * 300])
    def test_issuer_texts_of_any_length(self, text: str) -> None:
        size = len(text)
        length = (
            bytes([size]) if size < 128 else bytes([0x81, size]) if size < 256 else b"\x82" + size.to_bytes(2, "big")
        )
        assert _utf8_string(b"\x0c" + length + text.encode(), "x") == text.encode()
        for broken in (
            b"\x0c",
            b"\x0c" + length + text.encode() + b"x",
            b"\x13" + length + text.encode(),
            b"",
            b"\x0c\x81",
        ):
            with pytest.raises(VerificationError, match="not a DER UTF8String"):
                _utf8_string(broken, "x")


class TestAttacksOnAFolder:
    def committed(self, root: Path, signer: Signer | None) -> Path:
        place = PosixRoot(root)
        folder = place.make_folder(NAME)
        files = [place.put_file(folder, "a.bin", [b"weights"])]
        facts = writer_facts(
            NAME, world=1, parent=None, restored_step=0, restored_from=None, scope=None, life_started_ns=5
        )
        commit(place, folder, files, facts, signer)
        return root / folder

    def read(self, root: Path, policy: TrustPolicy) -> Any:
        marker = PosixRoot(root).marker(NAME.text)
        assert marker is not None
        return check_manifest(marker[1], marker[0], policy)

    def test_a_stripped_signature_is_not_accepted(self, root: Path) -> None:
        policy = policy_from_environment({})
        folder = self.committed(root, as_signer(signing_key()))
        bundle = json.loads((folder / MARKER_SIGNED).read_bytes())
        (folder / MARKER_UNSIGNED).write_bytes(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
        # Both are there: the signed one counts, and the other is a file nobody listed.
        assert self.read(root, policy).signed
        assert MARKER_UNSIGNED in (PosixRoot(root).files(NAME.text) or {})
        (folder / MARKER_SIGNED).unlink()
        with pytest.raises(UnsignedError):
            self.read(root, policy)
        assert not self.read(root, TrustPolicy(allow_unsigned=True)).signed

    def test_a_swapped_payload(self, root: Path) -> None:
        folder = self.committed(root, as_signer(signing_key()))
        bundle = json.loads((folder / MARKER_SIGNED).read_bytes())
        payload = base64.b64decode(bundle["dsseEnvelope"]["payload"]).replace(b'"step":12', b'"step":13')
        bundle["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
        (folder / MARKER_SIGNED).write_text(json.dumps(bundle))
        with pytest.raises(VerificationError, match="signature does not match"):
            self.read(root, policy_from_environment({}))

    def test_without_anybody_named_unsigned_mode_looks_at_no_signature(self, root: Path) -> None:
        self.committed(root, FileSigner(new_key()))
        assert self.read(root, TrustPolicy(allow_unsigned=True)).key_sha256 is None
        signing_key()
        with pytest.raises(UntrustedKeyError):
            self.read(root, policy_from_environment({ENV_UNSIGNED: "1"}))


class TestPermits:
    PERMIT = Permit(
        from_checkpoint="a",
        from_step=3,
        from_digest="1" * 64,
        to_checkpoint="b",
        to_step=1,
        to_digest="2" * 64,
        reason="loss spike",
        by="somebody@host",
        created_at="2026-01-01T00:00:00.000000000Z",
        created_ns=5,
        nonce="n",
    )

    def test_what_is_signed_comes_back(self) -> None:
        data = sign_permit(self.PERMIT, as_signer(signing_key()))
        assert read_permits({"x": data}, policy_from_environment({})) == ([self.PERMIT], [])

    def test_identities_sign_permits_too(self, authority: Authority, policy: TrustPolicy) -> None:
        permit = msgspec.structs.replace(self.PERMIT, created_ns=time.time_ns())
        assert parse_permit(sign_permit(permit, authority.signer()), "x", policy) == permit
        with pytest.raises(UntrustedKeyError, match="not valid at 1970-01-01"):
            parse_permit(sign_permit(self.PERMIT, authority.signer()), "x", policy)

    def test_others_count_for_nothing_and_are_said(self) -> None:
        policy = policy_from_environment({})
        good = sign_permit(self.PERMIT, as_signer(signing_key()))
        swapped = json.loads(good)
        payload = msgspec.json.encode(msgspec.structs.replace(self.PERMIT, to_step=2))
        swapped["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
        records = {
            "bare": msgspec.json.encode(self.PERMIT),
            "empty": b"",
            "manifest": signed(signing_key()),
            "stranger": sign_permit(self.PERMIT, FileSigner(new_key())),
            "swapped": json.dumps(swapped).encode(),
        }
        permits, problems = read_permits(records, policy)
        assert permits == []
        assert [problem.partition(":")[0] for problem in problems] == [f"rollback/{name}.json" for name in records]

    def test_a_permit_is_no_manifest(self) -> None:
        data = sign_permit(self.PERMIT, as_signer(signing_key()))
        with pytest.raises(VerificationError, match="not a payload of type"):
            check_manifest(data, MARKER_SIGNED, policy_from_environment({}))


class TestSettings:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"trust_identity": ("a",)}, "--trust-identity 'a' has no --trust-issuer: .* 1 identities and 0 issuers"),
            ({"trust_issuer": ("u",)}, "--trust-issuer 'u' has no --trust-identity"),
            ({"trust_identity": ("a", "b"), "trust_issuer": ("u",)}, "--trust-identity 'b' has no --trust-issuer"),
            ({"trust_identity": ("a",), "trust_issuer": ("u",)}, "--trust-identity 'a' needs --trust-root PEM"),
            ({"trust_root": ("r.pem",)}, "--trust-root 'r.pem': nobody is trusted by a root alone"),
            ({"ckpt_signer": "x"}, "--ckpt-signer 'x' needs --ckpt-signer-cert PEM"),
            ({"ckpt_signer_cert": "x"}, "--ckpt-signer-cert 'x' needs --ckpt-signer"),
            ({"unsigned": True, "trust_key": ("k",)}, "--unsigned and --trust-key contradict"),
            (
                {"unsigned": True, "ckpt_signer": "x", "ckpt_signer_cert": "y"},
                "--unsigned and --ckpt-signer contradict",
            ),
        ],
    )
    def test_what_does_not_fit_together(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            check_options(TrustOptions(**options))
        for load in (load_policy, load_signer):
            with pytest.raises(ConfigError, match=message):
                load(TrustOptions(**options))

    def test_settings_travel_through_the_environment(self) -> None:
        options = TrustOptions(
            trust_key=("/a/k.pub", "/b/k.pub"),
            trust_identity=(IDENTITY, "somebody@example.org"),
            trust_issuer=(ISSUER, ISSUER),
            trust_root=("/r.pem",),
            ckpt_signer="sign --key 'a b'",
            ckpt_signer_cert="/c.pem",
        )
        assert options_from_environment(environment_of(options)) == options
        assert environment_of(TrustOptions()) == {}
        assert options_from_environment({ENV_UNSIGNED: "0"}) == TrustOptions()

    @pytest.mark.parametrize(
        "options", [{"trust_key": ("a:b",)}, {"trust_identity": ("a b",)}, {"trust_issuer": ("",)}]
    )
    def test_what_no_variable_can_carry(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="--trust-"):
            environment_of(TrustOptions(**options))

    def test_what_belongs_together_comes_from_one_place(self) -> None:
        around = TrustOptions(trust_key=("k",), trust_identity=("a",), trust_issuer=("u",), trust_root=("r",))
        given = TrustOptions(trust_identity=("b",), trust_issuer=("v",))
        merged = merge_options(given, around)
        assert (merged.trust_key, merged.trust_identity, merged.trust_root) == (("k",), ("b",), ())
        assert merge_options(TrustOptions(), around) == around

    def test_bad_values_name_the_variable_or_the_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="KEEPSTEP_UNSIGNED='yes': give 1 or 0"):
            options_from_environment({ENV_UNSIGNED: "yes"})
        with pytest.raises(StorageError, match=r"cannot read the public key .*nowhere.pub"):
            policy_from_environment({ENV_TRUST_KEY: str(tmp_path / "nowhere.pub")})
        bad = write(tmp_path / "bad.pem", b"nothing")
        with pytest.raises(ConfigError, match=r"bad.pem is not a PEM public key"):
            policy_from_environment({ENV_TRUST_KEY: bad})
        options = TrustOptions(trust_identity=("a",), trust_issuer=("u",), trust_root=(bad,))
        with pytest.raises(ConfigError, match=r"--trust-root .*bad.pem: holds no PEM certificate"):
            load_policy(options)

    def test_unsigned_mode_makes_no_key(self) -> None:
        policy = policy_from_environment({ENV_UNSIGNED: "1"})
        assert policy.is_empty and policy.allow_unsigned and not key_path().exists()
        assert load_signer(options_from_environment({ENV_UNSIGNED: "1"})) is None

    def test_named_people_make_no_key(self, tmp_path: Path, authority: Authority) -> None:
        root = write(tmp_path / "root.pem", pem(authority.root))
        policy = load_policy(TrustOptions(trust_identity=(IDENTITY,), trust_issuer=(ISSUER,), trust_root=(root,)))
        assert policy.identities == ((IDENTITY, ISSUER),) and not policy.keys and not key_path().exists()

    def test_a_job_must_be_able_to_restore_what_it_writes(self, tmp_path: Path, authority: Authority) -> None:
        own = as_signer(signing_key())
        check_signer_is_trusted(own, policy_from_environment({}))
        stranger = write(tmp_path / "k.pub", public_pem(new_key().public_key()))
        with pytest.raises(
            ConfigError, match=r"signs with key [0-9a-f]{16}, which its own trust policy does not accept"
        ):
            check_signer_is_trusted(own, policy_from_environment({ENV_TRUST_KEY: stranger}))
        check_signer_is_trusted(own, policy_from_environment({ENV_TRUST_KEY: f"{stranger}:{public_key_path()}"}))
        policy = TrustPolicy(identities=((IDENTITY, ISSUER),), roots=(authority.root,))
        check_signer_is_trusted(authority.signer(), policy)
        with pytest.raises(ConfigError, match=r"does not accept \(signer: signed by .* of issuer .*elsewhere"):
            check_signer_is_trusted(authority.signer(issuer=OTHER_ISSUER), policy)

    def test_the_default_trusts_the_external_signer(self, tmp_path: Path) -> None:
        key = new_key()
        public = write(tmp_path / "k.pub", public_pem(key.public_key()))
        policy = load_policy(TrustOptions(ckpt_signer="true", ckpt_signer_cert=public))
        assert [fingerprint(k) for k in policy.keys] == [hashlib.sha256(Path(public).read_bytes()).hexdigest()]
        assert not key_path().exists() and ENV_SIGNER == "KEEPSTEP_CKPT_SIGNER"
