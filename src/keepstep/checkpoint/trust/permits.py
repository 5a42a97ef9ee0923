"""Permits: signed records by which a person allows, and wishes, to go back to an older checkpoint.

A permit is a DSSE envelope like a manifest's, with a payload type of its own, so neither can pass for the other. It names
the mark it was given for by the digest of that checkpoint's marker, and so is void as soon as there is newer progress; it
does not expire otherwise. It lies in the root as a side record of kind `rollback`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from keepstep.checkpoint.trust.envelope import decode, open_bundle, seal
from keepstep.checkpoint.trust.policy import TrustPolicy, check_signed
from keepstep.records.codec import to_json
from keepstep.records.errors import VerificationError

if TYPE_CHECKING:
    from keepstep.checkpoint.trust.signers import Signer

RECORD_KIND = "rollback"
PERMIT_TYPE = "application/vnd.keepstep.rollback+json"
SCHEMA = "keepstep.rollback/1"


class Permit(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.rollback/1`: with the mark at checkpoint `from_*`, checkpoint `to_*` may be restored, once.

    Digests are SHA-256 of the markers. `created_at` is RFC 3339, `created_ns` the same in UTC nanoseconds; `nonce` tells
    permits apart.
    """

    schema: str = SCHEMA
    from_checkpoint: str
    from_step: int
    from_digest: str
    to_checkpoint: str
    to_step: int
    to_digest: str
    reason: str
    by: str
    created_at: str
    created_ns: int
    nonce: str


def sign_permit(permit: Permit, signer: Signer) -> bytes:
    """The signed record. Raises SigningError."""
    return seal(to_json(permit), PERMIT_TYPE, signer)


def parse_permit(data: bytes, what: str, policy: TrustPolicy) -> Permit:
    """Check and read a signed record; `what` names it in messages. Raises VerificationError."""
    opened = open_bundle(data, what, PERMIT_TYPE)

    def read() -> Permit:
        permit: Permit = decode(opened.payload, Permit, what)
        if permit.schema != SCHEMA or not permit.nonce:
            raise VerificationError(f"{what}: is not a record of kind {SCHEMA}")
        return permit

    check_signed(opened, PERMIT_TYPE, policy, lambda: read().created_ns, what)
    return read()


def read_permits(records: Mapping[str, bytes], policy: TrustPolicy) -> tuple[list[Permit], list[str]]:
    """Permits among the side records of kind `rollback`, and what is wrong with the others; those count for nothing."""
    permits, problems = [], []
    for name, data in sorted(records.items()):
        try:
            permits.append(parse_permit(data, f"{RECORD_KIND}/{name}.json", policy))
        except VerificationError as error:
            problems.append(str(error))
    return permits, problems
